"""BERT-style encoders (Devlin 2019): tokens -> vectors -> classes, or masked tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache
from modules.config import (
    PoolerName,
    PoolName,
    StackConfig,
    check_choice,
    check_rates,
    check_sizes,
    require,
)
from modules.embedding import (
    TokenDropout,
    TokenEmbedding,
    embedding_stack,
    initialise_table,
    is_scaled,
    width_change,
)
from modules.feedforward import ACTIVATIONS
from modules.heads import POOLERS, ClassifierHead
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.lm_heads import MaskedLMHead, TokenModel
from modules.masks import is_cheap_to_read, padding
from modules.norm import norm_factory
from modules.pooling import POOLINGS, check_pool
from modules.position import build_position, check_position, grid_positions
from modules.transformer import Stack, check_variants


@dataclass(frozen=True)
class BertConfig:
    """Sizes and variants of an encoder for text, as a classifier or as a masked language model.

    Args:
        vocabulary: Number V of tokens; null: to be filled in from the tokenizer.
        num_classes: Number of classes; null: to be filled in from the data.
        max_length: Number of learned positions, and of tokens that pool "flatten" takes; other
            encodings also take longer sequences.
        segments: Number of kinds of segments (2 in BERT: first and second sentence); 0: none.
        position: Position encoding; an entry of `POSITIONS` in modules/position.py: none, learned,
            sinusoidal, rotary, alibi or t5.
        position_options: Options of that encoding, such as {base: 100}.
        scale_embedding: Multiply the vectors of tokens, E wide, by sqrt(E) (Vaswani 2017, section
            3.4); tables then start with std 1 / sqrt(E); null: only with sinusoidal positions.
        embedding_norm: A norm after the sum of the embeddings.
        pool: How vectors become one: the first token's, their mean, their maximum, attention from a
            learned query, a mean by learned weights ("sequence"), or a linear map of all, one after
            the other ("flatten").
        pooler: A layer between pooling and classifier: "tanh" (BERT, RoBERTa), "relu" (DistilBERT)
            or "none".
        pooler_dropout: Probability of dropping values before that layer (RoBERTa).
        head_dropout: Probability of dropping values before the classifier.
        token_dropout: Probability of dropping whole tokens, their vectors zero (Iyyer 2015).
        pad_id: Id of the padding token.
        embedding_width: Size of the embeddings of tokens, segments and positions, which a
            linear layer maps to `stack.width`; the masked language model's head maps back to it
            (Lan 2020, section 3.1); null: `stack.width`.
        next_sentence: The masked language model also predicts whether the second sentence follows
            the first.
        stack: The Transformer blocks.
    """

    vocabulary: int | None = None
    num_classes: int | None = None
    max_length: int = 512
    segments: int = 0
    position: str = "learned"
    position_options: dict[str, Any] = field(default_factory=dict)
    scale_embedding: bool | None = None
    embedding_norm: bool = False
    pool: PoolName = "cls"
    pooler: PoolerName = "none"
    pooler_dropout: float = 0.0
    head_dropout: float = 0.0
    token_dropout: float = 0.0
    pad_id: int = 0
    embedding_width: int | None = None
    next_sentence: bool = False
    stack: StackConfig = field(default_factory=StackConfig)

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "num_classes", "max_length", "embedding_width")
        check_pool(self.pool, self.stack)
        check_choice("pooler", self.pooler, POOLERS)
        check_variants(self.stack)
        stack = embedding_stack(self.stack, self.embedding_width)
        check_position(self.position, self.position_options, stack, (self.max_length,))
        require(self.segments >= 0, f"segments is {self.segments}; it cannot be negative.")
        require(
            0 <= self.pad_id < (self.vocabulary or self.pad_id + 1),
            f"pad_id {self.pad_id} is not a token of a vocabulary of {self.vocabulary}.",
        )
        require(
            not (self.stack.causal or self.stack.cross_attention),
            "An encoder needs stack.causal and stack.cross_attention off.",
        )
        require(
            not self.next_sentence or self.segments >= 2,
            "next_sentence needs two segments; set segments to 2.",
        )
        require(
            self.pooler != "none" or self.pooler_dropout == 0,
            "pooler_dropout has no effect without a pooler; choose a pooler, such as tanh, or set "
            "head_dropout.",
        )
        check_rates(self, "pooler_dropout", "head_dropout", "token_dropout")


class Encoder(nn.Module):
    """Token ids to contextual vectors. Raises `ValueError` if `vocabulary` is null."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise ValueError(
                "vocabulary is null; fill it in from the tokenizer before building an encoder."
            )
        self.config = config
        stack = config.stack
        embedded = embedding_stack(stack, config.embedding_width)
        width = embedded.width
        scaled = is_scaled(config.scale_embedding, config.position)
        self.embed = TokenEmbedding(config.vocabulary, width, scaled, config.pad_id)
        self.segment = nn.Embedding(config.segments, width) if config.segments else None
        self.position = build_position(
            config.position, config.position_options, embedded, (config.max_length,)
        )
        norm = norm_factory(stack)
        rate = config.token_dropout
        self.norm = norm(width) if config.embedding_norm else nn.Identity()
        self.token_dropout = TokenDropout(rate) if rate else nn.Identity()
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.project_in = width_change(width, stack.width, stack)
        self.stack = Stack(stack)
        initialise_table(self.embed, scaled, stack)
        for part in (self.segment, self.project_in):
            if part is not None:
                initialise(part, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: StackCache = NO_CACHE,
        num_outputs: int | None = None,
    ) -> Tensor:
        """Runs embeddings and blocks.

        Args:
            tokens: Integers (B, N).
            padding_mask: Boolean (B, N), False at padding; None: there is none.
            segments: Integers (B, N), each token's segment; None: the first everywhere.
            record: An `AttentionRecord`, which collects the attention weights of each block.
            num_outputs: Return the first `num_outputs` vectors only; None: all.

        Returns:
            (B, N or `num_outputs`, E); values at padding are undefined.

        Raises:
            ValueError: More tokens than learned positions, or segments that the model has no
                vectors for.
        """
        positions = grid_positions(tokens.shape[1:], tokens.device)  # (1, N, 1)
        bias = self.position.bias(positions, positions)
        mask = padding(padding_mask).with_bias(bias).with_outputs(num_outputs)
        x = self.token_dropout(self.embed(tokens))  # (B, N, embedding width)
        x = self.position.embed(self.add_segments(x, segments))
        x = self.project_in(self.dropout(self.norm(x)))  # (B, N, E)
        return self.stack(x, mask, self.position.rotate(positions), cache=record)

    def add_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """Adds the vectors of segments (B, N) to those of tokens (B, N, E)."""
        if self.segment is not None:
            known = self.segment.num_embeddings
            if segments is not None and is_cheap_to_read(segments):
                outside = segments.numel() > 0 and int(segments.max()) >= known
                require(not outside, f"This model knows segments 0 to {known - 1}; give those.")
            vectors = self.segment.weight[0] if segments is None else self.segment(segments)
            return x + vectors
        require(
            segments is None,
            "This model knows no segments; leave them out, or build it with segments: 2.",
        )
        return x


class BertClassifier(nn.Module):
    """Texts to class scores. Raises `ValueError` if `vocabulary` or `num_classes` is null."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise ValueError(
                "num_classes is null; fill it in from the data before building a classifier."
            )
        self.config = config
        stack = config.stack
        self.encoder = Encoder(config)
        pool = POOLINGS[config.pool]
        self.pool = pool(stack.width, stack.heads, config.max_length)
        pooler = POOLERS[config.pooler]
        self.pooler = pooler(stack.width, config.pooler_dropout)
        self.head = ClassifierHead(stack.width, config.num_classes, None, config.head_dropout)
        for part in (self.pool, self.pooler, self.head):
            initialise(part, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: StackCache = NO_CACHE,
    ) -> Tensor:
        """(B, N) -> logits (B, classes); arguments as in `Encoder.forward`."""
        x = self.encoder(tokens, padding_mask, segments, record, self.pool.num_read)
        return self.classify(x, padding_mask)

    def classify(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Vectors of the encoder, (B, N, E) or the pooled ones only -> logits (B, classes)."""
        mask = None if padding_mask is None else padding_mask.bool()
        return self.head(self.pooler(self.pool(x, mask)))


class BertMaskedLM(TokenModel):
    """Texts to the tokens that were masked in them, and to whether two sentences belong together.

    Raises `ValueError` if `vocabulary` is null.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        stack = config.stack
        self.encoder = Encoder(config)
        norm = norm_factory(stack)
        activation = ACTIVATIONS.get(stack.feedforward, nn.GELU)  # GELU for layers of your own
        self.head = MaskedLMHead(self.encoder.embed, stack.width, norm, activation, stack.bias)
        initialise(self.head, stack.init, stack.depth)
        if config.next_sentence:
            self.pooler = POOLERS["tanh"](stack.width, 0.0)
            self.sentence = ClassifierHead(stack.width, 2)
            initialise(self.pooler, stack.init, stack.depth)
            initialise(self.sentence, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """Scores of all tokens at chosen positions; other arguments as in `Encoder.forward`.

        Args:
            where: The positions: boolean (B, N), or integers (S,) into (B x N); None: all.

        Returns:
            Logits (S, V), in the order of `where`; with None (B x N, V).
        """
        return self.head(select(self.hidden(tokens, padding_mask, segments), where))

    def hidden(
        self, tokens: Tensor, padding_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """(B, N) -> vectors (B, N, E), for `loss` and `sentence_logits`."""
        return self.encoder(tokens, padding_mask, segments)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles also the encoder, which `hidden` calls; as in the base class."""
        super().compile(*args, **options)
        self.encoder.compile(*args, **options)

    def loss(
        self, hidden: Tensor, targets: Tensor, where: Tensor | None = None, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy at chosen positions, and number of correct predictions.

        Never holds all logits.

        Args:
            hidden: Vectors (B, N, E) of `hidden`.
            targets: Tokens (S,) at these positions, in order; -100 does not count.
            where: The positions, as in `forward`.
            smoothing: Label smoothing.
        """
        vectors = self.head.transform(select(hidden, where))  # (S, embedding width)
        return self.token_loss(self.head.tokens, vectors, targets, smoothing)

    def sentence_logits(self, hidden: Tensor) -> Tensor:
        """Vectors (B, N, E) -> logits (B, 2): class 0 if the second sentence follows."""
        require(
            self.config.next_sentence,
            "This model has no head for sentences; build it with next_sentence: true.",
        )
        return self.sentence(self.pooler(hidden[:, 0]))


def select(x: Tensor, where: Tensor | None) -> Tensor:
    """Vectors (B, N, E) at some positions, (S, E); `where` as in `BertMaskedLM.forward`."""
    rows = x.flatten(0, 1)  # (B N, E)
    if where is None:
        return rows
    if where.dtype == torch.bool:
        where = where.flatten().nonzero()[:, 0]  # (S,)
    return rows.index_select(0, where)


def _published(width: int, depth: int, heads: int) -> BertConfig:
    """BERT as published: post-norm, exact GELU, dropout of values and attention weights."""
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
    "large": _published(1024, 24, 16),
    "modern": BertConfig(position="rotary", pool="mean", stack=MODERN),
}
