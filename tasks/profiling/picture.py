"""The picture of `profile`: parts, FLOP over length, and times over each size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.utils.files import replacing
from tasks.profiling.report import AXIS_TITLES, Profile, shown_size
from tasks.tracking.report import plain, write_png

COLUMNS = 3
LINES = ("--", ":", "-.")
COLOURS = {"inference": "tab:blue", "training": "tab:orange"}


def draw(found: Profile, path: Path) -> None:
    """Draws a profile into a file."""
    import matplotlib.figure

    axes = [axis for axis, points in found.axes().items() if points[0].inference is not None]
    axes = [axis for axis in axes if len(found.axes()[axis]) > 1]
    has_parts = not found.no_times
    turn = found.crossover
    first = 1 + (turn is not None)  # of the panels of times
    count = first + len(axes) + has_parts
    columns = 2 if count == 4 else min(count, COLUMNS)
    rows = -(-count // columns)
    figure = matplotlib.figure.Figure((5.2 * columns, 4 * rows), dpi=110, layout="constrained")
    figure.suptitle(plain(f"{found.name}: {found.parameters:,} parameters"))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    draw_shares(found, panels[0])
    if turn is not None:
        draw_flops(found, turn, panels[1])
    for axis, panel in zip(axes, panels[first:], strict=False):
        draw_times(found, axis, panel)
    if has_parts:
        draw_part_times(found, panels[count - 1])
    for panel in panels[count:]:
        panel.remove()
    with replacing(path) as partial:
        write_png(figure, partial)


def draw_shares(found: Profile, panel: Any) -> None:
    """Shares of parameters and, if they are known, of FLOP by part, as bars."""
    counted = found.counted_parameters
    parts = [
        part
        for part in found.parts
        if counted.get(part.name, 0) > found.parameters / 1000
        or (found.has_flops and part.forward_flops(found.sizes) > found.forward_flops / 1000)
    ]
    places = range(len(parts))
    parameters = [100 * counted.get(part.name, 0) / found.parameters for part in parts]
    panel.barh([y - 0.2 for y in places], parameters, 0.38, label="parameters", color="tab:green")
    if found.has_flops:
        flops = [100 * part.training_flops(found.sizes) / found.training_flops for part in parts]
        where = [y + 0.2 for y in places]
        panel.barh(where, flops, 0.38, label="FLOP of training", color="tab:purple")
    panel.set_yticks(places, [part.name for part in parts])
    panel.invert_yaxis()
    panel.set(xlabel="share (%)", title=f"Parts, {found.sizes['T']:,} tokens")
    panel.grid(axis="x", alpha=0.3)
    panel.legend(loc="lower right")


def draw_flops(found: Profile, turn: float, panel: Any) -> None:
    """FLOP of a token in the forward pass over the length, or that of windows, by formula.

    The encoder of a masked autoencoder reads the same part of the tokens at each length. `turn` is
    where both curves meet.
    """
    symbol = "A" if "A" in found.sizes else "T"
    growing = {name: size for name, size in found.sizes.items() if name in (symbol, "R")}
    low = min(16.0, found.sizes[symbol])
    high = 8 * max(turn, found.sizes[symbol])
    lengths = [int(low * (high / low) ** (step / 60)) for step in range(61)]
    scores = "T A d" if symbol == "A" else "T² d"
    groups = {f"attention scores ({scores})": "scores", "projections, feed-forward (T d²)": ""}
    for name, end in groups.items():
        ends = (end,) if end else ("projections", "feed-forward")
        chosen = [part for part in found.parts if part.name.endswith(ends)]
        sizes = [
            found.sizes | {name: size * n // growing[symbol] for name, size in growing.items()}
            for n in lengths
        ]
        values = [sum(part.full_flops(one) for part in chosen) / one["T"] for one in sizes]
        panel.plot(lengths, values, label=name)
    panel.axvline(turn, color="grey", linestyle=":", label=f"equal at {symbol} = {turn:,.0f}")
    panel.axvline(found.sizes[symbol], color="black", linewidth=0.8, label="this profile")
    label = "tokens of a window A" if symbol == "A" else "tokens T"
    panel.set(xscale="log", yscale="log", xlabel=label, ylabel="FLOP of a token, forward")
    panel.set_title("Blocks, by formula")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def draw_times(found: Profile, axis: str, panel: Any) -> None:
    """Measured times over one size, with the fitted formula and its terms."""
    points = found.axes()[axis]
    sizes = [shown_size(point) for point in points]
    for kind, colour in COLOURS.items():
        times = [getattr(point, kind) * 1000 for point in points]
        panel.plot(sizes, times, "o", color=colour, label=f"{kind}, measured")
        one = found.fits()[axis, kind]
        dense = replace(one, terms=between(one.terms))
        across = between([[size] for size in sizes])[:, 0]
        curves = dense.curves * 1000
        panel.plot(across, curves.sum(1), color=colour, label=f"{kind}, fitted")
        for column, (name, style) in enumerate(zip(one.names, LINES, strict=False)):
            if curves[:, column].any() and axis in ("length", "width"):
                label = f"its part in {name}" if name != "1" else "its constant part"
                panel.plot(across, curves[:, column], style, color=colour, alpha=0.7, label=label)
    lowest = min(point.inference or 1 for point in points) * 1000
    highest = max(point.training or 1 for point in points) * 1000
    limits = (lowest / 10, highest * 30)  # room for the legend
    panel.set(xscale="log", yscale="log", ylabel="milliseconds", ylim=limits)
    panel.set_xlabel(AXIS_TITLES[axis])
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.minorticks_off()
    panel.set_title(f"Time over {AXIS_TITLES[axis]}")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, ncols=2, loc="upper left")


def between(terms: Any) -> Any:
    """Values at 20 steps between points, on a logarithmic scale, (P, K) -> (20 P, K)."""
    import numpy as np

    terms = np.asarray(terms, dtype=float)
    steps = np.linspace(0, len(terms) - 1, 20 * len(terms))
    columns = [np.interp(steps, range(len(terms)), np.log(column)) for column in terms.T]
    return np.exp(np.stack(columns, 1))


def draw_part_times(found: Profile, panel: Any) -> None:
    """Time of inference by part, over the lengths."""
    points = found.axes()["length"]
    sizes = [f"{shown_size(point):,}" for point in points]
    totals = {name: sum(point.parts.get(name, 0) for point in points) for name in points[-1].parts}
    largest = sorted(totals, key=lambda name: -totals[name])[:7]
    bottom = [0.0] * len(points)
    for name in sorted(largest):
        shares = [100 * point.parts.get(name, 0) / sum(point.parts.values()) for point in points]
        panel.bar(sizes, shares, bottom=bottom, label=name, width=0.7)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    panel.set(xlabel="tokens T", ylabel="share of the time of inference (%)", ylim=(0, 100))
    panel.set_title("Time by part")
    panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
