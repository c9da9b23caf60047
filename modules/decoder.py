"""GPT-style decoders (Radford 2019): tokens -> vectors that know what came before -> the next token."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from modules.config import PositionConfig, PositionName, RotaryScaling, StackConfig, check_text, require
from modules.dropout import Dropout
from modules.embedding import TokenEmbedding
from modules.heads import TokenHead
from modules.init import initialise
from modules.losses import chunked_cross_entropy
from modules.masks import Mask, is_full, padding
from modules.masks import documents as same_document
from modules.position import POSITIONS, grid_coordinates
from modules.transformer import Stack


def causal_stack() -> StackConfig:
    """The blocks of a decoder where nothing else is said."""
    return StackConfig(causal=True)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder for text.

    Args:
        vocabulary: Number V of tokens; null: to be filled in from the tokenizer.
        max_length: Context T, in tokens: number of learned positions, and how far generation looks back.
        position: Position encoding.
        position_base: Slowest wavelength of sinusoidal and rotary positions; null: 10000.
        rotary_fraction: Share of each head's channels that rotary positions turn.
        rotary_scaling: Slower rotary positions, for longer texts; null: none.
        tied: The output layer shares the embedding's table (Press 2017); false: it has its own.
        stack: The Transformer blocks; causal, without cross-attention.
    """

    vocabulary: int | None = None
    max_length: int = 1024
    position: PositionName = "learned"
    position_base: float | None = None
    rotary_fraction: float = 1.0
    rotary_scaling: RotaryScaling | None = None
    tied: bool = True
    stack: StackConfig = field(default_factory=causal_stack)

    def __post_init__(self) -> None:
        sizes = {"vocabulary": self.vocabulary, "max_length": self.max_length}
        check_text(self.position, self.rotary_fraction, self.stack, **sizes)
        require(
            self.rotary_scaling is None or self.position == "rotary",
            f'rotary_scaling is set but position is "{self.position}"; use position "rotary" or leave it out.',
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
        ValueError: A position encoding does not fit the sizes, or the vocabulary is not filled in.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise ValueError("vocabulary is null; fill it in from the tokenizer before building a decoder.")
        self.config, stack = config, config.stack
        self.embed = TokenEmbedding(config.vocabulary, stack.width)
        self.position = POSITIONS[config.position](position_config(config))
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
    ) -> Tensor:
        """Runs embeddings and blocks.

        Args:
            tokens: Integers (B, N).
            keep: Boolean (B, N), False at padding, which stands on the left; None: there is none.
            coords: Integers (B, N), each token's position; None: 0, 1, ... from the first token that is no padding.
            documents: Integers (B, N), the same number for tokens of the same document, which see only each other;
                None: all tokens of a row belong together.

        Returns:
            (B, N, E); what stands at padding means nothing.

        Raises:
            ValueError: More tokens than learned positions.
        """
        places = self.places(tokens, keep, coords)
        mask = Mask() if keep is None or is_full(keep) else padding(keep)
        if documents is not None:
            mask = mask & same_document(documents)
        x = self.position.embed(self.embed(tokens), None if keep is None and coords is None else places)
        mask = mask.with_bias(self.position.bias(places, places))
        return self.stack(self.dropout(x), mask, self.position.rotate(places))

    @staticmethod
    def places(tokens: Tensor, keep: Tensor | None, coords: Tensor | None) -> Tensor:
        """Coordinates (B or 1, N, 1) of tokens (B, N)."""
        if coords is not None:
            return coords[..., None]  # (B, N, 1)
        if keep is not None:
            return (keep.long().cumsum(1) - 1).clamp(min=0)[..., None]  # (B, N, 1)
        return grid_coordinates(tokens.shape[1:], tokens.device)  # (1, N, 1)

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
            hidden.flatten(0, 1), self.head.weight, None, targets.flatten(), smoothing, z_loss=z_loss
        )  # (B, N, E) -> (B N, E)


def position_config(config: DecoderConfig) -> PositionConfig:
    """What the position encoding of this decoder needs to know."""
    stack = config.stack
    return PositionConfig(
        stack.width,
        stack.heads,
        stack.head_width,
        (config.max_length,),
        config.position_base or 10000.0,
        config.rotary_fraction,
        causal=True,
        scaling=config.rotary_scaling,
    )


def _gpt2(width: int, depth: int, heads: int, max_length: int = 1024) -> DecoderConfig:
    """GPT-2 as published (Radford 2019), without its dropout."""
    stack = StackConfig(width, depth, heads, feedforward="gelu_tanh", norm_eps=1e-5, causal=True, init="gpt2")
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
