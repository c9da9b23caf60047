"""The files of `profile`: JSON, CSV and a picture."""

import json
from pathlib import Path
from typing import Any

from datamodules.utils.files import write_text
from tasks.profiling.formulas import Part
from tasks.profiling.picture import draw
from tasks.profiling.report import Profile
from tasks.tracking.csv_files import write_csv


def write_profile(found: Profile, folder: Path) -> None:
    """Writes profile.json, profile.csv and profile.png into a folder."""
    write_text(folder / "profile.json", json.dumps(as_json(found), indent=1) + "\n")
    heads = [
        *("axis", "value", "tokens", "batch_size", "parameters"),
        *("flop_forward", "flop_training", "activation_bytes", "training_bytes"),
        *("inference_s", "training_s"),
    ]
    rows = [
        (
            *(point.axis, point.value, point.tokens, point.batch, point.parameters),
            *(*point.flops, point.activations, point.training_bytes),
            *(time and f"{time:.6g}" for time in (point.inference, point.training)),
        )
        for point in found.points
    ]
    write_csv(folder / "profile.csv", heads, list(zip(*rows, strict=True)))
    draw(found, folder / "profile.png")
    print(f"\nwritten: {folder}/profile.json, profile.csv, profile.png")


def part_as_json(found: Profile, part: Part) -> dict[str, Any]:
    """Parameters and FLOP of a part; None if they have no formula."""
    row: dict[str, Any] = {
        "name": part.name,
        "parameters": part.parameter_count(found.sizes),
        "parameters_counted": found.counted_parameters.get(part.name, 0),
        "parameters_formula": part.parameter_text,
        "flop_forward": part.forward_flops(found.sizes),
        "flop_training": part.training_flops(found.sizes),
        "flop_formula": part.flops_text,
    }
    if part.name in found.without_formula:
        row |= dict.fromkeys(("parameters", "parameters_formula"))
    if not found.has_flops:
        row |= dict.fromkeys(("flop_forward", "flop_training", "flop_formula"))
    return row


def as_json(found: Profile) -> dict[str, Any]:
    """All results as primitives; bytes, seconds and FLOP. What has no formula is None."""
    forward, training = found.counted_flops
    return {
        "name": found.name,
        "sizes": found.sizes,
        "assumed_sizes": list(found.assumed),
        "feedforward_hidden": list(found.hidden),
        "parameters": found.parameters,
        "own_variants": list(found.variants),
        "parts": [part_as_json(found, part) for part in found.parts],
        "flop_forward": found.forward_flops if found.has_flops else None,
        "flop_training": found.training_flops if found.has_flops else None,
        "flop_forward_counted": forward,
        "flop_training_counted": training,
        "flop_6nd": found.six_nd,
        "memory": found.memory(),
        "crossover_tokens": found.crossover,
        "no_times": found.no_times or None,
        "points": [
            {
                **{"axis": point.axis, "value": point.value, "tokens": point.tokens},
                "activation_bytes": point.activations,
                "training_bytes": point.training_bytes,
                **{"inference_s": point.inference, "training_s": point.training},
                "inference_parts_s": point.parts,
            }
            for point in found.points
        ],
        "fits": [
            {
                "axis": axis,
                "time": kind,
                "seconds": dict(zip(one.names, one.factors.tolist(), strict=True)),
            }
            for (axis, kind), one in found.fits().items()
        ],
    }
