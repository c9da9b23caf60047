"""Decoding and resizing: the pixels are those of Pillow and torchvision."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from datamodules.vision.decoding import ResizeAndCrop, decode
from tests.helpers.images import random_image


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_colour_mode_is_decoded(mode: str, channels: int) -> None:
    image = random_image(3, mode="L" if mode == "I;16" else mode)
    file = io.BytesIO()
    stored = image
    if mode == "I;16":
        stored = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    stored.save(file, "TIFF" if mode == "CMYK" else "PNG")
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(16, 20, channels)
    assert np.array_equal(decode(file.getvalue(), channels).permute(1, 2, 0), expected)


def test_photos_are_turned_upright() -> None:
    image = Image.fromarray(np.arange(16 * 24, dtype=np.uint8).reshape(16, 24) // 2)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    image.save(file, "JPEG", exif=exif, quality=100)
    expected = torch.from_numpy(np.rot90(np.asarray(image), 3).astype(np.int32))
    upright = decode(file.getvalue(), 1)[0].int()
    assert upright.shape == (24, 16) and (upright - expected).abs().max() <= 3


@pytest.mark.parametrize("shape", [(30, 20), (20, 31), (8, 9), (12, 12)])
def test_resizing_equals_torchvision(shape: tuple[int, int]) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    resized = v2.functional.resize(image, [12], antialias=True)
    expected = v2.functional.center_crop(resized, [12, 12])
    assert (ResizeAndCrop(12)(image).int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(30, 20), (20, 31), (12, 12), (13, 13)])
def test_bicubic_pixels_and_crops_are_those_of_pillow_and_torchvision(
    size: tuple[int, int], mode: str
) -> None:
    image = random_image(0, size, mode)
    theirs = v2.Compose([v2.Resize(13, v2.InterpolationMode.BICUBIC), v2.CenterCrop(12)])
    ours = ResizeAndCrop(12, "bicubic", 0.9)(v2.functional.pil_to_tensor(image))
    assert torch.equal(ours, v2.functional.pil_to_tensor(theirs(image)))
