"""A cache of its own for each test; folders and tables of images."""

from pathlib import Path

import pytest

from tests.helpers.images import CLASSES, random_image, save_image


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TESSERA_CACHE", str(folder))
    return folder


@pytest.fixture
def small_images(tmp_path: Path) -> Path:
    """Ten images of 8 x 8 pixels of each of two classes."""
    for name in ("ant", "bee"):
        for i in range(10):
            save_image(tmp_path / "train" / name / f"{i}.jpg", i)
    return tmp_path


@pytest.fixture
def image_table(tmp_path: Path) -> Path:
    """A local copy in the hub's schema, as `datasets` writes it: 40 training and 10 test images."""
    import datasets

    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}
    )
    folder = tmp_path / "parquet"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 10)):
        images = [random_image(i, (16, 16)) for i in range(count)]
        rows = {"img": images, "label": [i % 3 for i in range(count)]}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder
