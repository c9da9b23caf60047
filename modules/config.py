"""Sizes and variants of the blocks, as a frozen dataclass of primitives, and checks of them."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NamedTuple, TypeVar

# The library's entries of each family of variants; entries of your own are strings, too.
NormName = Literal["layernorm", "rmsnorm", "batchnorm", "none"] | str
FeedForwardName = (
    Literal[
        "relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "swiglu", "geglu", "geglu_tanh"
    ]
    | str
)
OrderName = Literal["pre", "post", "parallel", "res_post", "no_residual", "cct", "mixer"] | str
AttentionName = Literal["dot", "unscaled", "bilinear", "additive", "cosine"] | str
InitName = Literal["trunc_normal", "xavier", "kaiming", "gpt2", "zero_residual"] | str
ImageArchitectureName = Literal["vit", "swin"]
StemName = Literal["patch", "conv", "convpool", "cct", "resnet", "hybrid"] | str
PoolName = Literal["cls", "mean", "max", "attention", "sequence", "flatten"] | str
PoolerName = Literal["none", "tanh", "relu"] | str

GATED = ("swiglu", "geglu", "geglu_tanh")
Value = TypeVar("Value")
HEAD_SIZES = ("heads", "kv_heads", "head_dim", "value_dim")
SIZES = ("width", "depth", *HEAD_SIZES, "mlp_width", "token_mlp_width", "context_width")
ATTENTION_OPTIONS = (  # of `StackConfig`, which blocks without attention do not have
    *HEAD_SIZES[1:],
    *("attention", "qkv_bias", "qk_norm", "attention_dropout"),
    *("causal", "conv_kernel", "cross_attention"),
)
MAX_DEPTH = 1000  # blocks; published models have up to 200


def require(condition: bool, sentence: str) -> None:
    """Raises `ValueError` with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def default(value: Value | None, otherwise: Value) -> Value:
    """`value`, or `otherwise` if it is None."""
    return otherwise if value is None else value


def check_choice(option: str, name: str, choices: Collection[str]) -> None:
    """Raises `ValueError` with all choices, and the nearest, unless `name` is one of them."""
    near = get_close_matches(name, choices, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    require(name in choices, f'{option} is "{name}"; choose one of {", ".join(choices)}{hint}.')


def variant(option: str, name: str, family: Mapping[str, Value]) -> Value:
    """The entry `name` of a family such as `NORMS`; raises `ValueError` like `check_choice`."""
    check_choice(option, name, family)
    return family[name]


def check_sizes(config: object, *names: str) -> None:
    """Raises `ValueError` unless each attribute in `names` is at least 1, or None."""
    for name in names:
        size = getattr(config, name)
        require(size is None or size >= 1, f"{name} is {size}; it must be at least 1.")


def check_rates(config: object, *names: str) -> None:
    """Raises `ValueError` unless each attribute in `names` is a probability below 1, or None."""
    for name in names:
        rate = getattr(config, name)
        require(
            rate is None or 0 <= rate < 1,
            f"{name} is {rate}; it is a probability, so give a number from 0, below 1.",
        )


class ResolvedOptions(NamedTuple):
    """Options of `StackConfig` that may be null, with what null stands for."""

    head_dim: int
    value_dim: int
    kv_heads: int
    mlp_width: int
    token_mlp_width: int
    mlp_bias: bool
    mlp_dropout: float
    final_norm: bool


@dataclass(frozen=True)
class StackConfig:
    """Sizes and variants of a stack of Transformer blocks.

    Args:
        width: Size E of each token's vector.
        depth: Number of blocks.
        heads: Number H of attention heads; must divide `width`, unless `head_dim` is given or order
            is "mixer".
        kv_heads: Number G of key/value heads, shared by groups of query heads (Ainslie 2023);
            null: `heads`.
        head_dim: Size D of a head; null: `width` / `heads`.
        value_dim: Size of a head's values if it is not that of its queries and keys; null: D.
        mlp_width: Hidden size F of the feed-forward part; null: 4 x width, or with a gate
            8/3 x width rounded up to a multiple of 8.
        token_mlp_width: Hidden size of the token-mixing MLP, with order "mixer"; null:
            `width` / 2.
        attention: Scores of keys k for a query q: "dot", q k / sqrt(D) (Vaswani 2017), "unscaled",
            q k, "bilinear", q W k (Luong 2015), "additive", w tanh(q + k) (Bahdanau 2015), or
            "cosine", s cos(q, k) (Liu 2022).
        feedforward: Activation of the feed-forward part; "relu2" is ReLU squared (So 2021);
            "swiglu", "geglu" and "geglu_tanh" are gated (Shazeer 2020).
        norm: Kind of normalisation: "layernorm" (Ba 2016), "rmsnorm" (Zhang & Sennrich
            2019), "batchnorm" (Ioffe 2015; in training over all tokens of the batch, padding and
            later ones, too) or "none".
        norm_eps: Constant added to the variance inside the norms.
        order: Block layout: "pre" (norm before each sub-layer), "post" (norm after each residual
            sum), "parallel" (attention and feed-forward read one normed input, Dehghani 2023),
            "res_post" (norm at the end of each sub-layer, Liu 2022), "no_residual" (as "pre",
            without the residual sums), "cct" (as "pre", but the second norm is on the residual
            sum, Hassani 2021) or "mixer" (as "pre", with a token-mixing MLP in place of
            attention, Tolstikhin 2021; vit only).
        final_norm: A norm after the last block; null: yes, unless the order is "post", which ends
            with one already.
        bias: Biases in output projections, feed-forward and norms.
        mlp_bias: Biases in the feed-forward part; null: `bias`.
        qkv_bias: Biases in the query, key and value projections.
        qk_norm: Norm on each head's queries and keys (Dehghani 2023).
        dropout: Probability of dropping values after the embedding, after attention, inside and
            after the feed-forward part.
        mlp_dropout: Probability of dropping hidden values of the feed-forward part; null:
            `dropout`.
        attention_dropout: Probability of dropping attention weights.
        drop_path: Probability of skipping a sub-layer in the last block, growing linearly from 0
            in the first (Huang 2016; rates as in timm), so that a single block skips none.
        layer_scale: Start value of a learned scale on each sub-layer's output (Touvron 2021,
            CaiT); null: none.
        causal: Tokens see only themselves and earlier ones.
        conv_kernel: Size of convolutions of each channel over a token and those before it, on what
            attention and feed-forward read (So 2021, Allen-Zhu 2025); null: none.
        cross_attention: A second attention, to other tokens, in each block (decoders).
        context_width: Vector size of those other tokens; null: `width`.
        checkpoint_activations: Recompute activations in the backward pass: less memory, about a
            third more time.
        init: Start values of the weights: "trunc_normal" (std 0.02), "xavier", "kaiming" (He
            2015), "gpt2" (smaller for residual layers) or "zero_residual" (zero for residual
            layers).
    """

    width: int = 192
    depth: int = 9
    heads: int = 3
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    mlp_width: int | None = None
    token_mlp_width: int | None = None
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
    conv_kernel: int | None = None
    cross_attention: bool = False
    context_width: int | None = None
    checkpoint_activations: bool = False
    init: InitName = "trunc_normal"

    def __post_init__(self) -> None:
        check_sizes(self, *SIZES)
        require(
            self.depth <= MAX_DEPTH,
            f"depth is {self.depth}; a stack has at most {MAX_DEPTH} blocks.",
        )
        require(
            self.head_dim is not None or self.order == "mixer" or self.width % self.heads == 0,
            f"width {self.width} is not a multiple of heads {self.heads}; change one of them.",
        )
        require(
            self.heads % self.resolved.kv_heads == 0,
            f"kv_heads {self.kv_heads} does not divide heads {self.heads}; choose a divisor.",
        )
        require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; it must be above 0.")
        require(
            self.context_width is None or self.cross_attention,
            "context_width needs cross_attention; switch it on or leave context_width out.",
        )
        require(
            self.conv_kernel is None or self.conv_kernel >= 2,
            f"conv_kernel is {self.conv_kernel}; give null, or 2 or more.",
        )
        require(
            self.norm != "batchnorm" or not self.checkpoint_activations,
            'checkpoint_activations runs each block twice, so norm "batchnorm" would count '
            "each batch twice; leave it out, or choose another norm.",
        )
        require(
            self.layer_scale is None or math.isfinite(self.layer_scale),
            f"layer_scale is {self.layer_scale}; give a finite number.",
        )
        check_rates(self, "dropout", "mlp_dropout", "attention_dropout", "drop_path")
        self._check_zeros()
        if self.order == "mixer":
            unused = [o for o in ATTENTION_OPTIONS if getattr(self, o) != getattr(StackConfig, o)]
            require(not unused, f'order "mixer" has no attention; leave {", ".join(unused)} out.')
        require(
            self.token_mlp_width is None or self.order == "mixer",
            'token_mlp_width is of order "mixer" only; choose this order or leave it out.',
        )

    def _check_zeros(self) -> None:
        """Raises `ValueError` if sub-layers that start at zero, or are skipped, stop learning."""
        require(
            self.order != "no_residual"
            or (self.drop_path == 0 and self.init != "zero_residual" and self.layer_scale != 0),
            'order "no_residual" passes on nothing but the results of sub-layers, which drop_path, '
            'init "zero_residual" and layer_scale 0 make zero; leave these out, or choose another '
            "order.",
        )
        zero_starts = [
            self.order == "res_post" and self.norm != "none",
            self.init == "zero_residual",
            self.layer_scale == 0,
        ]
        require(
            sum(zero_starts) <= 1,
            'order "res_post", init "zero_residual" and layer_scale 0 each start sub-layers at '
            "zero; two of them leave the weights of blocks without gradients; keep one.",
        )

    @property
    def resolved(self) -> ResolvedOptions:
        """Options that may be null, with what null stands for."""
        if self.feedforward in GATED:  # three matrices instead of two: about as many parameters
            mlp_width = (8 * self.width // 3 + 7) // 8 * 8
        else:
            mlp_width = 4 * self.width
        head_dim = default(self.head_dim, self.width // self.heads)
        return ResolvedOptions(
            head_dim=head_dim,
            value_dim=default(self.value_dim, head_dim),
            kv_heads=default(self.kv_heads, self.heads),
            mlp_width=default(self.mlp_width, mlp_width),
            token_mlp_width=default(self.token_mlp_width, max(1, self.width // 2)),
            mlp_bias=default(self.mlp_bias, self.bias),
            mlp_dropout=default(self.mlp_dropout, self.dropout),
            final_norm=default(self.final_norm, self.order != "post"),
        )
