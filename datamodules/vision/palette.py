"""The colours of a data set as tokens: a palette, found by k-means or read from a file."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.utils.batching import epoch_permutation
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.extras import requires_extra
from datamodules.utils.files import read_object
from datamodules.vision.image_datasets import MemoryImages, StreamedImages

IMAGES = 2048  # from which a palette is taken, chosen at random
PIXELS = 50_000  # that k-means clusters, chosen at random
CHUNK = 2**16  # pixels that are compared with all colours at a time
FILES = ("palette.json", "preprocessor_config.json")  # in a folder


class Palette:
    """Colours that stand for the pixels of images (Chen 2020, section 3.2).

    Args:
        colours: (K, C), values in [0, 255], C is 1 for grey and 3 for RGB.
    """

    def __init__(self, colours: Tensor) -> None:
        self.colours = colours.float()

    def __len__(self) -> int:
        return len(self.colours)

    @property
    def channels(self) -> int:
        return self.colours.shape[1]

    def encode(self, images: Tensor) -> Tensor:
        """The nearest colour of each pixel, row by row: uint8 (B, C, H, W) -> int64 (B, H W).

        "Nearest" is by the Euclidean distance; of equal ones it is the first.
        """
        colours = self.colours.to(images.device)
        pixels = images.movedim(1, -1).flatten(0, 2).float()  # (B, C, H, W) -> (B H W, C)
        with torch.autocast(images.device.type, enabled=False):  # 16 bits cannot tell colours apart
            # of |x - c|^2 = |x|^2 - 2 x c + |c|^2 the first summand is the same for all colours
            half_norms = colours.square().sum(1) / 2  # (K,)
            parts = [
                (part @ colours.T - half_norms).argmax(1)  # (P, C) -> (P, K) -> (P,)
                for part in pixels.split(CHUNK)
            ]
        return torch.cat(parts).view(len(images), -1)  # (B H W,) -> (B, H W)

    def decode(self, tokens: Tensor) -> Tensor:
        """Square images of tokens: (B, N) -> uint8 (B, C, sqrt(N), sqrt(N))."""
        size = round(tokens.shape[1] ** 0.5)
        pixels = self.colours.round().to(torch.uint8).to(tokens.device)[tokens]  # (B, N, C)
        # (B, N, C) -> (B, C, N) -> (B, C, S, S)
        return pixels.mT.reshape(len(tokens), self.channels, size, size)

    def to_list(self) -> list[list[float]]:
        """Colours as a checkpoint keeps them."""
        return [[round(value, 3) for value in colour] for colour in self.colours.tolist()]

    def to_clusters(self) -> list[list[float]]:
        """Colours as transformers' ImageGPT keeps them: RGB in [-1, 1], also of grey images."""
        rgb = self.colours.expand(-1, 3).double() / 127.5 - 1  # (K, C) -> (K, 3)
        return [[round(value, 6) for value in colour] for colour in rgb.tolist()]


def read_palette(source: str, channels: int, option: str = "--data.palette") -> Palette:
    """Returns the palette in a file with `clusters`, as the image processor of transformers has it.

    Args:
        source: preprocessor_config.json of an ImageGPT, palette.json of a run, or their folder.
        channels: 1 for grey images, 3 for RGB.
        option: What names it in messages.

    Raises `UsageError` if there is no such file, or its colours do not fit the images.
    """
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in FILES if (path / name).is_file()]
        path = found[0] if found else path / FILES[0]
    try:
        clusters = torch.tensor(read_object(path)["clusters"], dtype=torch.float64)  # (K, 3)
        if clusters.ndim != 2 or clusters.shape[1] != 3 or len(clusters) < 2:
            raise ValueError("clusters must be two colours or more, of 3 numbers each")
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UsageError(
            f"{option} {path} has no palette ({reason}): give a palette.json, or a "
            "preprocessor_config.json with clusters."
        ) from error
    if not bool((clusters.abs() <= 1.001).all()):
        raise UsageError(f"{option} {path}: clusters must lie between -1 and 1.")
    colours = (clusters + 1) * 127.5  # (K, 3)
    if channels == 1:
        if not torch.equal(colours, colours[:, :1].expand(-1, 3)):
            raise UsageError(
                f"{option} {path} has colours, but the images are grey: add "
                "--data.dataset.channels 3, or leave it out"
            )
        colours = colours[:, :1]  # (K, 1)
    return Palette(colours)


def fit_palette(dataset: MemoryImages | StreamedImages, size: int, seed: int = 0) -> Palette:
    """Returns a palette of at most `size` colours for the images of a data set.

    They are the colours of the images if these have no more, else the centres of k-means, sorted by
    their brightness.

    Args:
        dataset: Training images; 2,048 at most are looked at.
        size: Number of colours at most.
        seed: Of the choice of images and pixels, and of k-means.

    Raises:
        DataError: All pixels have the same colour.
        UsageError: scikit-learn is needed and not installed.
    """
    order = epoch_permutation(len(dataset), seed=seed, epoch=0)[:IMAGES].sort().values.tolist()
    codes = []  # of colours, one number each
    channels = 1
    for start in range(0, len(order), 256):
        images = dataset[order[start : start + 256]]["image"]
        channels = images.shape[1]
        factors = torch.tensor([256**power for power in reversed(range(channels))])  # (C,)
        codes.append((images.long() * factors[:, None, None]).sum(1).flatten())  # (B H W,)
    code = torch.cat(codes)
    distinct = code.unique()  # sorted
    if len(distinct) == 1:
        raise DataError(
            f"all pixels of {len(order)} training images have one colour, so there is nothing to "
            "learn: give other images."
        )
    if len(distinct) <= size:
        return Palette(colours_of(distinct, channels))
    generator = torch.Generator().manual_seed(seed)
    chosen = code[torch.randperm(len(code), generator=generator)[:PIXELS]]
    return Palette(k_means(colours_of(chosen, channels), size, seed))


def colours_of(codes: Tensor, channels: int) -> Tensor:
    """(S,) numbers of colours -> (S, C) values in [0, 255]."""
    return torch.stack([codes >> 8 * power & 255 for power in reversed(range(channels))], 1)


def k_means(colours: Tensor, size: int, seed: int) -> Tensor:
    """Returns the centres of clusters of colours (S, C), sorted by their brightness: (K, C).

    There are `size` of them, or fewer if there are fewer different colours.
    """
    with requires_extra("igpt"):
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits
    size = min(size, len(colours.unique(dim=0)))
    model: Any = KMeans(size, n_init=1, max_iter=100, random_state=seed % 2**32)
    with threadpool_limits(1):  # sums by several threads are rounded differently
        model.fit(colours.double().numpy())
    centres = torch.from_numpy(model.cluster_centers_)
    return centres[centres.sum(1).argsort()]
