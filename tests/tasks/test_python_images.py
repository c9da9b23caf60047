"""Images in Python that cannot be read, and what a model says of itself."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
from PIL import Image

from tasks.errors import UsageError
from tests.helpers.tiny import picture

UNUSUAL = {  # one image of a list, and what the message says of it
    "Pillow, 32 bits": (Image.new("I", (8, 8)), "mode I"),
    "Pillow, Lab": (Image.new("LAB", (8, 8)), "LAB"),
    "Pillow, empty": (Image.new("RGB", (0, 8)), "no pixels: its size is 0 x 8"),
    "a tensor of none": (np.zeros((0, 8), np.uint8), r"\(0, 8\)"),
}


@pytest.mark.parametrize("task", ["vit", "igpt"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_images_are_named_by_their_number(name: str, task: str, runs: Path) -> None:
    image, words = UNUSUAL[name]
    with pytest.raises(UsageError, match=rf"^images\[1\]: .*{words}"):
        tessera.load(runs / task).embed([picture(8, "L"), image])


@pytest.mark.parametrize("task", ["vit", "igpt"])
def test_what_is_no_list_of_images_is_refused(task: str, runs: Path) -> None:
    model: Any = tessera.load(runs / task)
    for given in ({"image": [picture(8, "L")]}, None):
        with pytest.raises(TypeError, match=type(given).__name__):
            model.embed(given)


def test_a_path_that_no_file_has(runs: Path) -> None:
    model = tessera.load(runs / "vit", kind=tessera.ImageClassifier)
    with pytest.raises(tessera.DataError, match="null byte"):
        model.predict("a\0b.png")


def test_an_image_of_pillow_whose_file_is_cut_off(runs: Path) -> None:
    file = io.BytesIO()
    picture(64, "L").save(file, "PNG")
    image = Image.open(io.BytesIO(file.getvalue()[:400]))
    model = tessera.load(runs / "vit", kind=tessera.ImageClassifier)
    with pytest.raises(tessera.DataError, match=r"^images\[1\]: .* cannot be read \(.*truncated"):
        model.predict([picture(8, "L"), image])


@pytest.mark.parametrize("task", ["vit", "mae", "lm"])
def test_packed_weights_are_counted(task: str, runs: Path) -> None:
    count = f"{sum(p.numel() for p in tessera.load(runs / task).net.parameters()):,} parameters"
    assert count in repr(tessera.load(runs / task, packed=True))


def test_numbers_that_do_not_fit_are_named(runs: Path) -> None:
    masked = tessera.load(runs / "mae", kind=tessera.MaskedImageModel)
    generator = tessera.load(runs / "igpt", kind=tessera.ImageGenerator)
    for seed in (2**70, 1.5):
        with pytest.raises(UsageError, match="seed is"):
            masked.reconstruct(picture(8, "L"), seed=seed)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="count"):
        generator.sample(1.5)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="threads is 1.5"):
        tessera.load(runs / "vit", threads=1.5)  # type: ignore[call-overload]
