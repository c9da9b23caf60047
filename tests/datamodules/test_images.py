"""Images from every source: the right pixels, labels, splits and metadata."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from datamodules.images import ImageData, UnlabelledImageData
from datamodules.images import LoadingOptions as Loading
from datamodules.sources import SOURCES, DatasetOptions
from datamodules.utils.splits import stratified_split
from datamodules.vision.image_datasets import MemoryImages, channel_statistics
from datamodules.vision.records import PixelRecords
from tests.helpers.images import CLASSES, METADATA, random_image, save_image

FORMATS = [("jpg", "RGB"), ("png", "RGBA"), ("bmp", "RGB"), ("gif", "P"), ("webp", "RGB")]
FORMATS += [("tiff", "L"), ("jpeg", "L")]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve images of each class in several formats, modes, sizes and depths of folders."""
    rows = []
    for label, name in enumerate(CLASSES):
        for i in range(12):
            ending, mode = FORMATS[i % len(FORMATS)]
            path = tmp_path / "train" / name / ("deeper" if i % 2 else "") / f"{i:02}.{ending}"
            save_image(path, 100 * label + i, (20 + i, 16 + 2 * label), mode)
            rows.append({"file_name": str(path.relative_to(tmp_path)), "label": name})
    (tmp_path / "train" / ".DS_Store").write_bytes(b"clutter")
    lines = [f"{row['file_name']},{row['label']}" for row in rows]
    (tmp_path / "train.csv").write_text("\n".join(["file_name,label", *lines]))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def build(source: str, photos: Path, image_table: Path, **options: Any) -> ImageData:
    own: dict[str, Any] = {"hub": {"path": str(image_table)}, "digits": {}}.get(
        source, {"path": str(photos), "image_size": 12}
    )
    if source in ("csv", "jsonl"):
        own["path"] = str(photos / f"train.{source}")
    return ImageData(source, **{**own, "batch_size": 8, **options})


def everything(data: ImageData, split: str) -> dict[str, Any]:
    """All samples of a split in one batch, in order, with their rows in the files."""
    data.setup("test" if split == "test" else "fit")
    dataset = data._datasets[split]
    return dataset[list(range(len(dataset)))] | {"rows": data._split(split).rows}


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("source", SOURCES)
def test_batches_and_metadata(source: str, photos: Path, image_table: Path) -> None:
    """The same from memory and from workers; training and validation share nothing."""
    runs = []
    for loading in (Loading(), Loading(memory_limit_mb=0, num_workers=2)):
        data = build(source, photos, image_table, loading=loading)
        data.prepare_data()
        data.setup("fit")
        data.setup("test")
        metadata = data.metadata()
        batches = [*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()]
        runs.append([metadata, *batches])
    assert runs[0][0] == runs[1][0] and len(runs[0]) == len(runs[1])
    for one, other in zip(runs[0][1:], runs[1][1:], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    batch = runs[0][1]
    side = metadata["image_size"]
    assert batch["image"].shape == (8, metadata["channels"], side, side)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].dtype == batch["index"].dtype == torch.int64
    assert metadata.keys() == METADATA.keys()
    assert metadata["num_classes"] == len(metadata["class_names"])
    pixels = everything(data, "train")["image"].double() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), unbiased=False)
    assert metadata["mean"] == pytest.approx(mean.tolist(), abs=1e-4)
    assert metadata["std"] == pytest.approx(std.tolist(), abs=1e-4)

    def rows(seed: int) -> tuple[Tensor, Tensor]:
        options = DatasetOptions(val_fraction=0.2, split_seed=seed)
        data = build(source, photos, image_table, dataset=options)
        return data._split("train").rows, data._split("val").rows

    train, val = rows(0)
    assert not set(train.tolist()) & set(val.tolist())
    assert torch.equal(rows(0)[1], val) and not torch.equal(rows(1)[1], val)
    assert len(val) / (len(train) + len(val)) == pytest.approx(0.2, abs=0.04)


def test_digits_are_those_of_scikit_learn_with_a_fixed_fifth_for_the_test() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    tests = []
    for seed in (0, 1):
        data = ImageData(dataset=DatasetOptions(split_seed=seed), loading=Loading(seed=seed))
        data.setup("fit")
        assert "test" not in data._datasets
        batches = [everything(data, split) for split in ("train", "val", "test")]
        for batch in batches:
            assert batch["label"].tolist() == labels[batch["rows"]].tolist()
            pixels = (batch["image"].flatten(1) * (16 / 255)).round()
            assert pixels.tolist() == images[batch["rows"]].tolist()
        assert sorted(torch.cat([batch["rows"] for batch in batches]).tolist()) == [*range(1797)]
        tests.append(batches[2]["rows"])
    assert torch.equal(*tests)
    counts = np.bincount(labels[tests[0]])
    assert np.abs(counts - np.bincount(labels) / 5).max() <= 0.5


@pytest.mark.parametrize("size, warned", [(None, False), (31, False), (32, True)])
def test_images_that_are_much_enlarged(
    size: int | None, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    data = ImageData(image_size=size)
    data.setup("test")
    assert not recwarn.list
    data.setup("fit")
    assert [f"8 x 8 pixels and is enlarged to {size}" in str(w.message) for w in recwarn] == [
        True
    ] * warned


def test_a_stratified_split_takes_the_fraction_of_every_class() -> None:
    labels = torch.tensor([0] * 50 + [2] * 10 + [3] * 2 + [4])
    first, second = stratified_split(labels, 0.2, seed=4)
    assert labels[second].bincount(minlength=5).tolist() == [10, 0, 2, 1, 0]
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(63))


def by_path(data: ImageData) -> dict[str, tuple[Tensor, int]]:
    """Image and label of the training and validation images, by the name of the file."""
    found = {}
    for split in ("train", "val"):
        batch = everything(data, split)
        records = data._split(split)
        for i, (image, label) in enumerate(zip(batch["image"], batch["label"], strict=True)):
            found[records.name(i)] = image, int(label)
    return found


def test_folders_are_read_as_torchvision_reads_them(photos: Path) -> None:
    theirs = ImageFolder(str(photos / "train"))
    data = ImageData("folder", str(photos), 12)
    ours = by_path(data)
    assert data.metadata()["class_names"] == theirs.classes
    paths = {path for path in ours if not path.endswith(".gif")}
    assert paths == {path for path, _ in theirs.samples}
    for path, label in theirs.samples:
        image, own = ours[path]
        pixels = v2.functional.pil_to_tensor(theirs.loader(path))
        resized = v2.functional.resize(pixels, [12], antialias=True)
        expected = v2.functional.center_crop(resized, [12, 12])
        assert own == label and (image.int() - expected.int()).abs().max() <= 2, path


@pytest.mark.parametrize("names", [("Train", "TEST"), ("training", "testing")])
def test_other_names_of_split_folders(names: tuple[str, str], small_images: Path) -> None:
    (small_images / "train").rename(small_images / names[0])
    save_image(small_images / names[1] / "bee" / "1.jpg")
    data = ImageData(path=str(small_images))
    data.setup("fit")
    assert data.metadata()["class_names"] == ["ant", "bee"]
    assert data.dataset("test").labels.tolist() == [1]


@pytest.mark.parametrize("names", [["Bus", "Train"], ["racing", "training"]])
def test_a_class_may_be_called_train(names: list[str], small_images: Path) -> None:
    (small_images / "train/ant").rename(small_images / names[0])
    (small_images / "train/bee").rename(small_images / names[1])
    (small_images / "train").rmdir()
    data = ImageData(path=str(small_images))
    data.setup("fit")
    assert data.metadata()["class_names"] == names


@pytest.mark.parametrize("split", ["Train", "training"])
def test_images_without_classes_in_other_split_folders(split: str, tmp_path: Path) -> None:
    for number in range(8):
        save_image(tmp_path / split / f"{number}.png", number)
    data = UnlabelledImageData(path=str(tmp_path))
    data.setup("fit")
    assert len(data.dataset("train")) + len(data.dataset("val")) == 8


def test_splits_of_folders(photos: Path) -> None:
    data = ImageData("folder", str(photos), 12)
    assert torch.equal(everything(data, "test")["rows"], everything(data, "val")["rows"])
    save_image(photos / "test" / "bee" / "1.png")
    assert everything(ImageData("folder", str(photos), 12), "test")["label"].tolist() == [1]
    for name in CLASSES:
        save_image(photos / "val" / name / "1.png")
    data = ImageData("folder", str(photos), 12)
    data.setup("fit")
    assert (len(data.dataset("train")), len(data.dataset("val"))) == (36, 3)
    metadata = data.metadata()
    (photos / "train").rename(photos / "unread")
    data = ImageData("folder", str(photos))  # a checkpoint needs no training split
    data.set_metadata(metadata)
    assert everything(data, "test")["label"].tolist() == [1]


def test_tables_of_the_hub(
    image_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `datasets` reads them, from a path, from TESSERA_DATA or downloaded."""
    files = {
        split: str(image_table / f"{split}-00000-of-00001.parquet") for split in ("train", "test")
    }
    cache = str(tmp_path / "cache")
    theirs = datasets.load_dataset("parquet", data_files=files, cache_dir=cache)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: theirs)
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    named = DatasetOptions(name="some/one", local="parquet")
    found = [ImageData("hub", str(image_table)), ImageData("hub", dataset=named)]
    assert [everything(data, "train")["rows"].tolist() for data in found[1:]]  # downloaded
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    monkeypatch.delattr(datasets, "load_dataset")
    found.append(ImageData("hub", dataset=named))
    for data in found:
        batch = everything(data, "train")
        assert data.metadata() == found[0].metadata()
        assert data.metadata()["class_names"] == CLASSES
        for i, row in enumerate(batch["rows"].tolist()):
            assert batch["label"][i] == theirs["train"][row]["label"]
            pixels = np.asarray(theirs["train"][row]["img"])
            assert np.array_equal(batch["image"][i].permute(1, 2, 0), pixels)
    given = {"class_names": ["x", "y", "z"], "mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0]}
    metadata = ImageData("hub", str(image_table), dataset=DatasetOptions(**given)).metadata()
    assert {name: metadata[name] for name in given} == given


def test_columns_of_tables_can_be_chosen(tmp_path: Path) -> None:
    kinds = {"coarse": datasets.ClassLabel(names=["a", "b"]), "photo": datasets.Image()}
    features = datasets.Features({**kinds, "fine": datasets.Value("string")})
    images = [random_image(i, (8, 8), "L") for i in range(20)]
    rows = {"coarse": [0, 1] * 10, "photo": images, "fine": list("zyxw") * 5}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    for column, names in (("fine", ["w", "x", "y", "z"]), (None, ["a", "b"])):
        options = DatasetOptions(label_column=column, val_fraction=0.25)
        metadata = ImageData("hub", str(tmp_path), dataset=options).metadata()
        assert (metadata["class_names"], metadata["channels"]) == (names, 1)


def test_prediction_needs_metadata_and_no_data_set(photos: Path) -> None:
    metadata = {**METADATA, "channels": 1, "image_size": 9, "mean": [0.5], "std": [0.2]}
    for path, count in ((photos / "train", 36), (photos / "train" / "ant" / "00.jpg", 1)):
        data = ImageData("hub")
        data.predict_path = str(path)
        data.set_metadata(metadata)
        data.setup("predict")
        (batch,) = data.predict_dataloader()
        assert batch["image"].shape == (count, 1, 9, 9) and "label" not in batch
        assert batch["path"] == sorted(batch["path"])
        assert all(Path(name).is_file() for name in batch["path"])
        assert data.metadata() == metadata


@pytest.mark.slow
def test_importing_adds_no_heavy_package_to_those_of_lightning() -> None:
    code = (
        "import sys, pytorch_lightning; before = set(sys.modules)\n"
        "import datamodules.images, datamodules.vision.augment, datamodules.reviews\n"
        "import datamodules.masked_text\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    heavy = {"torchvision", "datasets", "sklearn", "PIL", "pandas", "scipy"}
    assert not (heavy | {"tokenizers", "transformers"}) & set(done.stdout.split())


@pytest.mark.slow
def test_cifar10_is_whole(real_data: Path) -> None:
    data = ImageData("hub", str(real_data / "cifar10_jpeg"))
    metadata = data.metadata()
    sizes = (metadata["class_names"][3], metadata["image_size"], metadata["channels"])
    assert sizes == ("cat", 32, 3)
    assert metadata["mean"] == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.002)
    assert metadata["std"] == pytest.approx([0.247, 0.2435, 0.2616], abs=0.003)
    sizes = [len(data._split(split)) for split in ("train", "val", "test")]
    assert sizes == [45_000, 5_000, 10_000]
    assert data._split("val").labels.bincount().tolist() == [500] * 10


def test_a_data_set_smaller_than_a_batch_is_trained_as_one_batch(small_images: Path) -> None:
    data = ImageData("folder", str(small_images), 8, batch_size=500)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert len(batch["image"]) == 18 and batch["index"].sort().values.tolist() == [*range(18)]


def test_statistics_are_those_of_all_parts() -> None:
    pixels = (torch.arange(5000) * 256 // 5000).to(torch.uint8)  # dark, then bright
    data = MemoryImages(pixels[:, None, None, None].expand(-1, 1, 2, 2), torch.zeros(5000))
    mean = float(pixels.float().mean()) / 255
    assert channel_statistics(data)[0] == [pytest.approx(mean, abs=1e-4)]
    data.in_memory = False  # as a stream, of which some images are read
    (mean,), (std,) = channel_statistics(data)
    assert mean == pytest.approx(0.5, abs=0.03) and std == pytest.approx(0.29, abs=0.02)
    flat = MemoryImages(torch.full((2, 1, 4, 4), 7, dtype=torch.uint8), torch.zeros(2))
    assert channel_statistics(flat)[1] == [0.0039]  # 1 / 255


def test_grey_is_rounded() -> None:
    pixels = torch.tensor([1, 1, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    grey = PixelRecords(pixels, torch.zeros(1), torch.arange(1)).image(0, 1)
    assert grey.item() == 1


def test_colour_after_many_grey_images_counts(tmp_path: Path) -> None:
    for number in range(40):
        mode = "L" if number < 30 else "RGB"
        Image.new(mode, (4, 4)).save(tmp_path / f"{number:02}.png")
    data = UnlabelledImageData(path=str(tmp_path))
    data.setup("fit")
    assert data.metadata()["channels"] == 3
