"""Images that cannot be used are named, or skipped and counted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import pytorch_lightning as pl
from PIL import Image
from pyarrow import parquet as pq

from datamodules.images import ImageData, UnlabelledImageData
from datamodules.images import LoadingOptions as Loading
from datamodules.sources import DatasetOptions
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.images import METADATA, save_image
from tests.helpers.refusals import refused

STREAMED = Loading(memory_limit_mb=0, num_workers=0)


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
    (lambda root: (root / "train").rename(root / "val"), ["no folder train/, only val/"]),
    (lambda root: (root / "train").rename(root / "x"), ["one class", "x"]),
    (move_images, ["train/CLASS/"]),
    (lambda root: (root / "train/bee").rename(root / "bee"), ["one class", "ant"]),
    (lambda root: save_image(root / "val/bees/1.jpg"), ["val/bees", "rename it to bee"]),
    (lambda root: (root / "val/ant").mkdir(parents=True), ["val"]),
    (remove_most, ["validation split"]),
    (lambda root: save_image(root / "train/bee/x.png", size=(9, 9)), ["x.png", "9 x 9", "8 x 8"]),
]
WITH_CHECKPOINT: list[tuple[str, dict[str, Any], list[str]]] = [
    ("predict", {}, ["--input"]),
    ("predict", {"predict_path": "/no/such.jpg"}, ["/no/such.jpg"]),
    ("predict", {"predict_path": "{}/none"}, ["{}/none"]),
    ("predict", {"predict_path": "{}/text", "skip_bad": True}, ["1"]),
    ("fit", {"source": "folder", "path": "{}"}, ["(ant, bee)", "(ant, bee, cat)"]),
    ("validate", {"source": "folder", "path": "{}/other"}, ["(ant, dog)", "3 ("]),
    ("test", {"source": "folder", "path": "{}/other"}, ["(ant, dog)", "3 ("]),
    ("test", {}, ["10 classes", "3 (ant, bee, cat)"]),
]


@pytest.mark.parametrize(("spoil", "names"), FOLDERS)
def test_folders_that_cannot_be_used(spoil: Any, names: list[str], small_images: Path) -> None:
    spoil(small_images)
    with refused(UsageError, *names):
        ImageData("folder", str(small_images)).setup("fit")


@pytest.mark.parametrize(("stage", "options", "names"), WITH_CHECKPOINT)
def test_data_that_do_not_fit_a_checkpoint(
    stage: str, options: dict[str, Any], names: list[str], small_images: Path
) -> None:
    (small_images / "none").mkdir()
    for name in ("ant", "dog"):
        save_image(small_images / "other" / "train" / name / "1.jpg")
    save_image(small_images / "text" / "1.jpg")
    (small_images / "text" / "1.jpg").write_text("x")
    options = {
        name: value.format(small_images) if isinstance(value, str) else value
        for name, value in options.items()
    }
    error = DataError if "skip_bad" in options else UsageError
    with refused(error, *(name.format(small_images) for name in names)):
        predict_path = options.pop("predict_path", None)
        data = ImageData(**options)
        data.predict_path = predict_path
        data.set_metadata(METADATA)
        data.setup(stage)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def make_half_png(path: Path) -> None:
    save_image(path.with_suffix(".png"))
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
    small_images: Path, case: str, loading: Loading, stage: str
) -> None:
    bad = small_images / "train" / "bee" / "3.jpg"
    SPOILS[case](bad)
    for name in ("ant", "bee"):  # so that the bad file is trained on
        save_image(small_images / "val" / name / "1.jpg")
    predict_path = str(small_images / "train")

    def count(skip_bad: bool) -> tuple[int, list[str]]:
        data = ImageData(
            "folder",
            str(small_images),
            loading=loading,
            skip_bad=skip_bad,
        )
        data.predict_path = predict_path
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


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused(mode: str, small_images: Path) -> None:
    file = small_images / "train/ant/deep.tif"
    Image.new(mode, (8, 8), 1).save(file)
    with refused(DataError, str(file), f"mode {mode}"):
        ImageData(path=str(small_images), image_size=8).setup("fit")


def test_a_row_without_a_file_is_named(small_images: Path) -> None:
    files = sorted(small_images.glob("train/*/*"))
    rows = "".join(f"{file},{file.parent.name}\n" for file in files)
    (small_images / "table.csv").write_text(f"file_name,label\n{rows},ant\n")
    with refused(DataError, "line 22", "names no image file"):
        ImageData(path=str(small_images / "table.csv")).setup("fit")


def test_a_class_without_training_images(small_images: Path) -> None:
    files = sorted(small_images.glob("train/*/*"))
    rows = "".join(f"{file},{file.parent.name}\n" for file in files)
    (small_images / "table.csv").write_text(f"file_name,label\n{rows}")
    options = DatasetOptions(class_names=["ant", "bee", "eel"])
    table = str(small_images / "table.csv")
    with refused(UsageError, "class eel is missing", "images"):
        ImageData(path=table, dataset=options).setup("fit")
    UnlabelledImageData(path=table, dataset=options).setup("fit")  # needs no classes


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_missing_files_that_a_table_names(stage: str, small_images: Path) -> None:
    table = small_images / "table.csv"
    names = [f"train/{name}/{i}.jpg,{name}" for name in ("bee", "ant") for i in range(10)]
    names.append("train/ant/10.jpg,ant")
    table.write_text("\n".join(["file,label", *names]))
    data = ImageData(path=str(table))
    data.predict_path = str(table)
    if stage == "predict":
        data.set_metadata(METADATA)
    missing = str(small_images / "train/ant/10.jpg")
    with refused(DataError, f"{missing} does not exist", f"{table} names it", "skip_bad"):
        data.setup(stage)


class Counting(pl.LightningModule):
    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> int:
        return len(batch["image"])


def test_workers_report_through_the_trainer(small_images: Path) -> None:
    (small_images / "train" / "bee" / "3.jpg").write_text("no image")
    loading = replace(STREAMED, num_workers=2, eval_batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", **quiet)
    for skip_bad in (True, False):
        data = ImageData(skip_bad=skip_bad, loading=loading)
        data.predict_path = str(small_images)
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
    (lambda bad: save_image(bad, size=(9, 9)), UsageError, ["3.jpg", "9 x 9"]),
])  # fmt: skip
def test_batches_that_cannot_be_used(
    spoil: Any, error: type[Exception], names: list[str], workers: int, small_images: Path
) -> None:
    """No image can be read, or one has another size: the same error with and without workers."""
    loading = replace(STREAMED, num_workers=workers, eval_batch_size=1)
    save_image(small_images / "val" / "ant" / "1.jpg")
    data = ImageData("folder", str(small_images), loading=loading, skip_bad=True)
    data.setup("fit")
    spoil(small_images / "train" / "bee" / "3.jpg")
    with refused(error, *names):
        for batch in data.eval_loader(data.dataset("train")):
            data.on_before_batch_transfer(batch, 0)


def test_no_network_says_what_to_put_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    options = DatasetOptions(name="nobody/nothing-of-the-kind", local="cifar10_jpeg")
    with refused(DataError, "nobody/nothing-of-the-kind", "--data.path", "cifar10_jpeg/"):
        ImageData("hub", dataset=options).setup("fit")


def test_bad_tables(image_table: Path) -> None:
    data = {"source": "hub", "path": str(image_table)}
    with refused(UsageError, "breed", "img, label"):
        ImageData(**data, dataset=DatasetOptions(label_column="breed")).setup("fit")
    path = image_table / "train-00000-of-00001.parquet"
    table = pq.read_table(path)
    images = table.column("img").to_pylist()
    labels = table.column("label").to_pylist()

    def check(row: int, *names: str) -> None:
        columns = {"img": pa.array(images, table.schema.field("img").type), "label": labels}
        pq.write_table(pa.table(columns, schema=table.schema), path)
        with refused(DataError, f"row {row} of the train split of {image_table}", *names):
            ImageData(**data).setup("fit")

    images[7]["bytes"] = images[7]["bytes"][:30]
    check(7)
    labels[3] = 3
    check(3, "label 3", "3 classes")
    path.write_bytes(path.read_bytes()[:-100])
    with refused(DataError, path.name):
        ImageData(**data).setup("fit")
    pq.write_table(pa.table({"file_name": ["a.png"], "label": [1]}), path)
    with refused(UsageError, "column of images", "CSV or JSON Lines"):
        ImageData(**data).setup("fit")
    path.unlink()
    with refused(UsageError, str(image_table), "train"):
        ImageData(**data).setup("fit")
