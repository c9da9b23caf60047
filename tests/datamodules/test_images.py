"""Images from every source: the right pixels, labels, splits and metadata."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from datamodules.images import ImageData
from datamodules.images import LoadingOptions as Loading
from datamodules.sources import SOURCES, DatasetOptions
from datamodules.utils.splits import stratified_split

CLASSES = ["ant", "bee", "cat"]


def picture(seed: int, size: tuple[int, int] = (20, 16), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve images of each class in several formats, modes, sizes and depths."""
    kinds = [
        ("jpg", "RGB"),
        ("png", "RGBA"),
        ("bmp", "RGB"),
        ("gif", "P"),
        ("webp", "RGB"),
        ("tiff", "L"),
        ("jpeg", "L"),
    ]
    for label, name in enumerate(CLASSES):
        for i in range(12):
            ending, mode = kinds[i % len(kinds)]
            folder = tmp_path / "train" / name / ("deeper" if i % 2 else "")
            folder.mkdir(parents=True, exist_ok=True)
            picture(100 * label + i, (20 + i, 16 + 2 * label), mode).save(
                folder / f"{i:02}.{ending}"
            )
    (tmp_path / "train" / ".DS_Store").write_bytes(b"clutter")
    return tmp_path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A local copy in the hub's schema, as `datasets` writes it: 40 training and 10 test images."""
    import datasets

    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}
    )
    for split, count in (("train", 40), ("test", 10)):
        rows = {
            "img": [picture(i, (16, 16)) for i in range(count)],
            "label": [i % 3 for i in range(count)],
        }
        datasets.Dataset.from_dict(rows, features=features).to_parquet(
            tmp_path / f"{split}-00000-of-00001.parquet"
        )
    return tmp_path


def build(source: str, photos: Path, parquet: Path, **options: object) -> ImageData:
    where = {
        "digits": {},
        "hub": {"path": str(parquet)},
        "folder": {"path": str(photos), "image_size": 12},
    }[source]
    return ImageData(source, **{**where, "batch_size": 8, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("limit", [4096, 0], ids=["in memory", "streamed"])
def test_batches_and_facts(source: str, limit: int, photos: Path, parquet: Path) -> None:
    data = build(source, photos, parquet, loading=Loading(memory_limit_mb=limit, num_workers=0))
    data.prepare_data()
    data.setup("fit")
    metadata = data.metadata()
    batch = next(iter(data.train_dataloader()))
    side = metadata["image_size"]
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].shape == (8, metadata["channels"], side, side)
    assert batch["label"].dtype == batch["index"].dtype == torch.int64
    assert metadata["num_classes"] == len(metadata["class_names"])
    assert set(metadata) == {"class_names", "num_classes", "channels", "image_size", "mean", "std"}
    everything = (
        torch.cat([b["image"] for b in data.eval_loader(data._dataset("train"))]).double() / 255
    )
    assert metadata["mean"] == pytest.approx(everything.mean((0, 2, 3)).tolist(), abs=1e-4)
    assert metadata["std"] == pytest.approx(
        everything.std((0, 2, 3), unbiased=False).tolist(), abs=1e-4
    )


@pytest.mark.parametrize("source", SOURCES)
def test_streamed_batches_equal_those_from_memory(source: str, photos: Path, parquet: Path) -> None:
    runs = []
    for loading in (Loading(), Loading(memory_limit_mb=0, num_workers=2)):
        data = build(source, photos, parquet, loading=loading, batch_size=16)
        data.setup("fit")
        data.setup("test")
        runs.append([*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()])
    for a, b in zip(*runs, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("source", SOURCES)
def test_splits_share_nothing_and_repeat(source: str, photos: Path, parquet: Path) -> None:
    def rows(seed: int) -> tuple[Tensor, Tensor]:
        options = DatasetOptions(val_fraction=0.2, split_seed=seed)
        data = build(source, photos, parquet, dataset=options)
        return data._split("train").rows, data._split("val").rows

    train, val = rows(0)
    assert not set(train.tolist()) & set(val.tolist())
    assert torch.equal(rows(0)[1], val) and not torch.equal(rows(1)[1], val)
    assert len(val) / (len(train) + len(val)) == pytest.approx(0.2, abs=0.04)


def test_digits_are_those_of_scikit_learn_with_a_fixed_fifth_for_the_test() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    splits = []
    for seed in (0, 1):
        data = ImageData(dataset=DatasetOptions(split_seed=seed), loading=Loading(seed=seed))
        data.setup("fit")
        assert "test" not in data._datasets
        data.setup("test")
        splits.append([data._split(name).rows for name in ("train", "val", "test")])
        for name in ("train", "val", "test"):
            dataset, rows = data._datasets[name], data._split(name).rows
            batch = dataset[list(range(len(dataset)))]
            assert batch["label"].tolist() == labels[rows].tolist()
            assert (batch["image"].flatten(1) * (16 / 255)).round().tolist() == images[
                rows
            ].tolist()
    assert torch.equal(splits[0][2], splits[1][2])
    assert sorted(torch.cat(splits[0]).tolist()) == list(range(1797))
    assert len(splits[0][2]) / 1797 == pytest.approx(0.2, abs=0.001)
    counts = np.bincount(labels[splits[0][2]])
    assert np.abs(counts - np.bincount(labels) / 5).max() <= 0.5


def test_stratified_split_takes_the_share_of_every_class() -> None:
    labels = torch.tensor([0] * 50 + [2] * 10 + [3] * 2 + [4])
    first, second = stratified_split(labels, 0.2, seed=4)
    assert labels[second].bincount(minlength=5).tolist() == [10, 0, 2, 1, 0]
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(63))


def test_folder_is_read_as_torchvision_reads_it(photos: Path) -> None:
    from torchvision.datasets import ImageFolder

    theirs = ImageFolder(str(photos / "train"))
    data = ImageData("folder", str(photos), 12)
    data.setup("fit")
    assert data.metadata()["class_names"] == theirs.classes
    ours = {**_by_path(data, "train"), **_by_path(data, "val")}
    assert {path for path in ours if not path.endswith(".gif")} == {
        path for path, _ in theirs.samples
    }
    for path, label in theirs.samples:
        image, own = ours[path]
        resized = v2.functional.resize(
            v2.functional.pil_to_tensor(theirs.loader(path)), [12], antialias=True
        )
        expected = v2.functional.center_crop(resized, [12, 12])
        assert own == label
        assert (image.int() - expected.int()).abs().max() <= 2, path


def _by_path(data: ImageData, split: str) -> dict[str, tuple[Tensor, int]]:
    records, batch = (
        data._split(split),
        data._dataset(split)[list(range(len(data._dataset(split))))],
    )
    return {
        records.name(i): (batch["image"][i], int(batch["label"][i])) for i in range(len(records))
    }


def test_folder_without_a_test_split_tests_the_validation_split(photos: Path) -> None:
    data = ImageData("folder", str(photos), 12)
    data.setup("validate")
    data.setup("test")
    assert torch.equal(data._split("test").rows, data._split("val").rows)
    picture(1).save(
        (photos / "test" / "bee").mkdir(parents=True) or photos / "test" / "bee" / "1.png"
    )
    data = ImageData("folder", str(photos), 12)
    data.setup("test")
    assert data._dataset("test")[[0]]["label"].tolist() == [1]


def test_folder_with_its_own_validation_split_trains_on_all_of_train(photos: Path) -> None:
    for name in CLASSES:
        (photos / "val" / name).mkdir(parents=True)
        picture(7).save(photos / "val" / name / "1.png")
    data = ImageData("folder", str(photos), 12)
    data.setup("fit")
    assert (len(data._dataset("train")), len(data._dataset("val"))) == (36, 3)


def test_hub_schema_equals_what_datasets_reads(parquet: Path) -> None:
    import datasets

    theirs = datasets.Dataset.from_parquet(str(parquet / "train-00000-of-00001.parquet"))
    data = ImageData("hub", str(parquet))
    data.setup("fit")
    assert data.metadata()["class_names"] == theirs.features["label"].names
    rows, dataset = data._split("train").rows.tolist(), data._dataset("train")
    for i, row in enumerate(rows):
        batch = dataset[[i]]
        assert batch["label"].item() == theirs[row]["label"]
        assert np.array_equal(batch["image"][0].permute(1, 2, 0), np.asarray(theirs[row]["img"]))


def test_hub_reads_what_datasets_downloads(
    parquet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    files = {split: str(parquet / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
    downloaded = datasets.load_dataset(
        "parquet", data_files=files, cache_dir=str(tmp_path / "cache")
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: downloaded)
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    online = ImageData("hub", dataset=DatasetOptions(name="someone/something"))
    local = ImageData("hub", str(parquet))
    for data in (online, local):
        data.setup("fit")
    assert online.metadata() == local.metadata()
    assert torch.equal(
        online._dataset("train")[[0, 5]]["image"], local._dataset("train")[[0, 5]]["image"]
    )


def test_hub_columns_can_be_chosen(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "coarse": datasets.ClassLabel(names=["a", "b"]),
            "photo": datasets.Image(),
            "fine": datasets.Value("string"),
        }
    )
    rows = {
        "coarse": [0, 1] * 10,
        "photo": [picture(i, (8, 8), "L") for i in range(20)],
        "fine": list("zyxw") * 5,
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    data = ImageData(
        "hub", str(tmp_path), dataset=DatasetOptions(label_column="fine", val_fraction=0.25)
    )
    data.setup("fit")
    assert (
        data.metadata()["class_names"] == ["w", "x", "y", "z"] and data.metadata()["channels"] == 1
    )
    assert ImageData("hub", str(tmp_path)).metadata()["class_names"] == ["a", "b"]


def test_local_folder_of_the_environment_is_read_instead_of_the_network(
    parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(parquet.parent))
    data = ImageData("hub", dataset=DatasetOptions(name="someone/something", local=parquet.name))
    assert data.metadata()["class_names"] == CLASSES


def test_prediction_needs_the_facts_and_no_data_set(photos: Path) -> None:
    metadata = {
        "class_names": CLASSES,
        "num_classes": 3,
        "channels": 1,
        "image_size": 9,
        "mean": [0.5],
        "std": [0.2],
    }
    for path, count in ((photos / "train", 36), (photos / "train" / "ant" / "00.jpg", 1)):
        data = ImageData("hub", predict_path=str(path))
        data.set_metadata(metadata)
        data.setup("predict")
        (batch,) = data.predict_dataloader()
        assert batch["image"].shape == (count, 1, 9, 9) and "label" not in batch
        assert batch["path"] == sorted(batch["path"]) and all(
            Path(p).is_file() for p in batch["path"]
        )
        assert data.metadata() == metadata


def test_a_checkpoint_tests_data_that_hold_no_training_split(photos: Path) -> None:
    metadata = ImageData("folder", str(photos), 12).metadata()
    (photos / "train").rename(photos / "test")
    data = ImageData("folder", str(photos))
    data.set_metadata(metadata)
    data.setup("test")
    assert len(data._dataset("test")) == 36


def test_given_names_mean_and_std_win(parquet: Path) -> None:
    options = DatasetOptions(class_names=["x", "y", "z"], mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 1.0])
    metadata = ImageData("hub", str(parquet), dataset=options).metadata()
    assert (metadata["class_names"], metadata["mean"], metadata["std"]) == (
        ["x", "y", "z"],
        [0.1, 0.2, 0.3],
        [1.0, 1.0, 1.0],
    )


def test_importing_adds_no_heavy_package_to_those_of_lightning() -> None:
    code = (
        "import sys, pytorch_lightning; before = set(sys.modules); import datamodules.images;"
        "import datamodules.vision.augment;"
        "import datamodules.reviews, datamodules.masked_text;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    heavy = {
        "torchvision",
        "datasets",
        "sklearn",
        "PIL",
        "pandas",
        "scipy",
        "tokenizers",
        "transformers",
    }
    assert not heavy & set(out.stdout.split())


def test_cifar10_is_whole(real_data: Path) -> None:
    data = ImageData("hub", str(real_data / "cifar10_jpeg"))
    data.setup("test")
    metadata = data.metadata()
    assert (
        metadata["class_names"][3] == "cat"
        and metadata["image_size"] == 32
        and metadata["channels"] == 3
    )
    assert metadata["mean"] == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.002)
    assert metadata["std"] == pytest.approx([0.247, 0.2435, 0.2616], abs=0.003)
    assert [len(data._split(split)) for split in ("train", "val", "test")] == [
        45_000,
        5_000,
        10_000,
    ]
    assert data._split("val").labels.bincount().tolist() == [500] * 10
