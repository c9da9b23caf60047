"""Numbers and figures of evaluated classifiers, and the samples that they keep."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
import torch
from PIL import Image
from sklearn.calibration import calibration_curve
from sklearn.decomposition import PCA
from sklearn.metrics import auc, roc_auc_score
from sklearn.metrics import roc_curve as sklearn_roc_curve
from torch import Tensor, nn

from datamodules.embedded.reviews import generate
from datamodules.images import ImageData
from tasks.tracking import evaluation_figures, report
from tasks.tracking.class_scores import calibration_bins, calibration_error, roc_curves
from tasks.tracking.evaluated import EvaluatedSamples, PooledVectors
from tasks.tracking.evaluation_figures import draw_images, principal_components
from tasks.tracking.media import Table
from tasks.tracking.report import MANY_CLASSES, write_png
from tests.helpers.command import Console, Patch, run
from tests.helpers.forked import Server
from tests.helpers.images import save_image
from tests.helpers.tables import write
from tests.helpers.tiny import NET, NO_UPDATES, TINY, write_images

# Numbers ------------------------------------------------------------------------------------------


def samples(classes: int, count: int = 600) -> tuple[Tensor, Tensor]:
    """Probabilities with ties, and labels that they hint at."""
    labels = torch.randint(classes, (count,))
    logits = torch.randn(count, classes)
    logits[torch.arange(count), labels] += 1
    return logits.mul(4).round().div(4).softmax(-1), labels


def names_of(count: int) -> list[str]:
    return [f"class {number}" for number in range(count)]


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_roc_curves_are_those_of_scikit_learn(classes: int) -> None:
    probabilities, labels = samples(classes)
    names = names_of(classes)
    curves = roc_curves(probabilities, labels, names)
    areas = {
        name: roc_auc_score(labels == number, probabilities[:, number])
        for number, name in enumerate(names)
    }
    if classes == 2:
        assert [curve.name for curve in curves] == ["class 1"]
    else:
        macro, *curves = curves
        assert macro.auc == pytest.approx(roc_auc_score(labels, probabilities, multi_class="ovr"))
        area = auc(macro.false_positive_rate, macro.true_positive_rate)
        assert area == pytest.approx(macro.auc, abs=0.01)
        worst = sorted(areas, key=areas.__getitem__)[:5]
        assert [curve.name for curve in curves] == (names if classes == 5 else worst)
    for curve in curves:
        number = names.index(curve.name)
        false_rates, true_rates, _ = sklearn_roc_curve(
            labels == number, probabilities[:, number], drop_intermediate=False
        )
        assert np.allclose(curve.false_positive_rate, false_rates)
        assert np.allclose(curve.true_positive_rate, true_rates)
        assert curve.auc == pytest.approx(areas[curve.name])


def test_classes_without_samples_have_no_curve() -> None:
    probabilities, labels = samples(4)
    few = labels < 2
    found = roc_curves(probabilities[few], labels[few], names_of(4))
    assert [curve.name for curve in found] == ["macro average", "class 0", "class 1"]
    assert roc_curves(probabilities[labels == 0], labels[labels == 0], names_of(4)) == []


def test_calibration_is_that_of_scikit_learn() -> None:
    probabilities, labels = samples(5)
    probabilities[0] = torch.tensor([1.0, 0, 0, 0, 0])  # belongs to the last bin
    confidence, predicted = probabilities.double().max(-1)
    correct = predicted == labels
    fractions, means = calibration_curve(correct, confidence, n_bins=15)
    bins = calibration_bins(probabilities, labels)
    filled = bins.counts > 0
    assert bins.counts.sum() == len(labels) and filled.sum() == len(means) > 8
    assert np.allclose(bins.accuracy[filled], fractions)
    assert np.allclose(bins.confidence[filled], means)
    expected = sum(
        float(some.sum()) / len(labels) * abs(accuracy - mean)
        for some, accuracy, mean in zip(bins.counts[filled], fractions, means, strict=True)
    )
    assert float(calibration_error(probabilities, labels)) == pytest.approx(expected)


def test_principal_components_are_those_of_scikit_learn() -> None:
    vectors = torch.randn(300, 24) @ torch.diag(torch.arange(24, 0, -1.0)) + 5
    points, explained = principal_components(vectors)
    pca = PCA(2).fit(vectors.double())
    for found, expected in zip(points.T, pca.transform(vectors.double()).T, strict=True):
        sign = torch.sign(found @ torch.from_numpy(expected))
        assert np.allclose(found * sign, expected, atol=0.05)
    assert np.allclose(explained, pca.explained_variance_ratio_, atol=1e-4)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(principal_components(vectors)[0], points)
    assert torch.equal(torch.get_rng_state(), before)


# What is kept -------------------------------------------------------------------------------------


def test_samples_are_kept_once_in_the_order_of_the_data() -> None:
    probabilities, labels = samples(3, 50)
    metric = EvaluatedSamples({"mean": lambda found, _: found.mean()})
    order = torch.randperm(50)
    for part in order.split(8):
        metric.update(probabilities[part], labels[part], part)
    assert metric.compute()["mean"] == pytest.approx(float(probabilities.mean()))
    assert metric.found is not None
    assert torch.equal(metric.found.indices, torch.arange(50))
    assert torch.equal(metric.found.predictions, probabilities)
    assert torch.equal(metric.found.labels, labels)
    (held,) = metric.predictions  # no second copy
    assert held.data_ptr() == metric.found.predictions.data_ptr()
    metric.reset()
    assert metric.found is None


@pytest.mark.parametrize("size, count", [(7, 7), (20, 20), (53, 20), (2000, 20)])
def test_vectors_come_from_all_over_a_split(size: int, count: int) -> None:
    pooled = PooledVectors()
    identity = nn.Identity().eval()
    pooled.watch(identity)
    pooled.watch(identity)  # sees it once all the same
    for index in torch.randperm(size).split(9):
        identity(index[:, None].half())
        pooled.add(index, index % 3, size, limit=20)
    found = torch.cat(pooled.vectors)[:, 0].long()
    assert len(found) == count and torch.equal(torch.cat(pooled.labels), found % 3)
    gaps = found.sort().values.diff()
    assert int(gaps.max()) - int(gaps.min()) <= 1
    identity.train()(torch.zeros(3, 1))
    assert len(pooled.latest) != 3 or size == 3
    pooled.reset()
    assert not pooled.vectors and not pooled.labels


def test_vectors_of_a_compiled_network() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    pooled = PooledVectors()
    net.compile(backend="eager")
    with torch.inference_mode():
        net(torch.ones(2, 3))
        pooled.watch(net[1])
        net.eval()
        for batch in (torch.randn(4, 3), torch.randn(5, 3)):
            assert torch.equal(net(batch), pooled.latest)


# Figures ------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: Patch) -> list[Any]:
    """The figures that are drawn, also those of runs."""
    figures: list[Any] = []

    def keep(figure: Any, path: Any) -> None:
        figures.append(figure)
        write_png(figure, path)

    monkeypatch.setattr(evaluation_figures, "write_png", keep)
    monkeypatch.setattr(report, "write_png", keep)
    return figures


def legend(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


@pytest.mark.parametrize("classes", [2, 3, MANY_CLASSES, MANY_CLASSES + 1])
def test_legends_name_few_classes(classes: int, drawn: list[Any], tmp_path: Path) -> None:
    probabilities, labels = samples(classes)
    names = names_of(classes)
    evaluation_figures.draw_roc(probabilities, labels, names, tmp_path / "roc.png")
    evaluation_figures.draw_embeddings(torch.randn(600, 8), labels, names, tmp_path / "points.png")
    (roc,), (points,) = (figure.axes for figure in drawn)
    shown = {2: 1, MANY_CLASSES + 1: 1 + 5}.get(classes, 1 + classes)
    assert len(legend(roc)) == shown + 1  # chance
    colours = {str(line.get_color()) for line in roc.lines}
    assert len(colours) == len(roc.lines)
    if classes > MANY_CLASSES:
        assert points.get_legend() is None
    else:
        assert legend(points) == names
    assert len(points.collections[0].get_offsets()) == 600
    assert len(np.unique(points.collections[0].get_facecolors(), axis=0)) == classes


def test_several_labels_of_a_sample(drawn: list[Any], tmp_path: Path) -> None:
    """Calibration counts each label; embeddings are coloured if there is a single one."""
    probabilities = torch.rand(200, 3)
    labels = (torch.rand(200, 3) < probabilities).long()
    fractions, means = calibration_curve(labels.flatten(), probabilities.flatten(), n_bins=15)
    bins = calibration_bins(probabilities, labels)
    assert np.allclose(bins.accuracy, fractions) and np.allclose(bins.confidence, means)
    evaluation_figures.draw_calibration(probabilities, labels, tmp_path / "calibration.png")
    vectors = torch.randn(200, 8)
    evaluation_figures.draw_embeddings(vectors, labels, names_of(3), tmp_path / "points.png")
    (_, below), (points,) = (figure.axes for figure in drawn)
    assert sum(bar.get_height() for bar in below.patches) == 600
    assert legend(points) == ["no label, or several", *names_of(3)]
    single = int((labels.sum(1) == 1).sum())
    grey, coloured = points.collections[:2]
    assert [len(dots.get_offsets()) for dots in (grey, coloured)] == [200 - single, single]
    assert len(np.unique(coloured.get_facecolors(), axis=0)) == 3


@pytest.mark.parametrize("channels, count", [(1, 0), (1, 2), (3, 32)])
def test_images_are_drawn_with_what_is_known_of_them(
    channels: int, count: int, drawn: list[Any], tmp_path: Path
) -> None:
    rows = [
        (torch.full((channels, 5, 5), 8 * number, dtype=torch.uint8), "a $1 cat", "dog", 0.5)
        for number in range(count)
    ]
    table = Table(("image", "label", "prediction", "probability"), rows)
    draw_images(table, tmp_path / "images.png")
    (axis,) = drawn[0].axes
    assert [int(image.get_array().max()) for image in axis.images] == [8 * i for i in range(count)]
    texts = [text.get_text() for text in axis.texts]
    title = "label: a \\$1 cat\nprediction: dog\nprobability: 0.5000"
    assert texts == ([title] * count or ["none"])
    assert len({tuple(image.get_extent()) for image in axis.images}) == count
    with Image.open(tmp_path / "images.png") as image:
        assert image.width == 140 * max(1, min(count, 8))  # no empty columns


def test_calibration_shows_the_samples_of_each_bin(drawn: list[Any], tmp_path: Path) -> None:
    probabilities, labels = samples(5)
    evaluation_figures.draw_calibration(probabilities, labels, tmp_path / "calibration.png")
    axis, below = drawn[0].axes
    counts = calibration_bins(probabilities, labels).counts
    assert [bar.get_height() for bar in below.patches] == counts[counts > 0].tolist()
    frame = axis.get_window_extent()
    legend_box = axis.get_legend().get_window_extent()
    assert legend_box.y0 >= frame.y1  # covers no bar
    points = axis.lines[0]
    assert not points.get_clip_on() and points.get_zorder() > axis.spines["top"].get_zorder()


# Runs ---------------------------------------------------------------------------------------------


def read_table(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def vectors_drawn(monkeypatch: Patch) -> list[tuple[Tensor, Tensor]]:
    """Where the vectors and labels will be that runs draw."""
    found: list[tuple[Tensor, Tensor]] = []

    def draw(vectors: Tensor, labels: Tensor, names: Sequence[str], path: Path) -> None:
        found.append((vectors, labels))
        path.touch()

    monkeypatch.setattr(evaluation_figures, "draw_embeddings", draw)
    return found


def test_predictions_and_vectors_of_images(best: Path, monkeypatch: Patch) -> None:
    """Those of the Python API, in the order of the data."""
    drawn = vectors_drawn(monkeypatch)
    assert run(f"test --ckpt_path {best} --data.loading.eval_batch_size 100 --output out") == 0
    data = ImageData()
    images = data.dataset("test")
    model: Any = tessera.load(best)
    rows = read_table("out/predictions.csv")
    assert [row["label"] for row in rows] == [str(label) for label in images.labels.tolist()]
    assert [int(row["index"]) for row in rows] == data.sample_names("test")[1]
    for row, found in zip(rows, model.predict(list(images.pixels)), strict=True):
        assert row["prediction"] == found.label
        assert float(row["probability"]) == pytest.approx(found.probability, abs=1e-5)
    ((vectors, labels),) = drawn
    assert torch.equal(labels, images.labels)
    torch.testing.assert_close(vectors, model.embed(list(images.pixels)), atol=1e-4, rtol=1e-4)


def test_predictions_and_vectors_of_texts(monkeypatch: Patch) -> None:
    """Batches are sorted by length; the files are in the order of the data."""
    drawn = vectors_drawn(monkeypatch)
    few = "--trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.limit_val_batches 1"
    assert run(f"fit {TINY['bert']} {few} --model.net.pooler tanh --run_dir r", "bert") == 0
    texts, labels = generate()["test"]
    model: Any = tessera.load("r")
    rows = read_table("r/predictions.csv")
    assert [row["text"] for row in rows] == texts
    assert [row["label"] for row in rows] == [model.class_names[label] for label in labels]
    for row, found in zip(rows, model.predict(texts), strict=True):
        assert float(row["probability"]) == pytest.approx(found.probability, abs=1e-5)
    ((vectors, shown),) = drawn
    assert len(vectors) == len(texts)
    order = [int(i) for i in torch.cdist(vectors, model.embed(texts)).argmin(1)]
    assert [labels[i] for i in order] == shown.tolist()
    torch.testing.assert_close(vectors, model.embed(texts)[order], atol=1e-4, rtol=1e-4)


def test_files_that_are_skipped_have_no_prediction(console: Console) -> None:
    write_images(Path("images"), count=10)
    write_images(Path("more"), count=3)
    Path("more/train").rename("images/test")
    Path("images/test/cat/1.png").write_bytes(b"not an image")
    line = f"fit {NET} --data.source folder --data.path images --data.skip_bad true"
    line += " --model.net.image_size 12 --model.net.patch_size 4 --trainer.max_epochs 1"
    for name, more in (("memory", ""), ("stream", "--data.loading.memory_limit_mb 0")):
        assert run(f"{line} {more} --data.loading.num_workers 0 --run_dir {name}") == 0
        paths = [Path(row["path"]) for row in read_table(f"{name}/predictions.csv")]
        assert [f"{path.parent.name}/{path.name}" for path in paths] == [
            *("cat/0.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png")
        ]


def test_ids_of_a_table_stay_beside_predictions() -> None:
    """Of samples that are held out of the training split, and of other files."""
    rows = [
        {"text": f"{name} number {i}", "label": name, "id": f"{name}{i}", "size": i + 0.5}
        for i in range(12)
        for name in ("ant", "bee")
    ]
    rows[3]["text"] = ""
    line = f"{TINY['bert']} --data.path {write(Path('all.csv'), rows)} --data.skip_bad true"
    assert run(f"fit {line} --trainer.max_epochs 1 --run_dir r", "bert") == 0
    ids = {row["text"]: (row["id"], str(row["size"])) for row in rows}
    write(Path("new.parquet"), [rows[8], rows[1]])
    assert run("test --ckpt_path r --data.path new.parquet --output out", "bert") == 0
    for name, count in (("r", 2), ("out", 2)):
        found = read_table(f"{name}/predictions.csv")
        assert len(found) == count
        assert [(row["id"], row["size"]) for row in found] == [ids[row["text"]] for row in found]
    assert [*found[0]] == ["text", "label", "prediction", "probability", "id", "size"]
    for row in rows[4:8]:
        write(Path("folder", row["label"], f"{row['id']}.txt"), row["text"])
    assert run("test --ckpt_path r --data.path folder --output out", "bert") == 0
    paths = {row["text"]: Path(row["path"]).stem for row in read_table("out/predictions.csv")}
    assert paths == {row["text"]: row["id"] for row in rows[4:8]}


@pytest.mark.parametrize("name", ["test.csv", "hub/train.parquet"])
def test_ids_of_a_table_of_images_stay_beside_predictions(name: str, best: Path) -> None:
    rows: list[dict[str, Any]] = []
    for i in (2, 0, 1):
        save_image(Path(f"{i}.png"), i)
        cells = {"image": Path(f"{i}.png").read_bytes()} if "hub" in name else {}
        rows.append({**cells, "file_name": f"{i}.png", "label": i, "id": f"image {i}"})
    write(Path(name), rows)
    assert run(f"test --ckpt_path {best} --data.path {name} --output out") == 0
    assert [row["id"] for row in read_table("out/predictions.csv")] == [row["id"] for row in rows]


@pytest.mark.slow
def test_each_sample_once_in_two_processes(server: Server, tmp_path: Path) -> None:
    line = f"fit {TINY['vit']} {NO_UPDATES} --trainer.max_epochs 1 --trainer.limit_train_batches 2"
    line += " --trainer.limit_val_batches 1 --data.loading.eval_batch_size 130"
    line += " --trainer.accelerator cpu"  # 359 samples: three batches
    server.run(f"{line} --run_dir one", tmp_path, ranks=1)
    two = "--trainer.devices 2 --trainer.strategy ddp"
    server.run(f"{line} {two} --run_dir two", tmp_path, ranks=2)
    one, other = (read_table(f"{name}/predictions.csv") for name in ("one", "two"))
    assert len(one) == 359 and one == other
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert found[0]["test/acc"] == found[1]["test/acc"]


def test_the_mean_curve_is_that_of_classes_with_samples() -> None:
    macro, *curves = roc_curves(torch.rand(50, 4), torch.arange(50) % 2, list("abcd"))
    assert macro.auc == pytest.approx(sum(curve.auc for curve in curves) / 2)
    assert macro.true_positive_rate[-1] == 1
