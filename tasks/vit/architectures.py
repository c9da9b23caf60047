"""Which ViT to build: presets by name, or the architecture that goes with pretrained weights, and those weights."""

from dataclasses import asdict, replace
from typing import Any

from modules.vit import VIT_PRESETS


def presets() -> dict[str, dict[str, Any]]:
    """The named sizes as options; classes and channels come from the data."""
    return {name: asdict(replace(config, num_classes=None, channels=None)) for name, config in VIT_PRESETS.items()}
