"""Decoding and resizing: the pixels are those of Pillow and torchvision."""

import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from datamodules.vision.decoding import RESIZE, ResizeAndCrop, center_crop, decode
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


def test_tiffs_of_12_bits_have_their_whole_range() -> None:
    """Which Pillow reads, but does not write: three bytes are two pixels."""
    pixels = bytes.fromhex("000 3ff 800 fff".replace(" ", ""))
    tags = [(256, 4), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1)]
    tags += [(279, len(pixels))]
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags)
    start = 8 + len(pixels)
    data = struct.pack("<2sHI", b"II", 42, start) + pixels
    data += struct.pack("<H", len(tags)) + entries + bytes(4)
    assert decode(data, 1).flatten().tolist() == [0x00, 0x3F, 0x80, 0xFF]


@pytest.mark.parametrize("before", [0, 60_000])
def test_photos_are_turned_upright(before: int) -> None:
    """Also behind a segment of other metadata."""
    image = Image.fromarray(np.arange(16 * 24, dtype=np.uint8).reshape(16, 24) // 2)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    image.save(file, "JPEG", exif=exif, quality=100)
    data = file.getvalue()
    segment = b"\xff\xed" + (before + 2).to_bytes(2, "big") + bytes(before)
    expected = torch.from_numpy(np.rot90(np.asarray(image), 3).astype(np.int32))
    upright = decode(data[:2] + segment + data[2:], 1)[0].int()
    assert upright.shape == (24, 16) and (upright - expected).abs().max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_with_other_metadata_first_are_turned_as_by_pillow(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image = random_image(0, (24, 16), "RGB").resize((48, 32), Image.Resampling.BICUBIC)
    image.save(file, "JPEG", exif=exif, quality=100, subsampling=0)
    data = file.getvalue()
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x/>"
    segment = b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp
    turned = ImageOps.exif_transpose(Image.open(file))
    expected = torch.from_numpy(np.array(turned)).permute(2, 0, 1).int()  # (C, H, W)
    found = decode(data[:2] + segment + data[2:], 3).int()
    assert found.shape == expected.shape and (found - expected).abs().max() <= 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0"])
def test_damaged_exif_data_do_not_hide_the_pixels(exif: bytes, kind: str) -> None:
    image = random_image(0, mode="RGB")
    file = io.BytesIO()
    image.save(file, kind, exif=exif, lossless=True, dpi=(72, 72), quality=100, subsampling=0)
    found = decode(file.getvalue(), 3).permute(1, 2, 0).int()
    assert (found - np.asarray(image)).abs().max() <= (4 if kind == "JPEG" else 0)


@pytest.mark.filterwarnings("error")
def test_transparency_of_a_palette_is_dropped_without_a_warning() -> None:
    image = random_image(0, mode="RGB").convert("P")
    file = io.BytesIO()
    image.save(file, "PNG", transparency=bytes(range(200)))
    expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(decode(file.getvalue(), 3).permute(1, 2, 0), expected)


@pytest.mark.parametrize("shape", [(30, 20), (20, 31), (8, 9), (12, 12)])
def test_resizing_equals_torchvision(shape: tuple[int, int]) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    resized = v2.functional.resize(image, [12], antialias=True)
    expected = v2.functional.center_crop(resized, [12, 12])
    assert (ResizeAndCrop(12)(image).int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("shape, size", [((110, 220), 224), ((294, 392), 96), ((196, 294), 256)])
def test_the_longer_side_is_not_rounded_twice(shape: tuple[int, int], size: int) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    found = ResizeAndCrop(size, "bicubic")(image)
    theirs = Image.fromarray(image.permute(1, 2, 0).numpy())  # (H, W, C)
    bicubic = v2.InterpolationMode.BICUBIC
    theirs = v2.functional.center_crop(v2.functional.resize(theirs, [size], bicubic), [size, size])
    expected = torch.from_numpy(np.array(theirs)).permute(2, 0, 1)  # (C, H, W)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(30, 20), (20, 31), (12, 12), (13, 13)])
def test_bicubic_pixels_and_crops_are_those_of_pillow_and_torchvision(
    size: tuple[int, int], mode: str
) -> None:
    image = random_image(0, size, mode)
    theirs = v2.Compose([v2.Resize(13, v2.InterpolationMode.BICUBIC), v2.CenterCrop(12)])
    ours = ResizeAndCrop(12, "bicubic", 0.9)(v2.functional.pil_to_tensor(image))
    assert torch.equal(ours, v2.functional.pil_to_tensor(theirs(image)))


@pytest.mark.parametrize("shape", [(3, 1000), (1000, 3)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_centre_of_thin_images_is_as_if_all_were_resized(
    shape: tuple[int, int], interpolation: Any
) -> None:
    ramp = torch.arange(1000).div(4, rounding_mode="floor").to(torch.uint8)
    image = (ramp if shape[0] == 3 else ramp[:, None]).expand(1, *shape)
    found = ResizeAndCrop(24, interpolation)(image)
    whole = RESIZE[interpolation](image, shape[0] * 8, shape[1] * 8)
    assert (found.int() - center_crop(whole, 24, 24).int()).abs().max() <= 1


def test_a_thin_image_takes_little_memory() -> None:
    """All of it, enlarged, would take 4 TB."""
    image = torch.zeros(1, 1, 4_000_000, dtype=torch.uint8)
    assert ResizeAndCrop(1000)(image).shape == (1, 1000, 1000)
