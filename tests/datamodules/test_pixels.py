"""Palettes: the colours of images as tokens."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from transformers import ImageGPTImageProcessor

from datamodules.pixels import PixelData
from datamodules.utils.errors import DataError, UsageError
from datamodules.vision import palette
from datamodules.vision.image_datasets import MemoryImages
from datamodules.vision.palette import Palette, fit_palette, k_means, read_palette
from tests.helpers.command import Patch
from tests.helpers.images import random_image, save_image


def images(count: int = 20, channels: int = 3, side: int = 8) -> MemoryImages:
    """Random smooth images: neighbouring pixels are alike, as in photos."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(count, channels, 3, 3, generator=generator)
    pixels = torch.nn.functional.interpolate(small, side, mode="bilinear").mul(255)
    return MemoryImages(pixels.to(torch.uint8), torch.zeros(count, dtype=torch.int64))


def test_digits_keep_their_17_grey_levels() -> None:
    data = PixelData()
    data.setup("fit")
    pixels = data.dataset("train").pixels
    palette = Palette(torch.tensor(data.metadata()["palette"]))
    tokens = palette.encode(pixels)
    assert len(palette) == 17 and tokens.shape == (len(pixels), 64)
    assert torch.equal(palette.decode(tokens), pixels)
    sixteenths = pixels.flatten(1).float().mul(16 / 255).round().long()
    assert torch.equal(tokens, sixteenths)  # tokens are in the order of brightness


@pytest.mark.parametrize("channels", [1, 3])
def test_tokens_are_those_of_the_nearest_colours(channels: int) -> None:
    colours = torch.rand(40, channels) * 255
    pixels = images(channels=channels).pixels
    flat = pixels.movedim(1, -1).reshape(-1, channels).double()
    distances = (flat[:, None] - colours.double()).square().sum(-1)  # (P, K)
    expected = distances.argmin(1).view(len(pixels), -1)
    palette = Palette(colours)
    with torch.autocast("cpu", torch.bfloat16):
        found = palette.encode(pixels)
    # float32 may choose another one of two that are equally near
    away = distances.gather(1, found.view(-1, 1)) - distances.gather(1, expected.view(-1, 1))
    assert away.max() < 0.1 and (found == expected).float().mean() > 0.999


def test_k_means_is_as_good_as_scikit_learns_best() -> None:
    data = images()
    palette = fit_palette(data, 16)
    assert len(palette) == 16
    again = fit_palette(data, 16)
    assert torch.equal(palette.colours, again.colours)
    flat = data.pixels.movedim(1, -1).reshape(-1, 3).double()
    error = (flat[:, None] - palette.colours.double()).square().sum(-1).amin(1).sum()
    best = KMeans(16, n_init=10, random_state=1).fit(flat.numpy()).inertia_
    assert error < 1.15 * best
    other = fit_palette(data, 16, seed=1)
    assert not torch.equal(palette.colours, other.colours)


def test_few_colours_are_kept_as_they_are() -> None:
    colours = torch.tensor([[0, 0, 0], [10, 200, 30], [255, 255, 255]], dtype=torch.uint8)
    choice = torch.randint(3, (4, 6, 6))
    pixels = colours[choice].permute(0, 3, 1, 2)
    palette = fit_palette(MemoryImages(pixels, torch.zeros(4)), 512)
    assert torch.equal(palette.colours, colours.float())
    assert torch.equal(palette.decode(palette.encode(pixels)), pixels)


def test_images_of_one_colour_are_refused() -> None:
    pixels = torch.full((4, 3, 8, 8), 7, dtype=torch.uint8)
    with pytest.raises(DataError, match="one colour"):
        fit_palette(MemoryImages(pixels, torch.zeros(4)), 8)


def test_a_file_of_transformers_gives_the_tokens_of_their_processor(tmp_path: Path) -> None:
    clusters = np.random.default_rng(0).uniform(-1, 1, (30, 3)).round(6)
    processor = ImageGPTImageProcessor(clusters=clusters, size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path)
    picture = random_image(0, (8, 8))
    expected = processor(picture, return_tensors="pt")["input_ids"]
    palette = read_palette(str(tmp_path), 3)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    assert torch.equal(palette.encode(pixels), expected.long())
    assert np.allclose(palette.to_clusters(), clusters, atol=1e-6)


@pytest.mark.parametrize("content, named", [
    ("{}", "no palette"), ("[]", "no palette"), ('{"clusters": [[0, 0]]}', "3 numbers"),
    ('{"clusters": [[0, 0, 0], [0, 0, 9]]}', "-1 and 1"), ('{"clusters": "a"}', "no palette"),
    ('{"clusters": [[0, 0, 0], [0, 0, 1]]}', "grey"),
])  # fmt: skip
def test_a_file_without_a_palette_is_refused(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "palette.json").write_text(content)
    with pytest.raises(UsageError, match=named):
        read_palette(str(tmp_path), 1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(UsageError, match=r"pip install .*tessera\[igpt\]"):
        fit_palette(images(), 8)


def folder_of_images(tmp_path: Path) -> Path:
    for number in range(8):
        save_image(tmp_path / f"images/train/{'ab'[number % 2]}/{number}.png", number)
    return tmp_path / "images"


def test_a_palette_other_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    path = str(folder_of_images(tmp_path))
    data = PixelData(path=path, palette_size=8)
    data.setup("fit")
    metadata = data.metadata()
    assert len(metadata["palette"]) == 8
    PixelData(path=path).set_metadata(metadata)
    PixelData(path=path, palette_size=8).set_metadata(metadata)
    with pytest.raises(UsageError, match="palette_size is 9"):
        PixelData(path=path, palette_size=9).set_metadata(metadata)
    file = tmp_path / "other.json"
    own: Any = Palette(torch.tensor(metadata["palette"])).to_clusters()
    file.write_text(json.dumps({"clusters": own}))
    PixelData(path=path, palette=str(file)).set_metadata(metadata)
    file.write_text(json.dumps({"clusters": own[1:]}))
    with pytest.raises(UsageError, match=r"7 colours.*8 colours"):
        PixelData(path=path, palette=str(file)).set_metadata(metadata)
    with pytest.raises(UsageError, match="palette_size is 3.*7 colours"):
        PixelData(path=path, palette=str(file), palette_size=3).setup("fit")
    with pytest.raises(UsageError, match="at least 2"):
        PixelData(path=path, palette_size=1)


def test_the_palette_is_that_of_all_images(monkeypatch: Patch) -> None:
    pixels = torch.randint(100, (30, 3, 48, 48), dtype=torch.uint8)
    pixels[25:, 0] += 150  # red, after the first 50,000 pixels
    assert fit_palette(MemoryImages(pixels, torch.zeros(30)), 6).colours[:, 0].max() > 150
    monkeypatch.setattr(palette, "IMAGES", 2)  # the seed chooses them
    plain = torch.arange(50, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    images = MemoryImages(plain, torch.zeros(50))
    assert len({str(fit_palette(images, 8, seed).colours) for seed in range(5)}) > 1


def test_colours_are_sorted_by_brightness() -> None:
    colours = k_means(torch.randint(256, (500, 3)), 8, 0)
    assert (colours.sum(1).diff() >= 0).all()
