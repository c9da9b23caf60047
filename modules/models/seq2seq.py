"""Encoder-decoders (Vaswani 2017): a source text -> vectors; a target text, token after token, that looks at them."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from modules.config import PositionConfig, StackConfig, require
from modules.embedding import TokenEmbedding
from modules.heads import TokenHead
from modules.init import initialise
from modules.kernels.cross_entropy import chunked_cross_entropy
from modules.kernels.dropout import Dropout
from modules.kv_cache import Cache
from modules.masks import Mask, is_full, padding, prefix
from modules.memory import AttentionRecord, Places, StackMemory
from modules.models.seq2seq_config import SEQ2SEQ_PRESETS, Seq2SeqConfig
from modules.norm import norm_factory
from modules.position import POSITIONS
from modules.transformer import FORGETFUL, Source, Stack

__all__ = ["ARCHITECTURES", "SEQ2SEQ_PRESETS", "PrefixLM", "Seq2Seq", "Seq2SeqConfig"]


class Side(nn.Module):
    """Embedded tokens of one text to vectors that know their context: positions, norm, dropout, blocks.

    Args:
        config: Of the whole.
        stack: The blocks of this side.
        length: Number of learned positions.
    """

    def __init__(self, config: Seq2SeqConfig, stack: StackConfig, length: int) -> None:
        super().__init__()
        base = config.position_base or 10000.0
        sizes = stack.width, stack.heads, stack.head_width, (length,), base, config.rotary_fraction
        self.position = POSITIONS[config.position](PositionConfig(*sizes, causal=stack.causal))
        norm = norm_factory(stack.norm, stack.norm_eps, stack.bias)
        self.norm = norm(stack.width) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)

    def forward(
        self,
        x: Tensor,
        places: Places,
        mask: Mask,
        source: Source | None = None,
        memory: StackMemory = FORGETFUL,
    ) -> Tensor:
        """(B, N, E) -> (B, N, E), for tokens at `places`; other arguments as in `Stack.forward`."""
        mask = mask.with_bias(self.position.bias(places.new, places.all))
        x = self.norm(self.position.embed(x, None if places.in_order else places.new))
        return self.stack(self.dropout(x), mask, self.position.rotate(places.new), source, memory)


class Seq2Seq(nn.Module):
    """Source texts to vectors, and target texts to scores of the next token, given those.

    Args:
        config: Sizes and variants.

    Raises:
        ValueError: A position encoding does not fit the sizes, or vocabularies or lengths are not filled in.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        if (
            config.source_vocabulary is None
            or config.target_vocabulary is None
            or config.max_length is None
        ):
            raise ValueError(
                "A vocabulary or max_length is null; fill all in from the data before building a model."
            )
        self.config, self.max_length, width = config, config.max_length, config.decoder.width
        self.source_vocabulary, self.vocabulary = config.source_vocabulary, config.target_vocabulary
        self.embed = TokenEmbedding(self.vocabulary, width, config.scale_embedding)
        shared = config.tying in ("all", "inputs")
        self.source_embed = (
            None
            if shared
            else TokenEmbedding(self.source_vocabulary, width, config.scale_embedding)
        )
        self.unembed = (
            None if config.tying in ("all", "target") else TokenEmbedding(self.vocabulary, width)
        )
        self.head = TokenHead(
            self.embed if self.unembed is None else self.unembed, config.output_bias
        )
        for part in (
            self.embed,
            self.source_embed,
            self.unembed,
        ):  # the stacks initialise themselves
            if part is not None and config.scale_embedding:
                nn.init.normal_(
                    part.weight, std=width**-0.5
                )  # so that vectors and scores start with variance 1
            elif part is not None:
                initialise(part, config.decoder.init, config.decoder.depth)
        self.add_sides(self.max_length)

    def add_sides(self, length: int) -> None:
        """Makes what reads embedded tokens, for texts of up to `length` of them."""
        self.encoder = Side(self.config, self.config.encoder, length)
        self.decoder = Side(self.config, self.config.decoder, length)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        source_keep: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Teacher forcing: what follows each token of the target, given those before it and the source.

        Args:
            source: Integers (B, M).
            tokens: Integers (B, N): the targets moved right, beginning with the start token.
            source_keep: As `keep` of `encode`.
            keep: As `keep` of `decode`.

        Returns:
            (B, N, E); what stands at padding means nothing.
        """
        return self.decode(tokens, self.encode(source, source_keep), keep)

    def encode(
        self, source: Tensor, keep: Tensor | None = None, record: AttentionRecord | None = None
    ) -> Source:
        """Reads source texts.

        Args:
            source: Integers (B, M).
            keep: Boolean (B, M), False at padding, which stands on the right; None: there is none.
            record: Collects the attention weights of each block; None: they are not built.

        Returns:
            What `decode` looks at: states (B, M, E), and who may see which.

        Raises:
            ValueError: More tokens than learned positions.
        """
        memory, mask = (
            record or FORGETFUL,
            Mask() if keep is None or is_full(keep) else padding(keep),
        )
        return Source(
            self.encoder(
                self.embedded(source), memory.place(source, None, None), mask, None, memory
            ),
            mask,
        )

    def embedded(self, source: Tensor) -> Tensor:
        """Tokens of source texts (B, M) -> their vectors (B, M, E)."""
        return (self.embed if self.source_embed is None else self.source_embed)(source)

    def decode(
        self,
        tokens: Tensor,
        source: Source,
        keep: Tensor | None = None,
        cache: StackMemory | None = None,
    ) -> Tensor:
        """Reads target texts.

        Args:
            tokens: Integers (B, N), beginning with the start token unless a cache goes on.
            source: Made by `encode`.
            keep: Boolean (B, N), False at padding, which does not count as a position; None: there is none, or it
                stands on the right, where no token sees it.
            cache: Made by `make_cache`: tokens that were there before and are seen too. It is filled with these.
                A record collects the attention weights of each block instead.

        Returns:
            (B, N, E); what stands at padding means nothing.

        Raises:
            ValueError: More tokens than learned positions or than the cache has room for.
        """
        memory = cache or FORGETFUL
        places = memory.place(tokens, keep, None)
        return self.decoder(self.embed(tokens), places, places.mask(keep), source, memory)

    def make_cache(self, source: Source, length: int) -> Cache:
        """A cache for target texts of up to `length` tokens, one for each source, on the device of the weights.

        Raises:
            ValueError: `length` is more than there are learned positions.
        """
        require(
            self.config.position != "learned" or length <= self.max_length,
            f"A cache of {length} tokens is longer than the {self.max_length} learned positions; shorten it.",
        )
        length += self.in_front(source)
        return Cache.beside(
            self.embed.weight, self.decoder.stack.config, len(source.states), length
        )

    def in_front(self, source: Source) -> int:
        """Number of tokens that the decoder's blocks read before the target."""
        return 0

    def logits(self, hidden: Tensor) -> Tensor:
        """Vectors (..., E) -> scores (..., V) of the token that follows each."""
        return self.head(hidden)

    def loss(
        self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and number of right guesses; arguments as in `Decoder.loss`.

        Args:
            hidden: Vectors (B, N, E) of `forward`.
            targets: The tokens that follow, (B, N); -100 does not count.
            smoothing: Label smoothing (Szegedy 2016).
            z_loss: Weight of the mean squared logarithm of the softmax's denominator (Chowdhery 2022).
        """
        head, rows = self.head, hidden.flatten(0, 1)  # (B, N, E) -> (B N, E)
        return chunked_cross_entropy(
            rows, head.weight, head.bias, targets.flatten(), smoothing, z_loss=z_loss
        )


class PrefixLM(Seq2Seq):
    """One stack that reads the source, then the target: source tokens see each other, target tokens the source and what
    came before (Raffel 2020, 3.2.1). Arguments and methods as `Seq2Seq`; `encode` embeds only.
    """

    def add_sides(self, length: int) -> None:
        """Makes what reads embedded tokens: both texts one behind the other, up to `length` tokens each."""
        stack = replace(self.config.decoder, causal=False, cross_attention=False, source_width=None)
        self.decoder = Side(self.config, stack, 2 * length)

    def encode(
        self, source: Tensor, keep: Tensor | None = None, record: AttentionRecord | None = None
    ) -> Source:
        """As `Seq2Seq.encode`, but there is nothing to record before the target is read."""
        return Source(
            self.embedded(source), Mask() if keep is None or is_full(keep) else padding(keep)
        )

    def decode(
        self,
        tokens: Tensor,
        source: Source,
        keep: Tensor | None = None,
        cache: StackMemory | None = None,
    ) -> Tensor:
        """As `Seq2Seq.decode`; positions go on behind the source's last token."""
        memory, x = cache or FORGETFUL, self.embed(tokens)  # (B, N, E)
        first = self.in_front(source) if memory.filled == 0 else 0
        if first:
            x, keep = (
                torch.cat((source.states, x), 1),
                together(source, keep, tokens),
            )  # (B, M + N, E), (B, M + N)
        places = memory.place(x[..., 0], keep, None)
        order = prefix(first, x.shape[1], x.device) if first else memory.order(x.shape[1], x.device)
        return self.decoder(x, places, places.mask(keep) & order, None, memory)[:, first:]

    def in_front(self, source: Source) -> int:
        """Number of tokens that the decoder's blocks read before the target."""
        return source.states.shape[1]


def together(source: Source, keep: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Which tokens of a source and of its target (B, N) are no padding: boolean (B, M + N); None: all."""
    allowed, length = source.mask.allowed, source.states.shape[1]
    if allowed is None and keep is None:
        return None
    both = torch.ones(
        len(tokens), length + tokens.shape[1], dtype=torch.bool, device=tokens.device
    )  # (B, M + N)
    if allowed is not None:
        both[:, :length] = allowed[:, 0, 0]
    if keep is not None:
        both[:, length:] = keep
    return both


ARCHITECTURES: dict[str, type[Seq2Seq]] = {"encoder_decoder": Seq2Seq, "prefix": PrefixLM}
