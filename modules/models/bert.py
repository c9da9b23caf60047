"""BERT-style encoders (Devlin 2019): tokens -> vectors -> classes, or the tokens that were masked."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modules.config import (
    PoolerName,
    PoolName,
    PositionConfig,
    PositionName,
    StackConfig,
    check_rates,
    check_text,
    require,
)
from modules.embedding import TokenEmbedding
from modules.feedforward import ACTIVATIONS
from modules.heads import POOLERS, ClassifierHead, MaskedLMHead
from modules.init import initialise
from modules.kernels.cross_entropy import chunked_cross_entropy
from modules.kernels.dropout import Dropout, TokenDropout
from modules.masks import Mask, is_full, padding
from modules.memory import AttentionRecord
from modules.norm import norm_factory
from modules.pooling import POOLINGS
from modules.position import POSITIONS, grid_coordinates
from modules.transformer import FORGETFUL, Stack


@dataclass(frozen=True)
class BertConfig:
    """Sizes and variants of an encoder for text, as a classifier or as a masked language model.

    Args:
        vocabulary: Number V of tokens; null: to be filled in from the tokenizer.
        num_classes: Number of classes; null: to be filled in from the data.
        max_length: Number of learned positions; other encodings of positions also run on longer texts.
        segments: Number of kinds of segments (2 in BERT: first and second sentence); 0: none.
        position: Position encoding.
        position_base: Slowest wavelength of sinusoidal and rotary positions; null: 10000.
        rotary_fraction: Share of each head's channels that rotary positions turn.
        embedding_norm: A norm after the sum of the embeddings.
        pool: How vectors become one: the first token's, their mean, their max, or attention from a learned query.
        pooler: A layer between pooling and classifier: "tanh" (BERT, RoBERTa), "relu" (DistilBERT) or "none".
        pooler_dropout: Probability of dropping values before that layer (RoBERTa).
        head_dropout: Probability of dropping values before the classifier.
        token_dropout: Probability of dropping whole tokens, their vectors zero (Iyyer 2015).
        padding: Number of the padding token.
        next_sentence: The masked language model also tells whether the second sentence follows the first.
        stack: The Transformer blocks.
    """

    vocabulary: int | None = None
    num_classes: int | None = None
    max_length: int = 512
    segments: int = 0
    position: PositionName = "learned"
    position_base: float | None = None
    rotary_fraction: float = 1.0
    embedding_norm: bool = False
    pool: PoolName = "cls"
    pooler: PoolerName = "none"
    pooler_dropout: float = 0.0
    head_dropout: float = 0.0
    token_dropout: float = 0.0
    padding: int = 0
    next_sentence: bool = False
    stack: StackConfig = field(default_factory=StackConfig)

    def __post_init__(self) -> None:
        check_text(
            self.position,
            self.rotary_fraction,
            self.stack,
            vocabulary=self.vocabulary,
            num_classes=self.num_classes,
            max_length=self.max_length,
        )
        require(self.segments >= 0, f"segments is {self.segments}; it cannot be negative.")
        require(
            0 <= self.padding < (self.vocabulary or self.padding + 1),
            f"padding {self.padding} is no token of a vocabulary of {self.vocabulary}.",
        )
        require(
            not (self.stack.causal or self.stack.cross_attention),
            "An encoder sees the whole text and nothing else; leave stack.causal and stack.cross_attention off.",
        )
        require(
            not self.next_sentence or self.segments >= 2,
            "next_sentence needs two segments; set segments to 2.",
        )
        check_rates(self, "pooler_dropout", "head_dropout", "token_dropout")


class Encoder(nn.Module):
    """Token numbers to vectors that know their context.

    Args:
        config: Sizes and variants.

    Raises:
        ValueError: A position encoding does not fit the sizes, or the vocabulary is not filled in.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise ValueError(
                "vocabulary is null; fill it in from the tokenizer before building an encoder."
            )
        self.config, stack = config, config.stack
        self.embed = TokenEmbedding(config.vocabulary, stack.width, padding=config.padding)
        self.segment = nn.Embedding(config.segments, stack.width) if config.segments else None
        self.position = POSITIONS[config.position](position_config(config))
        norm = norm_factory(stack.norm, stack.norm_eps, stack.bias)
        self.norm = norm(stack.width) if config.embedding_norm else nn.Identity()
        self.token_dropout = (
            TokenDropout(config.token_dropout) if config.token_dropout else nn.Identity()
        )
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)
        for part in (self.embed, self.segment):  # the stack has initialised itself
            if part is not None:
                initialise(part, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Runs embeddings and blocks.

        Args:
            tokens: Integers (B, N).
            keep: Boolean (B, N), True where a real token stands; None: everywhere.
            segments: Integers (B, N), each token's segment; None: the first everywhere.
            record: Collects the attention weights of each block; None: they are not built.

        Returns:
            (B, N, E); what stands at padding means nothing.

        Raises:
            ValueError: More tokens than learned positions, or segments that the model has no vectors for.
        """
        coords = grid_coordinates(tokens.shape[1:], tokens.device)  # (1, N, 1)
        mask = Mask() if keep is None or is_full(keep) else padding(keep)
        mask = mask.with_bias(self.position.bias(coords, coords))
        x = self.token_dropout(self.embed(tokens))
        x = self.dropout(self.norm(self.position.embed(self.with_segments(x, segments))))
        return self.stack(x, mask, self.position.rotate(coords), None, record or FORGETFUL)

    def with_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """Adds the vectors of segments (B, N) to those of tokens (B, N, E)."""
        if self.segment is None:
            require(
                segments is None,
                "This model knows no segments; leave them out, or build it with segments: 2.",
            )
            return x
        return x + (self.segment.weight[0] if segments is None else self.segment(segments))


def position_config(config: BertConfig) -> PositionConfig:
    """What the position encoding of this encoder needs to know."""
    stack, base = config.stack, config.position_base or 10000.0
    return PositionConfig(
        stack.width,
        stack.heads,
        stack.head_width,
        (config.max_length,),
        base,
        config.rotary_fraction,
    )


class BertClassifier(nn.Module):
    """Texts to class scores.

    Args:
        config: Sizes and variants.

    Raises:
        ValueError: A position encoding does not fit the sizes, or vocabulary or classes are not filled in.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise ValueError(
                "num_classes is null; fill it in from the data before building a classifier."
            )
        self.config, stack = config, config.stack
        self.encoder = Encoder(config)
        self.pool = POOLINGS[config.pool](stack.width, stack.heads)
        self.pooler = POOLERS[config.pooler](stack.width, config.pooler_dropout)
        self.head = ClassifierHead(stack.width, config.num_classes, None, config.head_dropout)
        for part in (self.pool, self.pooler, self.head):
            initialise(part, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """(B, N) -> logits (B, classes); arguments as in `Encoder.forward`."""
        return self.head(self.features(tokens, keep, segments, record))

    def features(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """(B, N) -> pooled vectors (B, E), what the classifier sees; arguments as in `Encoder.forward`."""
        return self.pooler(self.pool(self.encoder(tokens, keep, segments, record), keep))


class BertMaskedLM(nn.Module):
    """Texts to the tokens that were masked in them, and to whether two sentences belong together.

    Args:
        config: Sizes and variants.

    Raises:
        ValueError: A position encoding does not fit the sizes, or the vocabulary is not filled in.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config, stack = config, config.stack
        self.encoder = Encoder(config)
        norm = norm_factory(stack.norm, stack.norm_eps, stack.bias)
        self.head = MaskedLMHead(
            self.encoder.embed, norm, ACTIVATIONS[stack.feedforward], stack.bias
        )
        initialise(self.head, stack.init, stack.depth)
        if config.next_sentence:
            self.pooler = POOLERS["tanh"](stack.width, 0.0)
            self.sentence = ClassifierHead(stack.width, 2)
            for part in (self.pooler, self.sentence):
                initialise(part, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """Scores of all tokens at the places asked for.

        Args:
            tokens: Integers (B, N).
            keep: Boolean (B, N), True where a real token stands; None: everywhere.
            segments: Integers (B, N), each token's segment; None: the first everywhere.
            where: Places: boolean (B, N), or numbers (S,) that count rows of (B, N) one after the other; None: all.

        Returns:
            Logits (S, V), in the order of `where`; with None (B x N, V).
        """
        return self.head(chosen(self.hidden(tokens, keep, segments), where))

    def hidden(
        self, tokens: Tensor, keep: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """(B, N) -> vectors (B, N, E), for `loss` and `sentence_logits`; arguments as in `forward`."""
        return self.encoder(tokens, keep, segments)

    def loss(
        self, hidden: Tensor, targets: Tensor, where: Tensor | None = None, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy at the chosen places and number of right guesses, without ever holding all logits.

        Args:
            hidden: Vectors (B, N, E) of `hidden`.
            targets: Right tokens (S,) at the chosen places, in order; -100 does not count.
            where: Places as in `forward`.
            smoothing: Label smoothing.
        """
        tokens = self.head.tokens
        vectors = self.head.vectors(chosen(hidden, where))
        return chunked_cross_entropy(vectors, tokens.weight, tokens.bias, targets, smoothing)

    def sentence_logits(self, hidden: Tensor) -> Tensor:
        """Vectors (B, N, E) -> logits (B, 2): 0 where the second sentence follows the first, 1 where it does not."""
        require(
            self.config.next_sentence,
            "This model has no head for sentences; build it with next_sentence: true.",
        )
        return self.sentence(self.pooler(hidden[:, 0]))


def chosen(x: Tensor, where: Tensor | None) -> Tensor:
    """Vectors (B, N, E) at some places, (S, E); `where` as in `BertMaskedLM.forward`."""
    rows = x.flatten(0, 1)  # (B N, E)
    if where is None:
        return rows
    return rows.index_select(
        0, where if where.dtype == torch.int64 else where.flatten().nonzero()[:, 0]
    )


def _published(width: int, depth: int, heads: int) -> BertConfig:
    """BERT as published: norms after the sums, exact GELU, dropout of values and attention weights."""
    stack = StackConfig(
        width,
        depth,
        heads,
        norm_eps=1e-12,
        order="post",
        dropout=0.1,
        mlp_dropout=0.0,
        attention_dropout=0.1,
    )
    return BertConfig(segments=2, embedding_norm=True, pooler="tanh", head_dropout=0.1, stack=stack)


MODERN = StackConfig(256, 4, 4, norm="rmsnorm", feedforward="geglu", bias=False, qkv_bias=False)
BERT_PRESETS: dict[str, BertConfig] = {
    "tiny": _published(128, 2, 2),
    "mini": _published(256, 4, 4),
    "small": _published(512, 4, 8),
    "base": _published(768, 12, 12),
    "modern": BertConfig(position="rotary", pool="mean", stack=MODERN),
}
