"""`probe`: features that the head reads, classified as by scikit-learn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
import timm
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from datamodules.images import ImageData
from datamodules.vision.augment import normalise
from tasks.probing.classifiers import Labelled, fit_linear, probe
from tasks.vit.architectures import find_described
from tasks.vit.frozen import image_data
from tasks.vit.probe import extract, frozen_network
from tests.helpers.command import Console, process, run
from tests.helpers.results import table
from tests.helpers.tiny import SHORT, write_images
from tests.helpers.tiny_models import close
from tests.parity.vit import timm_model

SPLITS = ("train", "val", "test")


def results(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Linear probe and k-nearest neighbours of a probe.json."""
    linear, neighbours = json.loads(path.read_text())["results"]
    assert (linear["classifier"], neighbours["classifier"]) == ("linear", "knn")
    return linear, neighbours


def nearest(features: dict[str, Tensor], labels: dict[str, Tensor], k: int, split: str) -> float:
    """The accuracy of scikit-learn's neighbours."""
    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    theirs.fit(features["train"].numpy(), labels["train"].numpy())
    return float(theirs.score(features[split].numpy(), labels[split].numpy()))


def test_classifiers_are_those_of_scikit_learn(best: Path, console: Console) -> None:
    out, _ = console.printed(f"probe --ckpt_path {best} --output out")
    linear, neighbours = results(Path("out/probe.json"))
    model = tessera.load(best, kind=tessera.ImageClassifier)
    data = ImageData()
    data.setup("fit")
    batches = {split: data.dataset(split)[[*range(len(data.dataset(split)))]] for split in SPLITS}
    features = {split: model.embed(list(batch["image"])) for split, batch in batches.items()}
    labels = {split: batch["label"] for split, batch in batches.items()}
    for split in ("val", "test"):
        assert neighbours[split] == pytest.approx(nearest(features, labels, 20, split), abs=0.003)
    sets = {split: Labelled(features[split], labels[split]) for split in SPLITS}
    expected = probe(*sets.values(), classes=10)[0]
    assert [linear["val"], linear["test"]] == pytest.approx([expected.val, expected.test], abs=0.01)
    l2 = linear["settings"]["l2"]
    ours = fit_linear(sets["train"], 10, l2)
    scaler = StandardScaler().fit(features["train"].numpy())
    x, unseen = (scaler.transform(features[split].numpy()) for split in ("train", "test"))
    logits = F.linear(torch.tensor(unseen), ours.weight, ours.bias)
    close(ours(features["test"]), logits, atol=1e-3, rtol=1e-4)
    theirs = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=9000)
    theirs.fit(x, labels["train"].numpy())
    found = [(ours.weight, ours.bias), map(torch.tensor, (theirs.coef_, theirs.intercept_))]
    losses = [
        F.cross_entropy(F.linear(torch.tensor(x), weight.float(), bias.float()), labels["train"])
        + l2 / 2 * weight.square().sum()
        for weight, bias in found
    ]
    assert losses[0] <= 1.02 * losses[1]
    assert linear["test"] > 0.6 and f"{linear['test']:.4f}" in out
    rows = table("out/probe.csv")
    assert [float(row["test"]) for row in rows] == pytest.approx(
        [linear["test"], neighbours["test"]], abs=1e-5
    )


@pytest.mark.slow
def test_a_masked_autoencoder(console: Console) -> None:
    """Its run is read as one of `tasks.vit` is."""
    line = "fit --trainer.max_epochs 2 --trainer.limit_test_batches 0 --run_dir r"
    assert run(line, "mae") == 0
    console.printed("probe --ckpt_path r --output out")
    linear, neighbours = results(Path("out/probe.json"))
    assert linear["test"] > 0.8 and neighbours["test"] > 0.3  # chance is 0.1


def test_a_model_of_timm_without_a_classifier(console: Console) -> None:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 0}
    theirs = timm_model("vit_tiny_patch16_224", **sizes).eval()
    theirs.pretrained_cfg.update(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    timm.models.save_for_hf(theirs, "theirs", model_args=sizes, safe_serialization=True)
    write_images(Path("images"), ("a", "b", "c"), count=20, side=32)
    line = "probe --ckpt_path theirs --k 3 --output out"
    console.refused(line, "--data.path")
    console.printed(f"{line} --data.path images")
    _, neighbours = results(Path("out/probe.json"))
    assert neighbours["settings"]["k"] == 3
    model = find_described("theirs", "--ckpt_path")
    data = image_data(model.named, model.image_metadata(), {}, {"path": "images"})
    data.setup("fit")
    batch = data.dataset("train")[[*range(54)]]
    found = extract(frozen_network(model), data, "train", lambda count: None)
    with torch.no_grad():
        expected = theirs(normalise(batch["image"], [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]))
    close(found.features, expected, atol=1e-4)
    assert found.labels.equal(batch["label"])


def test_other_data_and_few_labels(run_copy: Path, console: Console) -> None:
    out, _ = console.printed(f"probe --ckpt_path {run_copy} --data.label_fraction 0.05")
    assert json.loads((run_copy / "probe.json").read_text())["samples"]["train"] == 65
    write_images(Path("images"), ("a", "b"), count=20, side=8)
    line = f"probe --ckpt_path {run_copy} --data.path images --data.dataset.val_fraction 0.25"
    console.printed(f"{line} --output other")
    assert "replace" not in console.printed(f"{line} --output other")[0]
    assert (
        "(they replace those of another probe: k 20)"
        in (console.printed(f"{line} --output other --k 3")[0])
    )
    found = json.loads(Path("other/probe.json").read_text())
    assert found["data"] == "images" and found["samples"]["val"] == 10
    assert run(f"fit {SHORT} --data.label_fraction 0.1 --run_dir few") == 0
    line = "probe --ckpt_path few --data.path images --data.dataset.val_fraction 0.25 --output few"
    console.printed(line)
    assert json.loads(Path("few/probe.json").read_text())["samples"]["train"] == 30


@pytest.mark.slow
def test_without_a_test_split_a_sentence_says_so(best: Path) -> None:
    write_images(Path("images"), ("a", "b"), count=30, side=8)
    done = process(f"probe --ckpt_path {best} --data.path images --output o", cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert "(the validation images)" in done.stdout
    assert any(line.startswith("warning: The data") for line in done.stderr.splitlines())


BAD = {
    "--k 0": "--k",
    "--temperature 0": "--temperature",
    "--data.path missing": "missing",
    "--data.image_size 9": "image_size",
    "--data.dataset.channels 3": "channels",
    "--data.label_frction 0.1": "--data.label_frction",
    "--data.label_fraction 2": "--data.label_fraction",
    "--output file/below": "--output",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence(line: str, best: Path, console: Console) -> None:
    Path("file").write_text("")
    console.refused(f"probe --ckpt_path {best} {line}", BAD[line])


def test_numbers_as_labels(best: Path, console: Console) -> None:
    """The advice is an option of this command."""
    write_images(Path("images"), ("a", "b"), count=4, side=8)
    files = sorted(Path("images").rglob("*.png"))
    rows = "".join(f"{file},{number % 2}.5\n" for number, file in enumerate(files))
    Path("numbers.csv").write_text(f"file_name,label\n{rows}")
    line = f"probe --ckpt_path {best} --data.path numbers.csv"
    console.refused(line, "--data.dataset.problem_type", code=1)


def test_data_of_other_problem_types_are_refused(best: Path, console: Console) -> None:
    write_images(Path("images"), ("a", "b"), count=6, side=8)
    files = sorted(Path("images").rglob("*.png"))
    rows = "".join(f'{file},"{file.parent.name},{i % 2}"\n' for i, file in enumerate(files))
    Path("table.csv").write_text(f"file_name,label\n{rows}")
    options = "--data.path table.csv --data.dataset.problem_type multi_label_classification"
    console.refused(f"probe --ckpt_path {best} {options}", "one class each")
