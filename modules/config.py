"""Sizes and choices of the models, as frozen dataclasses of primitives: `asdict` -> YAML -> checkpoint -> back."""

from dataclasses import dataclass
from typing import Literal

NormName = Literal["layernorm", "rmsnorm"]
FeedForwardName = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]
OrderName = Literal["pre", "post", "parallel"]
AttentionName = Literal["dot", "additive"]
InitName = Literal["trunc_normal", "xavier", "gpt2"]
PositionName = Literal[
    "none", "learned", "sinusoidal", "sincos2d", "rotary", "rotary2d", "alibi", "t5"
]
StemName = Literal["patch", "conv", "convpool"]
PoolName = Literal["cls", "mean", "max", "attention"]
PoolerName = Literal["none", "tanh", "relu"]
ScalingName = Literal["linear", "llama3"]

GATED = ("swiglu", "geglu", "geglu_tanh")
MAX_DEPTH = 1000  # blocks; published models have up to 200


def require(condition: bool, sentence: str) -> None:
    """Raises `ValueError` with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def check_rates(config: object, *names: str) -> None:
    """Raises `ValueError` unless each attribute in `names` is a probability below 1, or None."""
    for name in names:
        rate = getattr(config, name)
        require(
            rate is None or 0 <= rate < 1,
            f"{name} is {rate}; it is a probability, so give a number from 0 up to but not including 1.",
        )


def check_text(
    position: PositionName, rotary_fraction: float, stack: "StackConfig", **sizes: int | None
) -> None:
    """Raises `ValueError` unless a model for text can have these positions, and `sizes` that are given are above 0."""
    for name, size in sizes.items():
        require(size is None or size >= 1, f"{name} is {size}; it must be at least 1.")
    require(
        not position.endswith("2d"),
        f'position "{position}" is for images; choose another for text, such as "learned" or "rotary".',
    )
    require(
        not (position == "rotary" and stack.attention == "additive"),
        'position "rotary" works on dot products; use attention "dot" or another position.',
    )
    require(
        0 < rotary_fraction <= 1, f"rotary_fraction is {rotary_fraction}; give a share from 0 to 1."
    )


@dataclass(frozen=True)
class StackConfig:
    """Sizes and variants of a stack of Transformer blocks.

    Args:
        width: Size E of each token's vector.
        depth: Number of blocks.
        heads: Number of attention heads; must divide `width`, unless `head_size` is given.
        kv_heads: Number of key/value heads, shared by groups of query heads (Ainslie 2023); null: `heads`.
        head_size: Size D of a head; null: `width` / `heads`.
        mlp_width: Hidden size F of the feed-forward part; null: 4 x width, or with a gate 8/3 x width rounded up to 8.
        attention: Kind of attention: "dot" (Vaswani 2017) or "additive" (Bahdanau 2015).
        feedforward: Activation of the feed-forward part; "swiglu", "geglu" and "geglu_tanh" are gated (Shazeer 2020).
        norm: Kind of normalisation: "layernorm" (Ba 2016) or "rmsnorm" (Zhang 2019).
        norm_eps: Constant added to the variance inside the norms.
        order: Norms "pre" or "post" the sub-layers, or attention and feed-forward "parallel" (Dehghani 2023).
        final_norm: A norm after the last block; null: yes, unless the order is "post", which ends with one already.
        bias: Biases in output projections, feed-forward and norms.
        mlp_bias: Biases in the feed-forward part; null: `bias`.
        qkv_bias: Biases in the query, key and value projections.
        qk_norm: Norm on each head's queries and keys (Dehghani 2023).
        dropout: Probability of dropping values after the embedding, after attention, inside and after the feed-forward.
        mlp_dropout: Probability of dropping hidden values inside the feed-forward part; null: `dropout`.
        attention_dropout: Probability of dropping attention weights.
        drop_path: Probability of skipping a sub-layer in the last block, growing linearly from 0 (Huang 2016).
        layer_scale: Start value of a learned scale on each sub-layer's output (Touvron 2021); null: none.
        causal: Tokens see only themselves and earlier ones.
        cross_attention: A second attention, to a source sequence, in each block (decoders).
        source_width: Vector size of that source; null: `width`.
        checkpoint_activations: Recompute activations in the backward pass: less memory, about a third more time.
        init: Start values of the weights: "trunc_normal" (std 0.02), "xavier", or "gpt2" (smaller for residual layers).
    """

    width: int = 192
    depth: int = 9
    heads: int = 3
    kv_heads: int | None = None
    head_size: int | None = None
    mlp_width: int | None = None
    attention: AttentionName = "dot"
    feedforward: FeedForwardName = "gelu"
    norm: NormName = "layernorm"
    norm_eps: float = 1e-6
    order: OrderName = "pre"
    final_norm: bool | None = None
    bias: bool = True
    mlp_bias: bool | None = None
    qkv_bias: bool = True
    qk_norm: bool = False
    dropout: float = 0.0
    mlp_dropout: float | None = None
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    causal: bool = False
    cross_attention: bool = False
    source_width: int | None = None
    checkpoint_activations: bool = False
    init: InitName = "trunc_normal"

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads"):
            require(
                getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1."
            )
        require(
            self.depth <= MAX_DEPTH,
            f"depth is {self.depth}; a stack has at most {MAX_DEPTH} blocks.",
        )
        require(
            self.head_size is not None or self.width % self.heads == 0,
            f"width {self.width} cannot be split into {self.heads} heads; make width a multiple of heads.",
        )
        require(
            self.head_size is None or self.head_size >= 1,
            f"head_size is {self.head_size}; it must be at least 1.",
        )
        require(
            self.groups >= 1 and self.heads % self.groups == 0,
            f"kv_heads {self.kv_heads} does not divide heads {self.heads}; choose a divisor.",
        )
        require(
            self.mlp_width is None or self.mlp_width >= 1,
            f"mlp_width is {self.mlp_width}; it must be at least 1.",
        )
        require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; it must be above 0.")
        require(
            self.source_width is None or self.cross_attention,
            "source_width is set but cross_attention is off; switch it on or leave source_width out.",
        )
        check_rates(self, "dropout", "mlp_dropout", "attention_dropout", "drop_path")

    @property
    def head_width(self) -> int:
        """Size D of one head."""
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def groups(self) -> int:
        """Number G of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feedforward_width(self) -> int:
        """Hidden size F of the feed-forward part."""
        if self.mlp_width is not None:
            return self.mlp_width
        gated = (
            (8 * self.width // 3 + 7) // 8 * 8
        )  # three matrices instead of two: same parameter count
        return gated if self.feedforward in GATED else 4 * self.width

    @property
    def feedforward_bias(self) -> bool:
        """Whether the feed-forward part has biases."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def hidden_dropout(self) -> float:
        """Probability of dropping hidden values of the feed-forward part."""
        return self.dropout if self.mlp_dropout is None else self.mlp_dropout

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last block."""
        return self.order != "post" if self.final_norm is None else self.final_norm


@dataclass(frozen=True)
class RotaryScaling:
    """Slower rotary positions, for texts longer than those that a model was first trained on.

    Args:
        kind: "linear": all channels turn slower by `factor` (Chen 2023); "llama3": only those whose wavelength is long
            beside the first context, those between in part (Grattafiori 2024).
        factor: How many times slower.
        low_freq_factor: "llama3": wavelengths above `original_max_length` / this turn slower by the whole factor.
        high_freq_factor: "llama3": wavelengths below `original_max_length` / this stay.
        original_max_length: "llama3": length of the first context, in tokens.
    """

    kind: ScalingName = "linear"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"The factor of rotary_scaling is {self.factor}; give 1 or more.")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor {self.low_freq_factor} of rotary_scaling must be above 0 and below high_freq_factor "
            f"{self.high_freq_factor}.",
        )
        require(
            self.original_max_length >= 1,
            f"original_max_length of rotary_scaling is {self.original_max_length}; it must be at least 1.",
        )


@dataclass(frozen=True)
class PositionConfig:
    """What a position encoding may need to know; models fill it in.

    Args:
        width: Size E of each token's vector.
        heads: Number of attention heads.
        head_width: Size D of one head.
        grid: Number of positions along each axis: (length,) for text, (rows, columns) for images.
        base: Slowest wavelength of sinusoidal and rotary encodings, in positions (over 2 pi).
        fraction: Share of each head that is rotated.
        buckets: Number of distance buckets of T5's bias.
        max_distance: Distance, in tokens, from which T5's buckets no longer tell apart.
        causal: Only earlier tokens are attended to (T5 then spends all buckets on them).
        scaling: Slower rotary positions; None: as they are.
    """

    width: int
    heads: int
    head_width: int
    grid: tuple[int, ...]
    base: float = 10000.0
    fraction: float = 1.0
    buckets: int = 32
    max_distance: int = 128
    causal: bool = False
    scaling: RotaryScaling | None = None

    @property
    def rotated_width(self) -> int:
        """Number of a head's channels that are rotated."""
        return round(self.head_width * self.fraction)
