"""GPT-style decoders (Radford 2019): tokens -> vectors that know what came before -> the next token."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from modules.config import (
    PositionConfig,
    PositionName,
    RotaryScaling,
    StackConfig,
    check_text,
    require,
)
from modules.embedding import TokenEmbedding
from modules.heads import TokenHead
from modules.init import initialise
from modules.kernels.cross_entropy import chunked_cross_entropy
from modules.kernels.dropout import Dropout
from modules.kv_cache import Cache
from modules.masks import Mask
from modules.masks import documents as same_document
from modules.memory import Places, StackMemory
from modules.position import POSITIONS
from modules.transformer import FORGETFUL, Stack


def causal_stack() -> StackConfig:
    """The blocks of a decoder where nothing else is said."""
    return StackConfig(causal=True)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder for text.

    Args:
        vocabulary: Number V of tokens; null: to be filled in from the tokenizer.
        max_length: Context T, in tokens: number of learned positions, and how far generation looks back; null: to be
            filled in from the data.
        position: Position encoding.
        position_base: Slowest wavelength of sinusoidal and rotary positions; null: 10000.
        rotary_fraction: Share of each head's channels that rotary positions turn.
        rotary_scaling: Slower rotary positions, for longer texts; null: none.
        sliding_window: Window of attention that the weights were trained with, in tokens (Jiang 2023). Windows are
            not implemented: full attention is the same up to this length, so `max_length` cannot be more; null: none.
        tied: The output layer shares the embedding's table (Press 2017); false: it has its own.
        stack: The Transformer blocks; causal, without cross-attention.
    """

    vocabulary: int | None = None
    max_length: int | None = None
    position: PositionName = "learned"
    position_base: float | None = None
    rotary_fraction: float = 1.0
    rotary_scaling: RotaryScaling | None = None
    sliding_window: int | None = None
    tied: bool = True
    stack: StackConfig = field(default_factory=causal_stack)

    def __post_init__(self) -> None:
        sizes = {
            "vocabulary": self.vocabulary,
            "max_length": self.max_length,
            "sliding_window": self.sliding_window,
        }
        check_text(self.position, self.rotary_fraction, self.stack, **sizes)
        require(
            self.rotary_scaling is None or self.position == "rotary",
            f'rotary_scaling is set but position is "{self.position}"; use position "rotary" or leave it out.',
        )
        window, length = self.sliding_window, self.max_length
        require(
            window is None or length is None or length <= window,
            f"max_length {length} is more than sliding_window {window}, which is not supported; "
            f"use {window} tokens at most.",
        )
        require(
            self.stack.causal and not self.stack.cross_attention,
            "A decoder sees what came before and nothing else; set stack.causal and leave stack.cross_attention off.",
        )


class Decoder(nn.Module):
    """Tokens to vectors that know what came before, and to scores of the next token.

    Args:
        config: Sizes and variants.

    Raises:
        ValueError: A position encoding does not fit the sizes, or vocabulary or context are not filled in.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocabulary is None or config.max_length is None:
            raise ValueError(
                "vocabulary or max_length is null; fill both in from the data before building a decoder."
            )
        self.config, stack = config, config.stack
        self.max_length, self.vocabulary = config.max_length, config.vocabulary
        self.embed = TokenEmbedding(config.vocabulary, stack.width)
        self.position = POSITIONS[config.position](position_config(config, self.max_length))
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)
        self.unembed = None if config.tied else TokenEmbedding(config.vocabulary, stack.width)
        self.head = TokenHead(self.embed if self.unembed is None else self.unembed)
        for part in (self.embed, self.unembed):  # the stack has initialised itself
            if part is not None:
                initialise(part, stack.init, stack.depth)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        coords: Tensor | None = None,
        documents: Tensor | None = None,
        cache: StackMemory | None = None,
    ) -> Tensor:
        """Runs embeddings and blocks.

        Args:
            tokens: Integers (B, N).
            keep: Boolean (B, N), False at padding, which stands on the left; None: there is none.
            coords: Integers (B, N), each token's position; None: 0, 1, ... from the first token that is no padding, or
                on from where the cache stopped.
            documents: Integers (B, N), the same number for tokens of the same document, which see only each other;
                None: all tokens of a row belong together.
            cache: Made by `make_cache`: tokens that were there before and are seen too. It is filled with these.

        Returns:
            (B, N, E); what stands at padding means nothing.

        Raises:
            ValueError: More tokens than learned positions or than the cache has room for.
        """
        cache = cache or FORGETFUL
        places = cache.place(tokens, keep, coords)
        mask = self.mask(places, keep, documents).with_bias(
            self.position.bias(places.new, places.all)
        )
        x = self.position.embed(self.embed(tokens), None if places.in_order else places.new)
        return self.stack(self.dropout(x), mask, self.position.rotate(places.new), None, cache)

    @staticmethod
    def mask(places: Places, keep: Tensor | None, documents: Tensor | None) -> Mask:
        """Who may attend to whom, but for the order: padding is hidden, and other documents."""
        mask = places.mask(keep)
        if documents is None:
            return mask
        require(
            places.all.shape[1] == documents.shape[1],
            "Packed documents cannot go on from a cache; pass one or none.",
        )
        return mask & same_document(documents)

    def make_cache(self, batch: int, length: int) -> Cache:
        """A cache for `batch` rows of up to `length` tokens, on the device of the weights.

        Raises:
            ValueError: `length` is more than there are learned positions.
        """
        require(
            self.config.position != "learned" or length <= self.max_length,
            f"A cache of {length} tokens is longer than the {self.max_length} learned positions; shorten it.",
        )
        return Cache.beside(self.embed.weight, self.config.stack, batch, length)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vectors (..., E) -> scores (..., V) of the token that follows each."""
        return self.head(hidden)

    def loss(
        self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and number of right guesses, without ever holding all logits.

        Args:
            hidden: Vectors (B, N, E) of `forward`.
            targets: The tokens that follow, (B, N); -100 does not count.
            smoothing: Label smoothing.
            z_loss: Weight of the mean squared logarithm of the softmax's denominator (Chowdhery 2022).
        """
        return chunked_cross_entropy(
            hidden.flatten(0, 1),
            self.head.weight,
            None,
            targets.flatten(),
            smoothing,
            z_loss=z_loss,
        )  # (B, N, E) -> (B N, E)


def position_config(config: DecoderConfig, max_length: int) -> PositionConfig:
    """What the position encoding of this decoder needs to know."""
    stack = config.stack
    return PositionConfig(
        stack.width,
        stack.heads,
        stack.head_width,
        (max_length,),
        config.position_base or 10000.0,
        config.rotary_fraction,
        causal=True,
        scaling=config.rotary_scaling,
    )


def _gpt2(width: int, depth: int, heads: int, max_length: int = 1024) -> DecoderConfig:
    """GPT-2 as published (Radford 2019), without its dropout."""
    stack = StackConfig(
        width, depth, heads, feedforward="gelu_tanh", norm_eps=1e-5, causal=True, init="gpt2"
    )
    return DecoderConfig(max_length=max_length, stack=stack)


def _llama(width: int, depth: int, heads: int, kv_heads: int, max_length: int) -> DecoderConfig:
    """Llama's blocks (Touvron 2023): RMSNorm, rotary positions, SwiGLU, grouped heads, no biases, own output layer."""
    stack = StackConfig(
        width,
        depth,
        heads,
        kv_heads,
        feedforward="swiglu",
        norm="rmsnorm",
        norm_eps=1e-5,
        bias=False,
        qkv_bias=False,
        causal=True,
        init="gpt2",
    )
    return DecoderConfig(max_length=max_length, position="rotary", tied=False, stack=stack)


DECODER_PRESETS: dict[str, DecoderConfig] = {
    "tiny": _gpt2(128, 4, 4, 256),
    "small": _gpt2(384, 6, 6),
    "gpt2": _gpt2(768, 12, 12),
    "llama": _llama(768, 12, 12, 4, 2048),
}
