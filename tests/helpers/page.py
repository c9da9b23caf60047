"""Reading the data inside a page that `look` wrote."""

import json
import re
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def content(page: Path) -> dict[str, Any]:
    """The data inside a page."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text()
    )
    return json.loads(text)


def tab_views(data: dict[str, Any], sample: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The views of each tab of a sample."""
    return {tab["name"]: tab["views"] for tab in data["samples"][sample]["tabs"]}


def unpacked(view: dict[str, Any]) -> Tensor:
    """Attention weights (S, L, H, N, M)."""
    values = np.frombuffer(zlib.decompress(b64decode(view["weights"])), np.uint8)
    return torch.from_numpy((values / 255.0) ** 2).reshape(view["shape"]).float()
