"""The parts of a Swin Transformer, by formula.

Sizes are those of the first stage: d (width), T (tokens of a sample), A (tokens of a window), and
N, C, P, K as in `tasks.profiling.parts`. Each later stage has twice the width and a quarter of the
tokens, which are in the factors.
"""

from dataclasses import replace
from fractions import Fraction

from modules.models.swin import SwinConfig
from modules.windows import HIDDEN
from tasks.profiling.formulas import Formula, Part, norm_parameters, stack_parts
from tasks.profiling.parts import Parts, stem_part


def swin_parts(config: SwinConfig, length: int) -> Parts:
    """Parts of a Swin Transformer for images of `length` pixels."""
    config = replace(config, image_size=length)
    stack = config.stack
    last = 2 ** (len(config.depths) - 1)  # width of the last stage over d
    sizes = {
        "d": stack.width,
        "T": config.grids[0] ** 2,
        "A": config.window_sizes[0] ** 2,
        "N": config.grids[0] ** 2,
        "C": config.channels or 3,
        "P": config.patch_size,
        "K": config.num_classes or 1000,
    }
    found = [stem_part(config)]
    for stage in range(len(config.depths)):
        if stage:
            found.append(merging_part(config, stage))
        found += stage_parts(config, stage)
    norms = norm_parameters(stack) + norm_parameters(stack, last)
    head = Formula({"K d": last, "K": 1})
    return [
        *found,
        Part("norms", once=norms),
        Part("head", head, Formula({"K d": 2 * last})),
    ], sizes


def merging_part(config: SwinConfig, stage: int) -> Part:
    """From 2 x 2 tokens of the stage before to one: a matrix 4 E x 2 E and a norm."""
    factor = 2**stage  # width over d
    norm = 1 if config.stack.order == "res_post" else 2  # its width over that of the stage
    weights = Formula({"d²": 2 * factor**2})
    tokens = Fraction(config.grids[stage] ** 2, config.grids[0] ** 2)
    return Part(
        f"stage {stage + 1} patch merging",
        weights + norm_parameters(config.stack, norm * factor),
        Formula({"T d²": 4 * factor**2 * tokens}),
    )


def stage_parts(config: SwinConfig, stage: int) -> list[Part]:
    """The blocks of a stage; attention also computes the tokens that fill the windows."""
    stack = config.stage(stage)
    grid = config.grids[stage]
    size = config.window_sizes[stage]
    filled = (-(-grid // size) * size) ** 2
    found = []
    for part in stack_parts(stack):
        tokens = filled if part.name.startswith("attention") else grid**2
        factors = {
            "d": Fraction(2**stage),
            "d²": Fraction(4**stage),
            "T": Fraction(tokens, config.grids[0] ** 2),
            "T²": Fraction(tokens * size**2, (config.grids[0] * config.window_sizes[0]) ** 2),
        }
        scaled = replace(
            part,
            name=f"stage {stage + 1} {part.name}",
            parameters=scale(part.parameters, factors),
            flops=scale(part.flops, factors),
        )
        found.append(scaled)
    return [*found, bias_part(config, stage)]


def scale(formula: Formula, factors: dict[str, Fraction]) -> Formula:
    """A formula in the sizes of a stage, as one in those of the first; T² becomes T A."""
    terms = {}
    for name, factor in formula.terms.items():
        for symbol in name.split():
            factor *= factors[symbol]
        terms[name.replace("T²", "T A")] = factor
    return Formula(terms)


def bias_part(config: SwinConfig, stage: int) -> Part:
    """The relative bias of each block: a table, or an MLP that computes it once for a batch."""
    name = f"stage {stage + 1} relative bias"
    depth = config.depths[stage]
    heads = config.stage(stage).heads
    offsets = (2 * config.window_sizes[stage] - 1) ** 2
    if config.relative_bias == "table":
        return Part(name, Formula({"": offsets * heads}), blocks=depth)
    up = Formula({"": 4 * HIDDEN * offsets})
    down = Formula({"": 2 * HIDDEN * heads * offsets})
    parameters = Formula({"": HIDDEN * (3 + heads)})
    return Part(name, parameters, up + down, depth, fixed_inputs=up * depth)
