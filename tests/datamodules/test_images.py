"""Images from every source: the right pixels, labels, splits and metadata, and what is said of bad
ones."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pyarrow import parquet as pq
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from datamodules.images import ImageData
from datamodules.images import LoadingOptions as Loading
from datamodules.sources import SOURCES, DatasetOptions
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.splits import stratified_split
from datamodules.vision.decoding import decode, resize_and_crop
from tests.helpers.refusals import refused

CLASSES = ["ant", "bee", "cat"]
FORMATS = [("jpg", "RGB"), ("png", "RGBA"), ("bmp", "RGB"), ("gif", "P"), ("webp", "RGB")]
FORMATS += [("tiff", "L"), ("jpeg", "L")]
METADATA = {
    "class_names": CLASSES,
    "num_classes": 3,
    "channels": 3,
    "image_size": 8,
    "mean": [0.5] * 3,
    "std": [0.2] * 3,
}
STREAMED = Loading(memory_limit_mb=0, num_workers=0)


def picture(seed: int, size: tuple[int, int] = (20, 16), mode: str = "RGB") -> Image.Image:
    """A random picture of this width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, size, mode).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve images of each class in several formats, modes, sizes and depths of folders."""
    for label, name in enumerate(CLASSES):
        for i in range(12):
            ending, mode = FORMATS[i % len(FORMATS)]
            path = tmp_path / "train" / name / ("deeper" if i % 2 else "") / f"{i:02}.{ending}"
            save(path, 100 * label + i, (20 + i, 16 + 2 * label), mode)
    (tmp_path / "train" / ".DS_Store").write_bytes(b"clutter")
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ten images of 8 x 8 pixels of each of two classes."""
    for name in ("ant", "bee"):
        for i in range(10):
            save(tmp_path / "train" / name / f"{i}.jpg", i)
    return tmp_path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A local copy in the hub's schema, as `datasets` writes it: 40 training and 10 test images."""
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}
    )
    folder = tmp_path / "parquet"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 10)):
        images = [picture(i, (16, 16)) for i in range(count)]
        rows = {"img": images, "label": [i % 3 for i in range(count)]}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def build(source: str, photos: Path, parquet: Path, **options: Any) -> ImageData:
    own: dict[str, Any] = {"hub": {"path": str(parquet)}, "digits": {}}.get(
        source, {"path": str(photos), "image_size": 12}
    )
    return ImageData(source, **{**own, "batch_size": 8, **options})


def everything(data: ImageData, split: str) -> dict[str, Any]:
    """All samples of a split in one batch, in order, with their rows in the files."""
    data.setup("test" if split == "test" else "fit")
    dataset = data._datasets[split]
    return dataset[list(range(len(dataset)))] | {"rows": data._split(split).rows}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_and_metadata(source: str, photos: Path, parquet: Path) -> None:
    """The same from memory and from workers; training and validation share nothing."""
    runs = []
    for loading in (Loading(), Loading(memory_limit_mb=0, num_workers=2)):
        data = build(source, photos, parquet, loading=loading)
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
        data = build(source, photos, parquet, dataset=options)
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


def test_a_stratified_split_takes_the_fraction_of_every_class() -> None:
    labels = torch.tensor([0] * 50 + [2] * 10 + [3] * 2 + [4])
    first, second = stratified_split(labels, 0.2, seed=4)
    assert labels[second].bincount(minlength=5).tolist() == [10, 0, 2, 1, 0]
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(63))


def by_path(data: ImageData) -> dict[str, tuple[Tensor, int]]:
    """Image and label of the training and validation images, by the name of the file."""
    found = {}
    for split in ("train", "val"):
        batch, records = everything(data, split), data._split(split)
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


def test_splits_of_folders(photos: Path) -> None:
    data = ImageData("folder", str(photos), 12)
    assert torch.equal(everything(data, "test")["rows"], everything(data, "val")["rows"])
    save(photos / "test" / "bee" / "1.png")
    assert everything(ImageData("folder", str(photos), 12), "test")["label"].tolist() == [1]
    for name in CLASSES:
        save(photos / "val" / name / "1.png")
    data = ImageData("folder", str(photos), 12)
    data.setup("fit")
    assert (len(data.dataset("train")), len(data.dataset("val"))) == (36, 3)
    metadata = data.metadata()
    (photos / "train").rename(photos / "unread")
    data = ImageData("folder", str(photos))  # a checkpoint needs no training split
    data.set_metadata(metadata)
    assert everything(data, "test")["label"].tolist() == [1]


def test_tables_of_the_hub(parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `datasets` reads them, from a path, from TESSERA_DATA or downloaded."""
    files = {split: str(parquet / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
    cache = str(tmp_path / "cache")
    theirs = datasets.load_dataset("parquet", data_files=files, cache_dir=cache)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: theirs)
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    named = DatasetOptions(name="some/one", local="parquet")
    found = [ImageData("hub", str(parquet)), ImageData("hub", dataset=named)]
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
    metadata = ImageData("hub", str(parquet), dataset=DatasetOptions(**given)).metadata()
    assert {name: metadata[name] for name in given} == given


def test_columns_of_tables_can_be_chosen(tmp_path: Path) -> None:
    kinds = {"coarse": datasets.ClassLabel(names=["a", "b"]), "photo": datasets.Image()}
    features = datasets.Features({**kinds, "fine": datasets.Value("string")})
    images = [picture(i, (8, 8), "L") for i in range(20)]
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
        data = ImageData("hub", predict_path=str(path))
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


# Decoding.


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_colour_mode_is_decoded(mode: str, channels: int) -> None:
    image = picture(3, mode="L" if mode == "I;16" else mode)
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
    assert (resize_and_crop(image, 12).int() - expected.int()).abs().max() <= 1


# What cannot be used.


def move_images(root: Path) -> None:
    """Puts all images into train/, without classes."""
    for i, path in enumerate(sorted((root / "train").rglob("*.jpg"))):
        path.rename(root / "train" / f"{i}.jpg")
    for name in ("ant", "bee"):
        (root / "train" / name).rmdir()


def remove_most(root: Path) -> None:
    for path in (root / "train").rglob("[1-9].jpg"):
        path.unlink()


FOLDERS: list[tuple[Callable[[Path], Any], list[str]]] = [
    (lambda root: (root / "train/cat").mkdir(), ["class cat", "train/cat"]),
    (lambda root: (root / "train").rename(root / "x"), ["folder train/"]),
    (move_images, ["train/CLASS/"]),
    (lambda root: (root / "train/bee").rename(root / "bee"), ["one class", "ant"]),
    (lambda root: save(root / "val/bees/1.jpg"), ["val/bees", "bee?"]),
    (lambda root: (root / "val/ant").mkdir(parents=True), ["val"]),
    (remove_most, ["validation split"]),
    (lambda root: save(root / "train/bee/x.png", size=(9, 9)), ["x.png", "9 x 9", "8 x 8"]),
]
WITH_CHECKPOINT: list[tuple[str, dict[str, Any], list[str]]] = [
    ("predict", {}, ["--data.predict_path"]),
    ("predict", {"predict_path": "/no/such.jpg"}, ["/no/such.jpg"]),
    ("predict", {"predict_path": "{}/none"}, ["{}/none"]),
    ("predict", {"predict_path": "{}/text", "skip_bad": True}, ["1"]),
    ("fit", {"source": "folder", "path": "{}"}, ["(ant, bee)", "(ant, bee, cat)"]),
    ("validate", {"source": "folder", "path": "{}"}, ["(ant, bee)", "3 ("]),
    ("test", {"source": "folder", "path": "{}"}, ["(ant, bee)", "3 ("]),
    ("test", {}, ["10 classes", "3 (ant, bee, cat)"]),
]


@pytest.mark.parametrize(("spoil", "names"), FOLDERS)
def test_folders_that_cannot_be_used(spoil: Any, names: list[str], small: Path) -> None:
    spoil(small)
    with refused(UsageError, *names):
        ImageData("folder", str(small)).setup("fit")


@pytest.mark.parametrize(("stage", "options", "names"), WITH_CHECKPOINT)
def test_data_that_do_not_fit_a_checkpoint(
    stage: str, options: dict[str, Any], names: list[str], small: Path
) -> None:
    (small / "none").mkdir()
    save(small / "text" / "1.jpg")
    (small / "text" / "1.jpg").write_text("x")
    for name in ("path", "predict_path"):
        if name in options:
            options = {**options, name: options[name].format(small)}
    error = DataError if "skip_bad" in options else UsageError
    with refused(error, *(name.format(small) for name in names)):
        data = ImageData(**options)
        data.set_metadata(METADATA)
        data.setup(stage)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def make_half_png(path: Path) -> None:
    save(path.with_suffix(".png"))
    path.with_suffix(".png").rename(path)
    cut_short(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("words")


SPOILS: dict[str, Callable[[Path], Any]] = {
    "cut short": cut_short,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not an image\nat all\n"),
    "half a png": make_half_png,
    "a folder of text": make_folder,
}


@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.parametrize("loading", [Loading(), STREAMED], ids=["in memory", "streamed"])
@pytest.mark.parametrize("case", SPOILS)
def test_bad_files_are_named_or_skipped_and_counted(
    small: Path, case: str, loading: Loading, stage: str
) -> None:
    bad = small / "train" / "bee" / "3.jpg"
    SPOILS[case](bad)
    for name in ("ant", "bee"):  # so that the bad file is trained on
        save(small / "val" / name / "1.jpg")
    predict_path = str(small / "train")

    def count(skip_bad: bool) -> tuple[int, list[str]]:
        data = ImageData(
            "folder", str(small), predict_path=predict_path, loading=loading, skip_bad=skip_bad
        )
        data.set_metadata({**METADATA, "class_names": ["ant", "bee"], "num_classes": 2})
        data.setup(stage)
        if stage == "predict":
            loader = data.predict_dataloader()
        else:
            loader = data.eval_loader(data.dataset("train"))
        batches = [data.on_before_batch_transfer(batch, 0) for batch in loader]
        return sum(len(batch["image"]) for batch in batches), data.skipped

    with refused(DataError, str(bad), "skip_bad"):
        count(skip_bad=False)
    images, (skipped,) = count(skip_bad=True)
    assert images == 19 and str(bad) in skipped


class Counting(pl.LightningModule):
    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> int:
        return len(batch["image"])


def test_workers_report_through_the_trainer(small: Path) -> None:
    (small / "train" / "bee" / "3.jpg").write_text("no image")
    loading = replace(STREAMED, num_workers=2, eval_batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", **quiet)
    for skip_bad in (True, False):
        data = ImageData(predict_path=str(small), skip_bad=skip_bad, loading=loading)
        data.set_metadata(METADATA)
        if skip_bad:
            assert sum(trainer.predict(Counting(), data) or []) == 19
            assert len(data.skipped) == 1
        else:
            with refused(DataError, "bee/3.jpg"):
                trainer.predict(Counting(), data)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spoil, error, names", [
    (lambda bad: bad.write_text("no image"), DataError, ["3.jpg", "none of 1"]),
    (lambda bad: save(bad, size=(9, 9)), UsageError, ["3.jpg", "9 x 9"]),
])  # fmt: skip
def test_batches_that_cannot_be_used(
    spoil: Any, error: type[Exception], names: list[str], workers: int, small: Path
) -> None:
    """No image can be read, or one has another size: the same error with and without workers."""
    loading = replace(STREAMED, num_workers=workers, eval_batch_size=1)
    save(small / "val" / "ant" / "1.jpg")
    data = ImageData("folder", str(small), loading=loading, skip_bad=True)
    data.setup("fit")
    spoil(small / "train" / "bee" / "3.jpg")
    with refused(error, *names):
        for batch in data.eval_loader(data.dataset("train")):
            data.on_before_batch_transfer(batch, 0)


def test_no_network_says_what_to_put_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    options = DatasetOptions(name="nobody/nothing-of-the-kind", local="cifar10_jpeg")
    with refused(DataError, "nobody/nothing-of-the-kind", "--data.path", "cifar10_jpeg/"):
        ImageData("hub", dataset=options).setup("fit")


def test_bad_tables(parquet: Path) -> None:
    data = {"source": "hub", "path": str(parquet)}
    with refused(UsageError, "breed", "img, label"):
        ImageData(**data, dataset=DatasetOptions(label_column="breed")).setup("fit")
    path = parquet / "train-00000-of-00001.parquet"
    table = pq.read_table(path)
    images, labels = table.column("img").to_pylist(), table.column("label").to_pylist()

    def check(row: int, *names: str) -> None:
        columns = {"img": pa.array(images, table.schema.field("img").type), "label": labels}
        pq.write_table(pa.table(columns, schema=table.schema), path)
        with refused(DataError, f"row {row} of the train split of {parquet}", *names):
            ImageData(**data).setup("fit")

    images[7]["bytes"] = images[7]["bytes"][:30]
    check(7)
    labels[3] = 3
    check(3, "label 3", "3 classes")
    path.write_bytes(path.read_bytes()[:-100])
    with refused(DataError, path.name):
        ImageData(**data).setup("fit")
    path.unlink()
    with refused(UsageError, str(parquet), "train"):
        ImageData(**data).setup("fit")


def test_a_data_set_smaller_than_a_batch_is_trained_as_one_batch(small: Path) -> None:
    data = ImageData("folder", str(small), 8, batch_size=500)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert len(batch["image"]) == 18 and batch["index"].sort().values.tolist() == [*range(18)]
