"""Sums of products of sizes, such as 12 d² + 13 d, and the parts of Transformer blocks in them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType

from modules.config import GATED, StackConfig

POWERS = {"²": 2}
SIDES = r"encoder|decoder|stage \d+|"  # of a network, in front of the name of a part
IN_BLOCKS = (
    "relative bias",
    "projections",
    "scores",
    "token mixing",
    "feed-forward",
    "norms",
    "convolutions",
    "layer scale",
)


class Formula:
    """A sum of products of sizes with rational factors.

    Args:
        terms: Products such as "T d²" or "d", with their factors; "" is the number 1.
    """

    def __init__(self, terms: Mapping[str, Fraction | int] = MappingProxyType({})) -> None:
        self.terms = {name: Fraction(factor) for name, factor in terms.items() if factor}

    def __add__(self, other: "Formula") -> "Formula":
        names = dict.fromkeys((*self.terms, *other.terms))
        return Formula({name: self.terms.get(name, 0) + other.terms.get(name, 0) for name in names})

    def __mul__(self, factor: Fraction | int) -> "Formula":
        return Formula({name: factor * value for name, value in self.terms.items()})

    def renamed(self, before: str, after: str) -> "Formula":
        """The sum with other symbols: each letter of `before` becomes that of `after`."""
        table = str.maketrans(before, after)
        return Formula({name.translate(table): factor for name, factor in self.terms.items()})

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number for these sizes, such as {"d": 768}."""
        total = Fraction(0)
        for name, factor in self.terms.items():
            for symbol in name.split():
                factor *= sizes[symbol[0]] ** POWERS.get(symbol[1:], 1)
            total += factor
        return math.ceil(total)  # exact: sizes are whole

    def __str__(self) -> str:
        """The sum, such as 12 d² + 13 d; 0 if it has no terms."""
        terms = (_product(factor, name) for name, factor in self.terms.items())
        return " + ".join(terms).replace("+ -", "- ") or "0"


def _product(factor: Fraction, name: str) -> str:
    """A factor and a product of sizes: 12 d², d² or 5/3 d."""
    number = f"{factor.numerator:,}" + f"/{factor.denominator}" * (factor.denominator != 1)
    return number if not name else name if factor == 1 else f"{number} {name}"


NOTHING = Formula()


@dataclass(frozen=True)
class Part:
    """One part of a network.

    Args:
        name: Such as "feed-forward".
        parameters: In each block, or outside of blocks.
        flops: Of the forward pass for one sample, where `parameters` are. Only products of matrices
            and convolutions count, each multiplication with its addition as 2.
        blocks: Number of blocks that have this part.
        once: Further parameters outside of the blocks.
        flops_once: Further FLOP, or with a minus those that the last block saves.
        fixed_inputs: FLOP whose inputs need no gradient, such as pixels: their backward pass takes
            as much as the forward pass, all others twice as much.
    """

    name: str
    parameters: Formula = field(default_factory=Formula)
    flops: Formula = field(default_factory=Formula)
    blocks: int = 1
    once: Formula = field(default_factory=Formula)
    flops_once: Formula = field(default_factory=Formula)
    fixed_inputs: Formula = field(default_factory=Formula)

    def parameter_count(self, sizes: Mapping[str, int]) -> int:
        return self.blocks * self.parameters.value(sizes) + self.once.value(sizes)

    def forward_flops(self, sizes: Mapping[str, int]) -> int:
        """FLOP of the forward pass for one sample."""
        return self.full_flops(sizes) + self.flops_once.value(sizes)

    def full_flops(self, sizes: Mapping[str, int]) -> int:
        """FLOP of the forward pass for one sample if the last block computes all tokens."""
        return self.blocks * self.flops.value(sizes)

    def training_flops(self, sizes: Mapping[str, int]) -> int:
        """FLOP of forward and backward pass for one sample."""
        return 3 * self.forward_flops(sizes) - self.fixed_inputs.value(sizes)

    def renamed(self, before: str, after: str) -> "Part":
        """The part with other symbols in its formulas, as `Formula.renamed`."""
        formulas = {
            name: getattr(self, name).renamed(before, after)
            for name in ("parameters", "flops", "once", "flops_once", "fixed_inputs")
        }
        return replace(self, **formulas)

    @property
    def parameter_text(self) -> str:
        return _repeated(self.blocks, self.parameters, self.once)

    @property
    def flops_text(self) -> str:
        return _repeated(self.blocks, self.flops, self.flops_once)


def _repeated(blocks: int, formula: Formula, once: Formula) -> str:
    """A formula of a block, times their number, and one outside: 12 · (4 d² + 4 d) + 2 d."""
    if blocks == 1 or not formula.terms:
        return str(formula + once)
    inside = f"({formula})" if len(formula.terms) > 1 else str(formula)
    return f"{blocks} · {inside}" + (f" + {once}".replace("+ -", "- ") if once.terms else "")


def block_formulas(parts: Iterable[Part]) -> dict[str, Formula]:
    """Parameters of one block, by "", "encoder", "decoder" or "stage 1".

    12 d² + 13 d if nothing is varied.
    """
    found: dict[str, Formula] = {}
    for part in parts:
        side = (re.match(SIDES, part.name) or [""])[0]
        if part.name.endswith(IN_BLOCKS) and part.parameters.terms:
            found[side] = found.get(side, Formula()) + part.parameters
    return found


def norm_parameters(stack: StackConfig, size: Fraction | int = 1) -> Formula:
    """Of one norm over `size` times d values: weights, and biases if it has them."""
    vectors = {"none": 0, "rmsnorm": 1}.get(stack.norm, 1 + stack.bias)
    return Formula({"d": size * vectors})


def attention_parts(stack: StackConfig, rows: int, name: str) -> list[Part]:
    """Projections and scores of one attention (Vaswani 2017).

    The projections have 4 d² + 4 d parameters if the heads together are d wide and each has its own
    keys. The scores, with the sums of values, compare each token with each, later ones too.

    Args:
        stack: The blocks.
        rows: Tokens over T.
        name: "attention" or "cross-attention".
    """
    sizes = stack.resolved
    queries = Fraction(stack.heads * sizes.head_dim, stack.width)  # of all heads, over d
    keys = Fraction(sizes.kv_heads * sizes.head_dim, stack.width)
    values = Fraction(sizes.kv_heads * sizes.value_dim, stack.width)
    outputs = Fraction(stack.heads * sizes.value_dim, stack.width)
    weights = queries + keys + values + outputs
    is_cosine = stack.attention == "cosine"
    without = keys if is_cosine and name == "attention" else 0  # keys have no bias
    biases = stack.qkv_bias * (queries + keys + values - without) + stack.bias
    # w of "additive", W of each head of "bilinear"; of "cosine" a scale of each head.
    per_query = {"additive": 1, "bilinear": sizes.head_dim}.get(stack.attention, 0)
    bilinear = 2 * queries * rows * sizes.head_dim * (stack.attention == "bilinear")
    products = Formula({"T² d": 2 * (queries + outputs) * rows**2, "T d": bilinear})
    return [
        Part(
            f"{name} projections",
            Formula({"d²": weights, "d": biases}),
            Formula({"T d²": 2 * weights * rows}),
            stack.depth,
        ),
        Part(
            f"{name} scores",
            Formula({"d": queries * per_query, "": stack.heads * is_cosine}),
            products,
            stack.depth,
        ),
    ]


def perceptron_part(
    name: str, stack: StackConfig, hidden: int, weights: str, outputs: str, rows: int = 1
) -> Part:
    """A perceptron in each block, with a hidden layer of `hidden` values.

    Args:
        name: Of the part.
        stack: The blocks.
        hidden: Its hidden values.
        weights: Symbols of the size of a matrix, with d in place of `hidden`.
        outputs: Symbol of the number of inputs and outputs.
        rows: Tokens over T.
    """
    matrices = 3 if stack.feedforward in GATED else 2
    size = Fraction(hidden, stack.width)
    bias = stack.resolved.mlp_bias
    biases = Formula({"d": bias * (matrices - 1) * size}) + Formula({outputs: bias})
    products = Formula({"T d²": 2 * matrices * size * rows})
    return Part(name, Formula({weights: matrices * size}) + biases, products, stack.depth)


def stack_parts(stack: StackConfig, rows: int = 1, once: Formula = NOTHING) -> list[Part]:
    """All parts of a stack of blocks, with 12 d² + 13 d parameters each if nothing is varied.

    Args:
        stack: The blocks.
        rows: Tokens over T; cross-attention reads T.
        once: Parameters of other norms, such as one after the embedding.
    """
    sizes = stack.resolved
    sublayers = 2 + stack.cross_attention
    parallel = stack.order == "parallel"
    norms = norm_parameters(stack) * (1 if parallel else sublayers)
    if stack.qk_norm:
        head = norm_parameters(stack, Fraction(sizes.head_dim, stack.width))
        norms += head * (2 + 2 * stack.cross_attention)
    if sizes.final_norm:
        once = once + norm_parameters(stack)
    if stack.order == "mixer":  # (Tolstikhin 2021)
        parts = [perceptron_part("token mixing", stack, sizes.token_mlp_width, "T d", "T")]
    else:
        parts = attention_parts(stack, rows, "attention")
    if stack.cross_attention:
        parts += attention_parts(stack, rows, "cross-attention")
    parts.append(perceptron_part("feed-forward", stack, sizes.mlp_width, "d²", "d", rows))
    parts.append(Part("norms", norms, blocks=stack.depth, once=once))
    if stack.conv_kernel is not None:
        channels = Formula({"d": (stack.conv_kernel - 1) * (1 if parallel else 2)})
        parts.append(Part("convolutions", channels, blocks=stack.depth))
    if stack.layer_scale is not None:
        parts.append(Part("layer scale", Formula({"d": sublayers}), blocks=stack.depth))
    return parts


def without_skipped(parts: list[Part], stack: StackConfig, num_read: int | None) -> list[Part]:
    """The parts without FLOP that the last block saves if only `num_read` tokens are used.

    Queries, keys and values are computed for all tokens; scores, the output projection and the
    feed-forward layer are not. None: all tokens are used.
    """
    if num_read is None or stack.order == "mixer" or stack.norm == "batchnorm":
        return parts
    sizes = stack.resolved
    queries = Fraction(stack.heads * sizes.head_dim, stack.width)  # of all heads, over d
    values = Fraction(stack.heads * sizes.value_dim, stack.width)
    matrices = 3 if stack.feedforward in GATED else 2
    hidden = matrices * Fraction(sizes.mlp_width, stack.width)
    saved = {
        "attention projections": Formula({"T d²": -2 * values, "d²": 2 * num_read * values}),
        "attention scores": Formula({"T² d": -1, "T d": num_read}) * (2 * (queries + values)),
        "feed-forward": Formula({"T d²": -2 * hidden, "d²": 2 * num_read * hidden}),
    }
    return [replace(part, flops_once=saved.get(part.name, NOTHING)) for part in parts]


def crossover(parts: Iterable[Part], sizes: Mapping[str, int]) -> float | None:
    """Tokens from which the scores of attention take more FLOP than all else in the blocks.

    Those of a sample, T, or of a window, A, in blocks that compute all of them. None: there is no
    attention.
    """
    scores = 0
    others = 0
    for part in parts:
        if part.name.endswith("scores"):
            scores += part.full_flops(sizes)
        elif part.name.endswith(("projections", "feed-forward")):
            others += part.full_flops(sizes)
    return sizes.get("A", sizes["T"]) * others / scores if scores else None
