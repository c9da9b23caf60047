"""From an encoded image file to a uint8 tensor of the wanted size."""

import io
import math
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

InterpolationName = Literal["bilinear", "bicubic"]
# Pillow would read more, some by other programs.
IMAGE_FORMATS = ("PNG", "BMP", "GIF", "WEBP", "TIFF", "JPEG")
MAX_ASPECT_RATIO = 16  # of an image that is resized; what lies outside is cropped away anyway
ORIENTATION = 0x0112  # of Exif data
BITS_PER_SAMPLE = 258  # of TIFF data
DAMAGED_EXIF = (SyntaxError, struct.error)  # what Pillow raises for it
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
        pixels = decode_jpeg(encoded, mode)
        return upright(pixels, data) if b"Exif\x00" in data else pixels
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as file:
            return pixels_of(file, channels)
    except Image.DecompressionBombError as error:
        pixels, limit = (f"{int(number):,}" for number in re.findall(r"\d+", str(error)))
        raise TooManyPixels(f"has {pixels} pixels, more than {limit}: shrink it") from error


def upright(pixels: Tensor, data: bytes) -> Tensor:
    """(C, H, W) -> (C, H, W) or (C, W, H), turned as the Exif data of its file say.

    torchvision looks for them in the first segment only.
    """
    from PIL import Image

    with warnings.catch_warnings():  # of large images and damaged metadata
        warnings.simplefilter("ignore")
        orientation = 1
        with (
            Image.open(io.BytesIO(data), formats=("JPEG",)) as file,
            suppress(*DAMAGED_EXIF),
        ):
            orientation = file.getexif().get(ORIENTATION, 1)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.mT
    mirrored = {-1: (2, 3, 6, 7), -2: (3, 4, 7, 8)}  # of columns, and of rows
    return pixels.flip([axis for axis, cases in mirrored.items() if orientation in cases])


def pixels_of(image: Any, channels: int) -> Tensor:
    """Pixels of an image of Pillow, upright, as uint8 (C, H, W); `channels` as in `decode`."""
    from PIL import Image, ImageOps

    bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))[0]  # 12 or 16 if "I;16"
    with suppress(*DAMAGED_EXIF):
        image = ImageOps.exif_transpose(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.copy()
        del image.info["transparency"]  # which is dropped anyway; Pillow would warn
    if 0 in image.size:
        raise ValueError(f"has no pixels: its size is {image.width} x {image.height}")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"has pixels of Pillow's mode {image.mode}, whose range is unknown: convert it to 8 "
            "bits, or unsigned 16 bits, per channel"
        )
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip to white
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
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


@dataclass(frozen=True)
class ResizeAndCrop:
    """Brings images to the size of a network, in timm's words.

    Args:
        size: Side of the result, in pixels.
        interpolation: How pixels are resized, antialiased; bicubic: the same pixels as Pillow's.
        crop_pct: The shorter side is resized to floor(size / crop_pct), then the centre is cropped.
    """

    size: int
    interpolation: InterpolationName = "bilinear"
    crop_pct: float = 1.0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "ResizeAndCrop":
        """As the images of a model are prepared, given its metadata."""
        return cls(metadata["image_size"], **resizing(metadata))

    def __call__(self, image: Tensor) -> Tensor:
        """uint8 (C, H, W) -> (C, size, size)."""
        size = self.size
        shorter = math.floor(size / self.crop_pct)
        longest = MAX_ASPECT_RATIO * min(image.shape[-2:])
        image = center_crop(image, min(image.shape[-2], longest), min(image.shape[-1], longest))
        h, w = image.shape[-2:]
        if (h, w) != (shorter, shorter):
            h, w = h * shorter // min(h, w), w * shorter // min(h, w)
            image = RESIZE[self.interpolation](image, h, w)  # (C, h, w)
        return center_crop(image, size, size)


def center_crop(image: Tensor, height: int, width: int) -> Tensor:
    """(C, H, W) -> (C, height, width)."""
    top = round((image.shape[-2] - height) / 2)
    left = round((image.shape[-1] - width) / 2)
    return image[:, top : top + height, left : left + width]


def resizing(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`interpolation` and `crop_pct` of metadata; older ones lack them, and mean the defaults."""
    return {
        name: metadata.get(name, getattr(ResizeAndCrop, name))
        for name in ("interpolation", "crop_pct")
    }


def resize_bilinear(image: Tensor, h: int, w: int) -> Tensor:
    """Resizes with torch, at most one level of 255 off Pillow: uint8 (C, H, W) -> (C, h, w)."""
    # (C, H, W) -> (1, C, H, W) -> (C, h, w)
    return F.interpolate(image[None], (h, w), mode="bilinear", antialias=True)[0]


def resize_bicubic(image: Tensor, h: int, w: int) -> Tensor:
    """Resizes with Pillow, as timm: uint8 (C, H, W) -> (C, h, w)."""
    from PIL import Image

    # (C, H, W) -> (H, W, C), or of one channel (H, W)
    pixels = (image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()
    resized = Image.fromarray(pixels).resize((w, h), Image.Resampling.BICUBIC)
    # (h, w) or (h, w, C) -> (h, w, C) -> (C, h, w)
    return torch.from_numpy(np.array(resized).reshape(h, w, len(image))).permute(2, 0, 1)


RESIZE: dict[InterpolationName, Callable[[Tensor, int, int], Tensor]] = {
    "bilinear": resize_bilinear,
    "bicubic": resize_bicubic,
}
