"""From encoded image files to uint8 tensors of one size, many at a time."""

import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.progress import progress_bar

CHUNK = 256  # images per job of a thread
FORMATS = (
    "PNG",
    "BMP",
    "GIF",
    "WEBP",
    "TIFF",
    "JPEG",
)  # Pillow would read more, some by other programs
MOST = 2**27  # pixels of an image that is decoded without Pillow, which has a limit of its own


class Pictures(Protocol):
    """Encoded images of one split."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str: ...

    def image(self, i: int, channels: int) -> Tensor: ...


def decode(data: bytes, channels: int) -> Tensor:
    """Pixels of one encoded image, upright, as uint8 (C, Y, X) in [0, 255].

    Args:
        data: Content of a file: jpg, png, bmp, gif (first frame), webp, tiff.
        channels: 1 for grey, 3 for RGB; other images are converted, transparency is dropped.
    """
    if 0 < jpeg_pixels(data) <= MOST:  # JPEG: the common case, three times as fast without Pillow
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(encoded, mode, apply_exif_orientation=b"Exif\x00" in data[:4096])
    import io

    import numpy as np
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data), formats=FORMATS) as file:
        image: Any = ImageOps.exif_transpose(file)
        if image.mode.startswith("I;16"):  # 16 bits: Pillow's own conversion would clip to white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    # (Y, X) or (Y, X, C) -> (Y, X, C) -> (C, Y, X)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1)


def jpeg_pixels(data: bytes) -> int:
    """Pixels that the header of a JPEG file announces, for which a decoder takes memory; 0 where that is not plain.

    >>> jpeg_pixels(bytes.fromhex("ffd8 ffe0 0002 ffc0 0008 08 0010 0020 00"))
    512
    """
    place = 2 if data[:2] == b"\xff\xd8" else len(data)
    while place + 9 <= len(data) and data[place] == 0xFF:
        if (
            0xD0 <= data[place + 1] <= 0xD9 or data[place + 1] == 1
        ):  # marks without a size, which belong elsewhere
            return 0
        mark, size = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if 0xC0 <= mark <= 0xCF and mark not in (0xC4, 0xC8, 0xCC):  # start of a frame
            height, width = (
                int.from_bytes(data[place + at : place + at + 2], "big") for at in (5, 7)
            )
            return height * width
        place += 1 if mark == 0xFF else 2 + size  # fill bytes may stand before a mark
    return 0


def count_channels(data: bytes) -> int:
    """1 where an encoded image is grey, else 3; reads the header only."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as file:
        return 1 if file.mode in ("1", "L", "LA") or file.mode.startswith("I") else 3


def fit_size(image: Tensor, size: int) -> Tensor:
    """Scales the shorter side to `size` (antialiased) and cuts out the centre: (C, Y, X) -> (C, size, size), uint8."""
    y, x = image.shape[-2:]
    if (y, x) == (size, size):
        return image
    scale = size / min(y, x)
    y, x = max(size, int(y * scale)), max(size, int(x * scale))
    image = F.interpolate(image[None], (y, x), mode="bilinear", antialias=True)[0]
    top, left = round((y - size) / 2), round((x - size) / 2)
    return image[:, top : top + size, left : left + size]


def read_image(pictures: Pictures, i: int, channels: int, size: int, resize: bool = True) -> Tensor:
    """Image i as uint8 (C, size, size).

    Raises:
        DataError: The file is corrupt, missing or not an image; the sentence names it.
        UsageError: It has another size and may not be resized.
    """
    try:
        image = pictures.image(i, channels)
        if resize:
            return fit_size(image, size)
    except Exception as error:  # each decoder has its own kinds
        said = str(
            getattr(error, "strerror", None) or error
        ).strip()  # of the system or of a decoder
        known = said and "BytesIO" not in said
        line = (
            re.sub(r"\S*/\S+:\d+,? ?", "", said).splitlines()[0] if known else ""
        )  # no place in torch
        reason = line[:120] or type(error).__name__
        raise DataError(
            f"{pictures.name(i)} is not a readable image ({reason}): remove it, or leave such files out with "
            "--data.skip_bad true."
        ) from error
    y, x = image.shape[-2:]
    if (y, x) != (size, size):
        raise UsageError(
            f"{pictures.name(i)} is {x} x {y} pixels where others are {size} x {size}: add --data.image_size N."
        )
    return image


def common_size(pictures: Pictures, channels: int, skip_bad: bool) -> int:
    """Side of the first readable image, for data whose images all have one size.

    Raises:
        UsageError: It is not square. DataError: it is unreadable, or all are.
    """
    for i in range(len(pictures)):
        try:
            y, x = pictures.image(i, channels).shape[-2:]
        except Exception:
            if skip_bad:
                continue
            read_image(pictures, i, channels, 1)  # says what is wrong with it
        if y != x:
            raise UsageError(
                f"{pictures.name(i)} is {x} x {y} pixels, not square: add --data.image_size N."
            )
        return y
    raise DataError("none of the image files can be read.")


def decode_all(
    pictures: Pictures, channels: int, size: int, resize: bool, skip_bad: bool
) -> tuple[Tensor, list[int], list[str]]:
    """Decodes a whole split in threads.

    Args:
        pictures: The split.
        channels, size: Of the result.
        resize: Whether images of another size are resized or refused.
        skip_bad: Leave unreadable images out instead of stopping at the first.

    Returns:
        Pixels uint8 (S, C, size, size), the indices of the S images that were read, the names of those that were not.
    """
    pixels = torch.empty(len(pictures), channels, size, size, dtype=torch.uint8)
    bad: set[int] = set()

    def work(chunk: range) -> int:
        for i in chunk:
            try:
                pixels[i] = read_image(pictures, i, channels, size, resize)
            except DataError:
                if not skip_bad:
                    raise
                bad.add(i)
        return len(chunk)

    chunks = [range(i, min(i + CHUNK, len(pictures))) for i in range(0, len(pictures), CHUNK)]
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        progress_bar("decoding images", len(pictures)) as advance,
    ):
        jobs: list[Future[int]] = [pool.submit(work, chunk) for chunk in chunks]
        try:
            for job in jobs:
                advance(job.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if not bad:
        return pixels, list(range(len(pictures))), []
    good = [i for i in range(len(pictures)) if i not in bad]
    return pixels[good], good, [pictures.name(i) for i in sorted(bad)]


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
