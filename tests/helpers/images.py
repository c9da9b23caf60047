"""Random images, and the metadata of a data set of images."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["ant", "bee", "cat"]
METADATA = {
    "problem_type": "single_label_classification",
    "class_names": CLASSES,
    "class_labels": CLASSES,
    "num_classes": 3,
    "target_mean": 0.0,
    "target_std": 1.0,
    "channels": 3,
    "image_size": 8,
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "mean": [0.5] * 3,
    "std": [0.2] * 3,
    "training_digest": 0,
}


def random_image(seed: int, size: tuple[int, int] = (20, 16), mode: str = "RGB") -> Image.Image:
    """A random picture of this width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save_image(
    path: Path, seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    random_image(seed, size, mode).save(path)
