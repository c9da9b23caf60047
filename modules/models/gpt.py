"""GPT-style decoders (Radford 2019): tokens -> vectors -> the next token."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache
from modules.config import StackConfig, check_sizes, default, require
from modules.embedding import (
    TokenEmbedding,
    embedding_stack,
    initialise_table,
    is_scaled,
    width_change,
)
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.kv_cache import KVCache
from modules.lm_heads import NextTokenModel, TokenHead
from modules.masks import documents as same_document
from modules.position import build_position, check_position
from modules.transformer import Stack, check_variants


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder for text.

    Args:
        vocabulary: Number V of tokens; null: to be filled in from the tokenizer.
        max_length: Longest sequence, in tokens: number of learned positions, and context of
            generation; null: to be filled in from the data.
        position: Position encoding; an entry of `POSITIONS` in modules/position.py: none, learned,
            sinusoidal, rotary, alibi or t5.
        position_options: Options of that encoding, such as {base: 500000}.
        sliding_window: Window of attention that the weights were trained with, in tokens (Jiang
            2023). Windows are not implemented: full attention is the same up to this length, so
            `max_length` cannot be more; null: none.
        tied: The output layer shares the embedding's table (Press 2017); false: it has its own.
        output_vocabulary: Number of tokens that can be predicted, the first ones of the vocabulary;
            not with `tied`; null: all.
        scale_embedding: Multiply the vectors of tokens, E wide, by sqrt(E) (Vaswani 2017, section
            3.4); tables then start with std 1 / sqrt(E), and, if `tied`, blocks with Xavier's
            values in place of trunc_normal's or gpt2's; null: only with sinusoidal positions.
        embedding_width: Size of the embeddings of tokens and positions, which a linear layer
            maps to `stack.width`; if `tied`, another one maps the blocks' results back (Lan 2020,
            section 3.1); null: `stack.width`.
        stack: The Transformer blocks, without cross-attention. With causal false each token sees
            the one that it must predict: only to show why decoders have a causal mask.
    """

    vocabulary: int | None = None
    max_length: int | None = None
    position: str = "learned"
    position_options: dict[str, Any] = field(default_factory=dict)
    sliding_window: int | None = None
    tied: bool = True
    output_vocabulary: int | None = None
    scale_embedding: bool | None = None
    embedding_width: int | None = None
    stack: StackConfig = field(default_factory=lambda: StackConfig(causal=True))

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "output_vocabulary", "max_length", "sliding_window")
        check_sizes(self, *sizes, "embedding_width")
        check_variants(self.stack)
        stack = embedding_stack(self.stack, self.embedding_width)
        check_position(self.position, self.position_options, stack, grid=(self.max_length or 1,))
        window = self.sliding_window
        require(
            window is None or self.max_length is None or self.max_length <= window,
            f"max_length {self.max_length} is more than sliding_window {window}, which is not "
            f"supported; use {window} tokens at most.",
        )
        require(
            not self.stack.cross_attention,
            "A decoder needs stack.cross_attention off.",
        )
        outputs = self.output_vocabulary
        require(
            outputs is None or not self.tied,
            "output_vocabulary needs an output layer of its own; set tied to false.",
        )
        require(
            outputs is None or self.vocabulary is None or outputs <= self.vocabulary,
            f"output_vocabulary {outputs} is more than vocabulary {self.vocabulary}; lower it.",
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
        scaled = is_scaled(config.scale_embedding, config.position)
        stack = config.stack
        if scaled and config.tied and stack.init in ("trunc_normal", "gpt2"):
            # Vectors of std 1 make a tied output layer repeat the token, until the sum of blocks
            # that start with std 0.02 is as large; Xavier's are at once.
            stack = replace(stack, init="xavier")
        embedded = embedding_stack(stack, config.embedding_width)
        self.embed = TokenEmbedding(config.vocabulary, embedded.width, scaled)
        self.position = build_position(
            config.position, config.position_options, embedded, (self.max_length,)
        )
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.project_in = width_change(embedded.width, stack.width, stack)
        self.stack = Stack(stack)
        initialise_table(self.embed, scaled, stack)
        self.unembed = None
        table = self.embed
        if not config.tied:
            outputs = default(config.output_vocabulary, config.vocabulary)
            table = self.unembed = TokenEmbedding(outputs, stack.width)
            initialise_table(table, scaled, stack)
        self.project_out = width_change(stack.width, table.embedding_dim, stack)
        for part in (self.project_in, self.project_out):
            initialise(part, stack.init, stack.depth)
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
            Hidden states (B, N, E), or (B, N, embedding width) if `tied`; those at padding are
            undefined.

        Raises:
            ValueError: More tokens than learned positions, than `sliding_window` or than the cache
                has room for.
        """
        self.check_window(tokens.shape[1])
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
        x = self.project_in(self.dropout(x))  # (B, N, embedding width) -> (B, N, E)
        return self.project_out(self.stack(x, mask, self.position.rotate(new), cache=cache))

    def make_cache(self, batch: int, length: int) -> KVCache:
        """A cache for `batch` rows of up to `length` tokens, on the device of the weights.

        Raises `ValueError` if `length` is more than `sliding_window`, or than there are learned
        positions.
        """
        self.check_window(length)
        self.position.check_length(length)
        return KVCache.like(self.embed.weight, self.config.stack, batch, length)

    def check_window(self, length: int) -> None:
        """Raises `ValueError` if `length` is more than `sliding_window`."""
        window = self.config.sliding_window
        if window is not None and length > window:
            raise ValueError(
                f"{length} tokens are more than sliding_window {window}, which is not supported; "
                f"give {window} at most."
            )


def _gpt2(width: int, depth: int, heads: int, max_length: int = 1024) -> DecoderConfig:
    """GPT-2's architecture (Radford 2019) without dropout."""
    stack = StackConfig(
        width, depth, heads, feedforward="gelu_tanh", norm_eps=1e-5, causal=True, init="gpt2"
    )
    return DecoderConfig(max_length=max_length, stack=stack)


def _llama(width: int, depth: int, heads: int, kv_heads: int, max_length: int) -> DecoderConfig:
    """As Llama 2 (Touvron 2023): RMSNorm, rotary positions, SwiGLU, grouped queries, no biases."""
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
    "gpt2_medium": _gpt2(1024, 24, 16),
    "gpt2_large": _gpt2(1280, 36, 20),
    "gpt2_xl": _gpt2(1600, 48, 25),
    "megatron": _gpt2(3072, 72, 24),  # of 8.3 billion parameters (Shoeybi 2019, table 2)
    "turing_nlg": _gpt2(4256, 78, 28),  # of 17 billion (Rosset 2020)
    "gpt3": _gpt2(12288, 96, 96, 2048),  # of 175 billion, all blocks dense (Brown 2020, table 2.1)
    "llama": _llama(768, 12, 12, 4, 2048),
}


def _imagegpt(width: int, depth: int, heads: int) -> DecoderConfig:
    """Image GPT's architecture (Chen 2020), as published, without dropout."""
    stack = StackConfig(
        width,
        depth,
        heads,
        feedforward="quick_gelu",
        norm="rmsnorm",
        norm_eps=1e-5,
        causal=True,
        init="gpt2",
    )
    return DecoderConfig(tied=False, stack=stack)


IMAGEGPT_PRESETS: dict[str, DecoderConfig] = {
    "digits": _imagegpt(96, 4, 4),
    "cifar_cpu": _imagegpt(128, 8, 4),
    "imagegpt_small": _imagegpt(512, 24, 8),
    "imagegpt_medium": _imagegpt(1024, 36, 8),
    "imagegpt_large": _imagegpt(1536, 48, 16),
}
