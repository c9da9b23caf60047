"""Writes a page: one HTML file that needs no other file and no network."""

import base64
import io
import json
import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from tasks.look.views import Curves, Heads, Matrix, Sample, Table, Tokens, View

WEIGHT_STEPS = (255, 63, 15, 7)  # between 0 and 1: fewer if the page would be too large
MAX_BYTES = 9_500_000
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<noscript>This page needs JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(
    title: str, note: str, samples: Sequence[Sample], shared: Mapping[str, Sequence[View]]
) -> str:
    """Returns the page, if possible of at most 10 MB, for which weights are rounded more coarsely.

    Warns of weights that are, and of a page that is larger; the page says both, too.

    Args:
        title: Of the page.
        note: Below it.
        samples: What to show; the page has a choice of them.
        shared: Tabs that are the same for all samples.
    """
    content: dict[str, Any] = {}
    for steps in WEIGHT_STEPS:
        shown = [{"name": one.name, "tabs": tabs(one.tabs, steps)} for one in samples]
        content = {"title": title, "note": note, "samples": shown, "shared": tabs(shared, steps)}
        data = json.dumps(content, allow_nan=False)
        if len(data) <= MAX_BYTES:
            break
    remarks = []
    if steps < WEIGHT_STEPS[0]:
        error = f"{1 / steps:.2f}"
        remarks.append(
            f"attention weights are rounded, by up to {error}: exact ones need over 10 MB"
        )
    if len(data) > MAX_BYTES:
        size = f"{len(data) / 1e6:.0f} MB"
        remarks.append(f"the page has {size} and may be slow: give fewer or shorter inputs")
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    content |= {"remarks": remarks, "rounded": steps < WEIGHT_STEPS[0]}
    data = json.dumps(content, allow_nan=False)
    folder = files(__package__)
    return PAGE.format(
        title=escape(title),
        css=(folder / "page.css").read_text(),
        script=(folder / "page.js").read_text(),
        data=data.replace("<", "\\u003c"),  # no text of a token ends the element
    )


def tabs(views: Mapping[str, Sequence[View]], steps: int) -> list[dict[str, Any]]:
    """Tabs as JSON has them, without empty ones."""
    return [
        {"name": name, "views": [encoded(view, steps) for view in group]}
        for name, group in views.items()
        if group
    ]


def encoded(view: View, steps: int) -> dict[str, Any]:
    """A view as JSON has it; weights in `steps`."""
    kind = type(view).__name__
    if isinstance(view, Heads):
        picture = None if view.image is None else png(view.image)
        return {
            "kind": kind,
            "title": view.title,
            "queries": [*view.queries],
            "keys": [*view.keys],
            "steps": [*view.steps],
            "shape": [*view.weights.shape],
            "weights": packed(view.weights, steps),
            "image": picture,
            "grid": view.grid,
        }
    content = vars(view) if isinstance(view, Matrix) else asdict(view)
    if isinstance(view, Matrix):
        rows = view.values.double()  # (R, C)
        content = content | {"values": [[*map(five_digits, row)] for row in rows.tolist()]}
        if None in map(finite, view.limits or ()):
            content = content | {"limits": None}
    if isinstance(view, Tokens):
        content = content | {"values": [*map(finite, view.values)]}
    if isinstance(view, Table):
        content = content | {"rows": [[*map(finite, row)] for row in view.rows]}
    if isinstance(view, Curves):
        lines = {name: [*map(five_digits, values)] for name, values in view.lines.items()}
        content = content | {"lines": lines}
    return {"kind": kind, **content}


def five_digits(value: float) -> float | None:
    """Five digits; None as of `finite`."""
    number: float | None = finite(float(f"{value:.5g}"))
    return number


def finite(value: Any) -> Any:
    """The value; None for a number that is not finite, which JSON cannot say."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def packed(weights: Tensor, steps: int) -> str:
    """Weights from 0 to 1 as base64 of deflated bytes, 255 sqrt(w) in `steps`.

    The root keeps small weights apart, of which long texts have most.
    """
    rounded = weights.float().clamp(0, 1).sqrt().mul(steps).round()
    values = rounded.mul(255 / steps).round().to(torch.uint8)
    return base64.b64encode(zlib.compress(values.numpy().tobytes(), 6)).decode()


def png(pixels: Tensor) -> str:
    """An image, uint8 (C, H, W), as a data URL."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).numpy()  # (H, W, C)
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
