"""From an encoded image file to a uint8 tensor of the wanted size."""

import io
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# Pillow would read more, some by other programs.
IMAGE_FORMATS = ("PNG", "BMP", "GIF", "WEBP", "TIFF", "JPEG")
MAX_PIXELS = 2**27  # of an image that is decoded without Pillow, which has a limit of its own


class TooManyPixels(ValueError):
    """An image is so large that Pillow refuses it."""


def decode(data: bytes, channels: int) -> Tensor:
    """Pixels of one encoded image, upright, as uint8 (C, H, W) in [0, 255].

    Raises `TooManyPixels`; other errors are those of the decoders.

    Args:
        data: Content of a file: jpg, png, bmp, gif (first frame), webp, tiff.
        channels: 1 for grey, 3 for RGB; other images are converted, transparency is dropped.
    """
    if 0 < jpeg_pixels(data) <= MAX_PIXELS:  # the common case, three times as fast as Pillow
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(encoded, mode, apply_exif_orientation=b"Exif\x00" in data[:4096])
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as file:
            return pixels_of(file, channels)
    except Image.DecompressionBombError as error:
        pixels, limit = (f"{int(number):,}" for number in re.findall(r"\d+", str(error)))
        raise TooManyPixels(f"has {pixels} pixels, more than {limit}: shrink it") from error


def pixels_of(image: Any, channels: int) -> Tensor:
    """Pixels of an image of Pillow, upright, as uint8 (C, H, W); `channels` as in `decode`."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # 16 bits: Pillow's own conversion would clip to white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    # (H, W) or (H, W, C) -> (H, W, C) -> (C, H, W)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1)


def jpeg_pixels(data: bytes) -> int:
    """Pixels that the header of a JPEG file announces, for which a decoder allocates memory; 0 if
    it is unclear. (`Image.open` takes ten times as long: as long as to decode a small image.)

    >>> jpeg_pixels(bytes.fromhex("ffd8 ffe0 0002 ffc0 0008 08 0010 0020 00"))
    512
    """
    if data[:2] != b"\xff\xd8":
        return 0
    offset = 2
    while offset + 9 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        if marker == 1 or 0xD0 <= marker <= 0xD9:  # markers without a size, which belong elsewhere
            return 0
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            height = int.from_bytes(data[offset + 5 : offset + 7], "big")
            return height * int.from_bytes(data[offset + 7 : offset + 9], "big")
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return 0


def count_channels(data: bytes) -> int:
    """1 if an encoded image is grey, else 3; reads the header only."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as file:
        return 1 if file.mode in ("1", "L", "LA") or file.mode.startswith("I") else 3


def resize_and_crop(image: Tensor, size: int) -> Tensor:
    """Resizes the shorter side, antialiased, and crops: uint8 (C, H, W) -> (C, size, size)."""
    h, w = image.shape[-2:]
    if (h, w) == (size, size):
        return image
    scale = size / min(h, w)
    h = max(size, int(h * scale))
    w = max(size, int(w * scale))
    # (C, H, W) -> (1, C, H, W) -> (C, h, w)
    image = F.interpolate(image[None], (h, w), mode="bilinear", antialias=True)[0]
    top = round((h - size) / 2)
    left = round((w - size) / 2)
    return image[:, top : top + size, left : left + size]
