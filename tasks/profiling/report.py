"""The result of `profile`, as tables on the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.profiling.formulas import Part, block_formulas, crossover
from tasks.profiling.timing import Fit, Point, fit
from tasks.tracking.report import digits

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BYTES = {"float32": 4, "bfloat16": 2}
NOT_KNOWN = "not known"
MEANINGS = {
    "d": "width",
    "E": "width of embeddings",
    "T": "tokens of a sample",
    "N": "positions",
    "V": "vocabulary",
    "U": "vocabulary of the source",
    "K": "classes",
    "S": "masked tokens",
    "C": "channels",
    "P": "side of a patch",
    "A": "tokens of a window",
    "R": "tokens of the encoder",
    "Q": "visible patches",
    "D": "width of the decoder",
    "O": "tokens that can be predicted",
}
AXIS_TITLES = {"length": "tokens T", "width": "width d", "depth": "blocks", "batch_size": "batch"}


@dataclass
class Profile:
    """What is known about a network.

    Args:
        name: Of the preset, config or checkpoint.
        parts: By formula; of 0 if there is none.
        sizes: Of the symbols in the formulas.
        counted_parameters: Number of each part, counted in the network.
        counted_flops: FLOP of one sample that PyTorch counts: forward, and forward with backward.
        activations: Bytes kept for the backward pass of one sample, by dtype; None: not known.
        kv_values: Values that a decoder keeps for each token; None: it is no decoder.
        device: On which times are measured.
        points: Sizes that were asked for, the first lengths of the base.
        no_times: Why there are no times; empty: there are.
        variants: Options that no formula covers, such as 'stack.norm "mine"'.
        hidden: Widths of the hidden layers of feed-forward parts.
        assumed: Symbols of sizes that come from data in a training, and are assumed here.
    """

    name: str
    parts: list[Part]
    sizes: dict[str, int]
    counted_parameters: dict[str, int]
    counted_flops: tuple[int, int]
    activations: dict[str, int | None]
    kv_values: int | None
    device: str
    points: list[Point] = field(default_factory=list)
    no_times: str = ""
    variants: Sequence[str] = ()
    hidden: Sequence[int] = ()
    assumed: Sequence[str] = ()

    @property
    def parameters(self) -> int:
        return sum(self.counted_parameters.values())

    @property
    def forward_flops(self) -> int:
        """By formula."""
        return sum(part.forward_flops(self.sizes) for part in self.parts)

    @property
    def training_flops(self) -> int:
        """By formula."""
        return sum(part.training_flops(self.sizes) for part in self.parts)

    @property
    def without_formula(self) -> list[str]:
        """Parts whose formula does not give the parameters that they have, as in a variant."""
        counted = self.counted_parameters
        return [
            part.name
            for part in self.parts
            if part.parameter_count(self.sizes) != counted.get(part.name, 0)
        ]

    @property
    def has_flops(self) -> bool:
        """Whether the formulas give the FLOP that PyTorch counts."""
        return (self.forward_flops, self.training_flops) == self.counted_flops

    @property
    def crossover(self) -> float | None:
        """`crossover` of its parts. None: their FLOP are not known, or there is no attention."""
        return crossover(self.parts, self.sizes) if self.has_flops else None

    @property
    def six_nd(self) -> int:
        """FLOP of training on one sample by the rule of Kaplan 2020, with all parameters."""
        return 6 * self.parameters * self.sizes["T"]

    def memory(self) -> dict[str, dict[str, int | None]]:
        """Bytes by what they hold and dtype; AdamW keeps two moments of each weight."""
        rows: dict[str, dict[str, int | None]] = {
            "weights": {name: size * self.parameters for name, size in BYTES.items()},
            "gradients": {name: size * self.parameters for name, size in BYTES.items()},
            "moments of AdamW": {name: 2 * size * self.parameters for name, size in BYTES.items()},
            "activations of a sample": dict(self.activations),
        }
        if self.kv_values is not None:
            rows["KV cache of a token"] = {n: s * self.kv_values for n, s in BYTES.items()}
        return rows

    def axes(self) -> dict[str, list[Point]]:
        """The points of each axis, in order of size."""
        names = dict.fromkeys(point.axis for point in self.points)
        return {name: [point for point in self.points if point.axis == name] for name in names}

    def fits(self) -> dict[tuple[str, str], Fit]:
        """The formula fitted to times, by axis and "inference" or "training"."""
        found = {}
        for axis, points in self.axes().items():
            for kind in ("inference", "training"):
                times = [getattr(point, kind) for point in points]
                if len(times) > 1 and None not in times:
                    found[axis, kind] = fit(points, times)
        return found


def print_profile(found: Profile) -> None:
    """Prints all tables, at most 100 columns wide."""
    symbols = ", ".join(f"{name} {value:,} ({MEANINGS[name]})" for name, value in used(found))
    if found.hidden:
        symbols += (
            f"; hidden width of feed-forward {' and '.join(map('{:,}'.format, found.hidden))}"
        )
    print(f"{found.name}: {found.parameters:,} parameters", wrapped(f"with {symbols}"), sep="\n")
    if found.assumed:
        print(wrapped(assumed_sentence(found)))
    if found.without_formula or not found.has_flops:
        print(wrapped(no_formula(found)))
    print_parts(found)
    print_flops(found)
    print_memory(found)
    if found.no_times:
        print(f"\n{found.no_times}")
    else:
        print_times(found)
    print(f"\n{largest_sentence(found)}")
    if any(part.name.endswith("scores") for part in found.parts):
        print(f"\n{crossover_sentence(found)}")


def largest_sentence(found: Profile) -> str:
    """Which part has most parameters, FLOP and, for the same input, time."""
    tokens = found.sizes["T"]
    amounts: dict[str, dict[str, float]] = {
        "parameters": {**found.counted_parameters},
        "FLOP of training": {
            part.name: part.training_flops(found.sizes) for part in found.parts if found.has_flops
        },
        "time of inference": next(
            (point.parts for point in found.axes().get("length", []) if point.tokens == tokens), {}
        ),
    }
    said = []
    for what, by_part in amounts.items():
        if by_part:
            name = max(by_part, key=lambda part: by_part[part])
            said.append(f"most {what}: {name} ({by_part[name] / sum(by_part.values()):.0%})")
    return wrapped(f"With {tokens:,} tokens, {'; '.join(said)}.")


def assumed_sentence(found: Profile) -> str:
    """Which sizes a training may have otherwise."""
    options = {"V": "--vocabulary", "T": "--lengths"}
    given = [f"{options[name]} sets {name}" for name in found.assumed if name in options]
    return "; ".join(
        [f"Assumed, since data decide in a training: {', '.join(found.assumed)}", *given]
    )


def no_formula(found: Profile) -> str:
    """What has no formula, and because of which variants."""
    parts = [f"the parameters of {', '.join(found.without_formula)}"] * bool(found.without_formula)
    parts += ["the FLOP"] * (not found.has_flops)
    several = "one or more of " * (len(found.variants) > 1)
    because = f", because of {several}{', '.join(found.variants)}" * bool(found.variants)
    return f"No formula is known for {' and '.join(parts)}{because}: they are counted only."


def used(found: Profile) -> list[tuple[str, int]]:
    """Symbols that the formulas have, with their sizes."""
    text = " ".join(f"{part.parameter_text} {part.flops_text}" for part in found.parts)
    return [(name, value) for name, value in found.sizes.items() if name in text]


def wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 98)


def print_parts(found: Profile) -> None:
    head = f"{'parameters':<34}{'counted':>19}{'share':>8}   formula"
    print(f"\n{head}\n{'-' * 98}")
    unknown = found.without_formula
    for part in found.parts:
        counted = found.counted_parameters.get(part.name, 0)
        if counted:
            text = NOT_KNOWN if part.name in unknown else part.parameter_text
            print(f"{part.name:<34}{counted:>19,}{counted / found.parameters:>8.1%}   {text}")
    if unknown:
        print(f"{'all':<34}{found.parameters:>19,}{1:>8.0%}")
        return
    print(f"{'all':<34}{found.parameters:>19,}{1:>8.0%}   {found.parameters:,} by formula")
    for side, formula in block_formulas(found.parts).items():
        of_side = side if side.startswith("stage") else f"the {side}"
        name = f"one block of {of_side}" if side else "one block"
        print(f"{name:<34}{formula.value(found.sizes):>19,}{'':>8}   {formula}")


def print_flops(found: Profile) -> None:
    head = (
        f"{'FLOP of a sample':<34}{'forward':>10}{'training':>10}{'share':>7}   formula (forward)"
    )
    print(f"\n{head}\n{'-' * 98}")
    for part in found.parts:
        forward = part.forward_flops(found.sizes)
        if forward and found.has_flops:
            training = part.training_flops(found.sizes)
            share = training / found.training_flops
            numbers = f"{short(forward):>10}{short(training):>10}{share:>7.1%}"
            print(f"{part.name:<34}{numbers}   {part.flops_text}")
    forward, training = found.counted_flops
    if found.has_flops:
        totals = f"{short(found.forward_flops):>10}{short(found.training_flops):>10}{1:>7.0%}"
        print(f"{'all':<34}{totals}")
    else:
        print(f"{'parts':<34}{NOT_KNOWN:>20}")
    print(f"{'counted by PyTorch':<34}{short(forward):>10}{short(training):>10}")
    tokens = found.sizes["T"]
    print(f"{'all, of a token':<34}{short(forward / tokens):>10}{short(training / tokens):>10}")
    rule = f"{short(found.six_nd):>20} {found.six_nd / training:>6.1%}"
    print(f"{'6 * parameters * tokens':<34}{rule}")


def print_memory(found: Profile) -> None:
    print(f"\n{'memory':<34}{'float32':>14}{'bfloat16':>14}\n{'-' * 98}")
    for name, row in found.memory().items():
        print(f"{name:<34}" + "".join(f"{in_bytes(value):>14}" for value in row.values()))


def print_times(found: Profile) -> None:
    title = f"times on the {'CPU' if found.device == 'cpu' else 'GPU'}"
    columns = f"{'inference':>12}{'fitted':>10}{'training':>12}{'fitted':>10}{'GFLOP/s':>10}"
    print(f"\n{title:<22}{columns}   scores in inference\n{'-' * 98}")
    fits = found.fits()
    for axis, points in found.axes().items():
        for index, point in enumerate(points):
            line = f"{AXIS_TITLES[axis]:<12}{shown_size(point):>10,}"
            for kind in ("inference", "training"):
                fitted = fits.get((axis, kind))
                guess = duration(fitted.curves[index].sum()) if fitted else ""
                line += f"{duration(getattr(point, kind)):>12}{guess:>10}"
            speed = point.flops[1] / (point.training or 1) / 1e9
            print(f"{line}{speed:>10,.1f}   {scores_share(point):.0%}")


def shown_size(point: Point) -> int:
    """What a point shows of its axis: of images the tokens instead of pixels."""
    return point.tokens if point.axis == "length" else point.value


def scores_share(point: Point) -> float:
    """Part of the time of inference that the scores of attention take."""
    total = sum(point.parts.values())
    return sum(value for name, value in point.parts.items() if name.endswith("scores")) / total


def crossover_sentence(found: Profile) -> str:
    """From which length on the scores of attention take more than all else in the blocks."""
    start = "In the blocks, it is not known from which length attention's T² d takes more FLOP"
    windows = "windows of " if "A" in found.sizes else ""
    if found.crossover is not None:
        product = "T A d" if windows else "T² d"
        start = f"In the blocks, attention's {product} takes more FLOP than T d² from "
        start += f"{windows}{found.crossover:,.0f} tokens on"
    text = f"{start}; this profile has {windows}{found.sizes.get('A', found.sizes['T']):,}"
    if windows:
        return wrapped(f"{text}.")
    measured = measured_crossover(found.axes().get("length", []))
    if measured is not None:
        lengths = [point.tokens for point in found.axes()["length"]]
        if min(lengths) <= measured <= max(lengths):
            text += f". By the times of the parts here, it is from about {measured:,.0f} tokens on"
        else:
            text += f". By times it is not within the lengths here, {min(lengths):,} to "
            text += f"{max(lengths):,} tokens"
    return wrapped(f"{text}.")


def measured_crossover(points: Sequence[Point]) -> float | None:
    """The same by times: scores grow with T², all else in the blocks with T. None: unknown."""
    points = [point for point in points if point.parts]
    if not points:
        return None
    largest = max(points, key=lambda point: point.tokens)
    scores = sum(v for name, v in largest.parts.items() if name.endswith("scores"))
    ends = ("projections", "feed-forward")
    others = sum(v for name, v in largest.parts.items() if name.endswith(ends))
    return largest.tokens * others / scores if scores else None


def short(number: float) -> str:
    """A number with a unit, such as 1.24 G."""
    for size, unit in UNITS:
        if abs(number) >= size:
            return f"{digits(number / size)} {unit}"
    return digits(number)


def in_bytes(number: int | None) -> str:
    """Bytes with a unit, such as 1.5 MiB."""
    if number is None:
        return "-"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            return f"{number / 2**power:,.1f} {unit}"
    return f"{number} B"


def duration(seconds: float | None) -> str:
    """Seconds as "1.25 s" or "12.5 ms"."""
    if seconds is None:
        return "-"
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(seconds * 1000)} ms"
