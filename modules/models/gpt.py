"""GPT-style decoders (Radford 2019): tokens -> vectors -> the next token."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache
from modules.config import StackConfig, check_sizes, require
from modules.embedding import TokenEmbedding
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.kv_cache import KVCache
from modules.lm_heads import NextTokenModel, TokenHead
from modules.masks import documents as same_document
from modules.position import build_position, check_position
from modules.transformer import Stack


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder for text.

    Args:
        vocabulary: Number V of tokens; null: to be filled in from the tokenizer.
        max_length: Longest sequence, in tokens: number of learned positions, and context of
            generation; null: to be filled in from the data.
        position: Position encoding, an entry of `POSITIONS` in modules/position.py, such as
            learned, rotary or none.
        position_options: Options of that encoding, such as {base: 500000}.
        sliding_window: Window of attention that the weights were trained with, in tokens (Jiang
            2023). Windows are not implemented: full attention is the same up to this length, so
            `max_length` cannot be more; null: none.
        tied: The output layer shares the embedding's table (Press 2017); false: it has its own.
        stack: The Transformer blocks; causal, without cross-attention.
    """

    vocabulary: int | None = None
    max_length: int | None = None
    position: str = "learned"
    position_options: dict[str, Any] = field(default_factory=dict)
    sliding_window: int | None = None
    tied: bool = True
    stack: StackConfig = field(default_factory=lambda: StackConfig(causal=True))

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "max_length", "sliding_window")
        check_position(
            self.position, self.position_options, self.stack, grid=(self.max_length or 1,)
        )
        window = self.sliding_window
        require(
            window is None or self.max_length is None or self.max_length <= window,
            f"max_length {self.max_length} is more than sliding_window {window}, which is not "
            f"supported; use {window} tokens at most.",
        )
        require(
            self.stack.causal and not self.stack.cross_attention,
            "A decoder needs stack.causal on and stack.cross_attention off.",
        )


class Decoder(NextTokenModel):
    """Tokens to hidden states (`forward`), which `logits` turns into logits of the next token.

    Raises `ValueError` if `vocabulary` or `max_length` of the config is null.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocabulary is None or config.max_length is None:
            raise ValueError("vocabulary or max_length is null; fill both in from the data first.")
        self.config = config
        self.max_length = config.max_length
        self.vocabulary = config.vocabulary
        stack = config.stack
        self.embed = TokenEmbedding(config.vocabulary, stack.width)
        self.position = build_position(
            config.position, config.position_options, stack, (self.max_length,)
        )
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)
        initialise(self.embed, stack.init, stack.depth)
        self.unembed = None
        table = self.embed
        if not config.tied:
            table = self.unembed = TokenEmbedding(config.vocabulary, stack.width)
            initialise(table, stack.init, stack.depth)
        self.head = TokenHead(table)

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: StackCache = NO_CACHE,
    ) -> Tensor:
        """Runs embeddings and blocks; `logits` makes next-token logits of the result.

        Args:
            tokens: Integers (B, N).
            padding_mask: Boolean (B, N), False at padding, on the left; None: there is none.
            positions: Integers (B, N); None: they count from 0 at the first token that is no
                padding, or on from those in the cache.
            documents: Integers (B, N), the same number for tokens of the same document, which
                attend only to each other; None: a row is one document.
            cache: Made by `make_cache`: the tokens also attend to those in it, and are appended.

        Returns:
            Hidden states (B, N, E); those at padding are undefined.

        Raises:
            ValueError: More tokens than learned positions or than the cache has room for.
        """
        token_positions = cache.add_tokens(tokens, padding_mask, positions)
        mask = token_positions.mask(padding_mask)
        if documents is not None:
            require(
                not isinstance(cache, KVCache),
                "Packed documents cannot continue a cache: later tokens would see all of them.",
            )
            mask = mask & same_document(documents)
        new = token_positions.new
        mask = mask.with_bias(self.position.bias(new, token_positions.all))
        # None: new tokens are at 0, 1, ... in every row, which saves a look-up
        x = self.position.embed(self.embed(tokens), None if token_positions.in_order else new)
        return self.stack(self.dropout(x), mask, self.position.rotate(new), cache=cache)

    def make_cache(self, batch: int, length: int) -> KVCache:
        """A cache for `batch` rows of up to `length` tokens, on the device of the weights.

        Raises `ValueError` if `length` is more than there are learned positions.
        """
        self.position.check_length(length)
        return KVCache.like(self.embed.weight, self.config.stack, batch, length)


def _gpt2(width: int, depth: int, heads: int, max_length: int = 1024) -> DecoderConfig:
    """GPT-2's architecture (Radford 2019) without dropout; "gpt2" has its size."""
    stack = StackConfig(
        width, depth, heads, feedforward="gelu_tanh", norm_eps=1e-5, causal=True, init="gpt2"
    )
    return DecoderConfig(max_length=max_length, stack=stack)


def _llama(width: int, depth: int, heads: int, kv_heads: int, max_length: int) -> DecoderConfig:
    """Llama (Touvron 2023): RMSNorm, rotary positions, SwiGLU, grouped queries, no biases."""
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
