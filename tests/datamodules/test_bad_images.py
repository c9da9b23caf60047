"""What is wrong with the data or the request is said in one sentence that names the place and the
remedy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from datamodules.images import ImageData, LoadingOptions
from datamodules.sources import DatasetOptions
from datamodules.utils.errors import DataError, UsageError

FACTS = {
    "class_names": ["ant", "bee"],
    "num_classes": 2,
    "channels": 3,
    "image_size": 8,
    "mean": [0.5] * 3,
    "std": [0.2] * 3,
}


def save(path: Path, seed: int = 0, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    ).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images of each of two classes."""
    for name in ("ant", "bee"):
        for i in range(10):
            save(tmp_path / "train" / name / f"{i}.jpg", i)
    return tmp_path


def fail(
    kind: type[Exception],
    *words: str,
    stage: str = "fit",
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    with pytest.raises(kind) as caught:
        data = ImageData(**options)
        if metadata:
            data.set_metadata(metadata)
        data.setup(stage)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?"))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, ["batch_size is 0"]),
        ({"loading": LoadingOptions(eval_batch_size=0)}, ["eval_batch_size is 0"]),
        ({"loading": LoadingOptions(num_workers=-1)}, ["num_workers is -1"]),
        ({"image_size": 0}, ["image_size is 0"]),
        ({"source": "digit"}, ["digit", "digits, hub, folder"]),
        ({"source": "folder"}, ["--data.path", "train/CLASS/"]),
        ({"source": "hub"}, ["--data.dataset.name", "--data.path"]),
        (
            {"source": "folder", "path": "/nowhere/at/all"},
            ["/nowhere/at/all", "does not exist", "train/CLASS/"],
        ),
        (
            {"source": "hub", "path": "/nowhere/at/all"},
            ["/nowhere/at/all", "does not exist", "parquet"],
        ),
        ({"source": "folder", "path": __file__}, [__file__, "is a file"]),
        ({"source": "hub", "path": __file__}, [__file__, "is not a folder of parquet"]),
        ({"dataset": DatasetOptions(val_fraction=1.0)}, ["val_fraction is 1.0"]),
        ({"dataset": DatasetOptions(class_names=["a", "b"])}, ["2 classes", "10"]),
        ({"dataset": DatasetOptions(mean=[0.5, 0.5, 0.5])}, ["mean", "1 channels"]),
    ],
)
def test_options(options: dict[str, Any], words: list[str]) -> None:
    fail(UsageError, *words, **options)


def empty_class(root: Path) -> None:
    (root / "train" / "cat").mkdir()


def no_train(root: Path) -> None:
    (root / "train").rename(root / "images")


def no_classes(root: Path) -> None:
    for i, path in enumerate(sorted((root / "train").rglob("*.jpg"))):
        path.rename(root / "train" / f"{i}.jpg")
    for name in ("ant", "bee"):
        (root / "train" / name).rmdir()


def one_class(root: Path) -> None:
    (root / "train" / "bee").rename(root / "bee")


def unknown_class(root: Path) -> None:
    save(root / "val" / "bees" / "1.jpg")


def no_validation_images(root: Path) -> None:
    (root / "val" / "ant").mkdir(parents=True)


def one_image_each(root: Path) -> None:
    for path in (root / "train").rglob("[1-9].jpg"):
        path.unlink()


def two_sizes(root: Path) -> None:
    save(root / "train" / "bee" / "big.png", side=9)


@pytest.mark.parametrize(
    ("spoil", "words", "size"),
    [
        (empty_class, ["class cat is empty", "train/cat"], 8),
        (no_train, ["has no folder train/", "train/CLASS/"], 8),
        (no_classes, ["no class folders", "train/CLASS/"], 8),
        (one_class, ["one class only (ant)"], 8),
        (unknown_class, ["val/bees", "did you mean bee?"], 8),
        (no_validation_images, ["val holds no images"], 8),
        (one_image_each, ["too few training images"], 8),
        (two_sizes, ["big.png", "9 x 9", "8 x 8", "--data.image_size"], None),
    ],
)
def test_folders(
    photos: Path, spoil: Callable[[Path], None], words: list[str], size: int | None
) -> None:
    spoil(photos)
    fail(UsageError, *words, source="folder", path=str(photos), image_size=size)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def made_empty(path: Path) -> None:
    path.write_bytes(b"")


def made_text(path: Path) -> None:
    path.write_text("not an image\nat all\n")


def made_half_png(path: Path) -> None:
    save(path.with_suffix(".png"))
    path.with_suffix(".png").rename(path)
    cut_short(path)


def made_dangling(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("words")


@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.parametrize("memory", [4096, 0], ids=["in memory", "streamed"])
@pytest.mark.parametrize("spoil", [cut_short, made_empty, made_text, made_half_png, made_dangling])
def test_bad_files_are_named_or_skipped_and_counted(
    photos: Path, spoil: Callable[[Path], None], memory: int, stage: str
) -> None:
    bad = photos / "train" / "bee" / "3.jpg"
    spoil(bad)
    # nothing else is in the validation split, so the bad file is trained on
    for name in ("ant", "bee"):
        save(photos / "val" / name / "1.jpg")
    loading = LoadingOptions(memory_limit_mb=memory, num_workers=0)
    options = {
        "source": "folder",
        "path": str(photos),
        "predict_path": str(photos / "train"),
        "loading": loading,
    }

    def run(skip_bad: bool) -> tuple[int, list[str]]:
        data = ImageData(skip_bad=skip_bad, **options)  # type: ignore[arg-type]
        data.set_metadata(FACTS)
        data.setup(stage)
        loader = (
            data.predict_dataloader()
            if stage == "predict"
            else data.eval_loader(data._dataset("train"))
        )
        count = sum(len(data.on_before_batch_transfer(batch, 0)["image"]) for batch in loader)
        return count, data.skipped

    with pytest.raises(DataError) as caught:
        run(skip_bad=False)
    assert (
        str(bad) in str(caught.value)
        and "\n" not in str(caught.value)
        and "skip_bad" in str(caught.value)
    )
    count, skipped = run(skip_bad=True)
    assert count == 19 and len(skipped) == 1 and str(bad) in skipped[0]


class Nothing(pl.LightningModule):
    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> int:
        return len(batch["image"])


@pytest.mark.parametrize("skip_bad", [False, True])
def test_workers_report_through_the_trainer(photos: Path, skip_bad: bool) -> None:
    made_text(photos / "train" / "bee" / "3.jpg")
    loading = LoadingOptions(memory_limit_mb=0, num_workers=2, eval_batch_size=4)
    data = ImageData(predict_path=str(photos), skip_bad=skip_bad, loading=loading)
    data.set_metadata(FACTS)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    if skip_bad:
        counts = trainer.predict(Nothing(), data)
        assert sum(counts or []) == 19 and len(data.skipped) == 1  # type: ignore[arg-type]
    else:
        with pytest.raises(DataError, match=r"^[^\n]*bee/3.jpg is not a readable image[^\n]*$"):
            trainer.predict(Nothing(), data)


def test_nothing_to_predict(tmp_path: Path) -> None:
    fail(UsageError, "--data.predict_path", stage="predict", metadata=FACTS)
    fail(UsageError, "/no/such.jpg", stage="predict", metadata=FACTS, predict_path="/no/such.jpg")
    fail(
        UsageError,
        str(tmp_path),
        "holds no images",
        stage="predict",
        metadata=FACTS,
        predict_path=str(tmp_path),
    )
    (tmp_path / "1.jpg").write_text("x")
    fail(
        DataError,
        "none of the 1",
        stage="predict",
        metadata=FACTS,
        predict_path=str(tmp_path),
        skip_bad=True,
    )


def test_data_and_checkpoint_must_agree(photos: Path) -> None:
    words = ["2 classes (ant, bee)", "3 (ant, bee, cat)"]
    metadata = {**FACTS, "class_names": ["ant", "bee", "cat"], "num_classes": 3}
    for stage in ("fit", "validate", "test"):
        fail(UsageError, *words, stage=stage, metadata=metadata, source="folder", path=str(photos))
    fail(UsageError, "10 classes", "checkpoint 2 (ant, bee)", stage="test", metadata=FACTS)
    fail(UsageError, "image_size is 16", "trained with 8", metadata=FACTS, image_size=16)


def test_no_network_says_what_to_put_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    options = DatasetOptions(name="nobody/nothing-of-the-kind", local="cifar10_jpeg")
    words = ["nobody/nothing-of-the-kind", "--data.path", "TESSERA_DATA", "cifar10_jpeg/"]
    fail(DataError, *words, source="hub", dataset=options)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    import datasets

    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])}
    )
    (tmp_path / "data").mkdir()
    rows = {"img": [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(20)], "label": [0, 1] * 10}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        tmp_path / "data" / "train-00000-of-00001.parquet"
    )
    return tmp_path / "data"


def test_tables(parquet: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    options = DatasetOptions(label_column="breed")
    fail(
        UsageError,
        "no column breed",
        "img, label",
        source="hub",
        path=str(parquet),
        dataset=options,
    )
    path = parquet / "train-00000-of-00001.parquet"
    table = pq.read_table(path)
    images, labels = table.column("img").to_pylist(), table.column("label").to_pylist()
    images[7]["bytes"] = images[7]["bytes"][:30]
    spoilt = pa.table(
        {"img": pa.array(images, table.schema.field("img").type), "label": labels},
        schema=table.schema,
    )
    pq.write_table(spoilt, path)
    fail(DataError, "row 7 of the train split", str(parquet), source="hub", path=str(parquet))
    labels[3] = 2
    pq.write_table(
        pa.table({"img": images, "label": labels}).replace_schema_metadata(table.schema.metadata),
        path,
    )
    fail(
        DataError,
        "row 3 of the train split",
        "label 2",
        "2 classes",
        source="hub",
        path=str(parquet),
    )
    path.write_bytes(path.read_bytes()[:-100])
    fail(DataError, path.name, "cannot be read", source="hub", path=str(parquet))
    path.unlink()
    fail(UsageError, str(parquet), "train-00000-of-00001.parquet", source="hub", path=str(parquet))


def test_a_data_set_smaller_than_a_batch_is_trained_as_one_batch(photos: Path) -> None:
    data = ImageData("folder", str(photos), 8, batch_size=500)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert len(batch["image"]) == 18 and torch.equal(batch["index"].sort().values, torch.arange(18))
    with pytest.raises(AttributeError):
        replace(DatasetOptions(), name="x").name = "y"  # type: ignore[misc]  options are defaults shared by all
