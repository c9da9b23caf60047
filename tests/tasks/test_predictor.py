"""`tessera.Predictor` labels the batches of other libraries as `predict` labels their samples."""

import doctest
import io
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from tests.helpers.command import ROOT, run
from tests.helpers.tiny import TINY, picture, write_data
from tests.helpers.tiny_models import close

TEXTS = ["a good film, seen twice", "bad", "a bad film " * 5, "good"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each classifier, and one of another task."""
    folder = tmp_path_factory.mktemp("runs")
    limits = "--trainer.max_epochs 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for task in ("vit", "bert", "mlm"):
            assert run(f"fit {TINY[task]} {limits} --run_dir {task}", task) == 0
    return folder


def same(found: dict[str, Any], expected: list[tessera.Prediction]) -> None:
    assert list(found["label"]) == [one.label for one in expected]
    close([*map(float, found["probability"])], [one.probability for one in expected])


def test_images_of_all_kinds(runs: Path, tmp_path: Path) -> None:
    images = [np.asarray(picture(9 + number, "L")) for number in range(5)]
    paths = [str(tmp_path / f"{number}.png") for number in range(5)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    contents = [Path(path).read_bytes() for path in paths]
    expected = tessera.load(runs / "vit").predict(images)
    predictor = tessera.Predictor(runs / "vit", batch_size=2)
    pickled = pickle.dumps(predictor)
    for column in (np.array(paths), np.array(contents, dtype=object), array_of(images)):
        found = predictor({"image": column, "id": np.arange(5)})
        assert list(found) == ["image", "id", "label", "probability"]
        same(found, expected)
    stacked = np.stack([images[0]] * 3)  # (B, H, W)
    for column in (stacked, stacked[..., None]):
        same(predictor({"image": column}), expected[:1] * 3)
    assert len(pickle.dumps(predictor)) == len(pickled) < 1000  # without the model
    same(pickle.loads(pickled)({"image": np.array(paths)}), expected)
    assert tessera.load(runs / "vit").predict(contents[0]).label == expected[0].label


def array_of(items: list[Any]) -> np.ndarray:
    """An array (B,) of objects of different shapes."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def test_texts_and_all_probabilities(runs: Path) -> None:
    model = tessera.load(runs / "bert")
    predictor = tessera.Predictor(str(runs / "bert"), "words", probabilities=True, device="cpu")
    expected = model.predict(TEXTS)
    for column in (np.array(TEXTS), np.array(TEXTS, dtype=object)):
        found = predictor({"words": column})
        same(found, expected)
        assert found["probabilities"].shape == (4, 2)
        close(found["probabilities"].max(1).tolist(), [one.probability for one in expected])
        labels = [model.class_names[row] for row in found["probabilities"].argmax(1)]
        assert labels == list(found["label"])
    empty = predictor({"words": np.array([], dtype=str)})
    assert [len(column) for column in empty.values()] == [0] * 4
    assert empty["probabilities"].shape == (0, 2)


def test_datasets_map_it(runs: Path) -> None:
    """With a fingerprint, so that datasets can cache the result; in NumPy's format or Python's."""
    dataset = Dataset.from_dict({"text": TEXTS, "id": range(4)})
    expected = tessera.load(runs / "bert").predict(TEXTS)
    for table in (dataset, dataset.with_format("numpy")):
        mapped = table.map(tessera.Predictor(runs / "bert"), batched=True, batch_size=3)
        assert mapped.column_names == ["text", "id", "label", "probability"]
        same(mapped.with_format(None).to_dict(), expected)
    pictures = [picture(9, "L"), picture(12, "L")]
    images = Dataset.from_dict({"image": pictures}).cast_column("image", ImageFeature())
    found = images.map(tessera.Predictor(runs / "vit"), batched=True, remove_columns="image")
    same(found.to_dict(), tessera.load(runs / "vit").predict(pictures))


def test_what_cannot_be_labelled(runs: Path) -> None:
    bad = np.array([b"no image"], dtype=object)
    for predictor, batch, error, name in (
        (tessera.Predictor(runs / "vit"), {"image": bad}, tessera.DataError, "8 bytes"),
        (tessera.Predictor(runs / "bert"), {"x": bad, "y": bad}, tessera.UsageError, "x, y"),
        (tessera.Predictor(runs / "bert"), {"text": bad}, TypeError, r"texts\[0\]"),
        (tessera.Predictor(runs / "mlm"), {"text": bad}, tessera.UsageError, "MaskedLang"),
        (tessera.Predictor(runs / "none"), {"text": bad}, tessera.UsageError, "none"),
    ):
        with pytest.raises(error, match=name):
            predictor(batch)


def test_half_a_photo(runs: Path) -> None:
    """The reason is that of the decoder, without a path of its source."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "jpeg")
    with pytest.raises(tessera.DataError, match=r"read \(decode_jpeg, Image is incomplete"):
        tessera.load(runs / "vit").predict(content.getvalue()[:999])


@pytest.mark.parametrize(("task", "sample"), [("bert", "good"), ("vit", None)])
def test_example_of_the_docstring(task: str, sample: Any, runs: Path) -> None:
    if sample is None:
        content = io.BytesIO()
        picture(9, "L").save(content, "png")
        sample = content.getvalue()
    names = {"tessera": tessera, "np": np, "run_folder": runs / task, "sample": sample}
    (test,) = doctest.DocTestFinder(recurse=False).find(tessera.Predictor, globs=names)
    found = doctest.DocTestRunner().run(test)
    assert found.attempted == 3 and not found.failed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_workers_of_ray(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loads the model once, and labels a part of the rows."""
    import ray.data

    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # of the workers, which import this file
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    memory = 100 * 2**20  # bytes
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=memory, log_to_driver=False)
    pool = ray.data.ActorPoolStrategy(size=2)
    try:
        texts = [f"a {'good' if i % 3 else 'bad'} film seen {i} times" for i in range(60)]
        rows = ray.data.from_items([{"text": text, "id": i} for i, text in enumerate(texts)])
        labelled = rows.repartition(12).map_batches(
            SlowPredictor,
            fn_constructor_kwargs={"path": runs / "bert", "probabilities": True},
            batch_size=5,
            compute=pool,
        )
        found = sorted(labelled.take_all(), key=lambda row: row["id"])
        images = np.stack([np.asarray(picture(8, "L"))] * 6)[..., None]  # (B, H, W, C)
        pictures = ray.data.from_numpy(images).rename_columns({"data": "image"})
        options = {"fn_constructor_kwargs": {"path": runs / "vit"}, "compute": pool}
        seen = pictures.map_batches(tessera.Predictor, batch_size=3, **options).take_all()
    finally:
        ray.shutdown()
    assert [row["text"] for row in found] == texts
    assert len({row["process"] for row in found}) == 2
    columns = {name: [row[name] for row in found] for name in ("label", "probability")}
    same(columns, tessera.load(runs / "bert").predict(texts))
    assert all(row["probabilities"].shape == (2,) for row in found)
    expected = tessera.load(runs / "vit").predict(list(images))
    same({name: [row[name] for row in seen] for name in ("label", "probability")}, expected)


class SlowPredictor(tessera.Predictor):
    """Says in which process it ran; it takes long enough for another one to begin."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1)
        found = super().__call__(batch)
        return {**found, "process": np.full(len(batch["text"]), os.getpid())}
