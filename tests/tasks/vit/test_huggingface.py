"""Hugging Face's ViT: trained from, and loaded in Python, with equal logits, or refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
from torch import Tensor

from tasks.errors import UsageError
from tests.helpers.command import Console, Patch, run
from tests.helpers.model_folders import VIT_MEAN, VIT_STD, encoder_folder, vit_folder
from tests.helpers.tiny import write_images
from tests.helpers.tiny_models import close
from tests.tasks.vit.test_timm import FIT, trained

CLASSES = ("cat", "crane", "dog")


def change(file: str, **entries: Any) -> None:
    """Replaces entries of a JSON file in the folder `theirs`; None removes one."""
    path = Path("theirs", file)
    settings = json.loads(path.read_text()) | entries
    kept = {name: value for name, value in settings.items() if value is not None}
    path.write_text(json.dumps(kept))


def normalised(pixels: Tensor) -> Tensor:
    """Uint8 (B, C, H, W) as their preprocessor gives it to the model."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (VIT_MEAN, VIT_STD))  # (C, 1, 1)
    return (pixels / 255 - mean) / std


@torch.no_grad()
def assert_same_features(net: Any, theirs: Any) -> None:
    """Compares what the classifiers see."""
    images = torch.randn(2, 3, 32, 32)
    hidden = getattr(theirs, "vit", theirs)(images).last_hidden_state  # (B, 1 + N, E)
    close(net.features(images), hidden[:, 0], atol=1e-5)


@pytest.fixture
def cached(monkeypatch: Patch) -> str:
    """A model of the hub, of which the real client finds the folder `theirs` in its cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("cache").resolve()))
    model = Path("cache/models--someone--model")
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0" * 40)
    (model / "snapshots").mkdir()
    (model / "snapshots" / ("0" * 40)).symlink_to(Path("theirs").resolve())
    return "hf/someone/model"


@pytest.mark.parametrize("name", ["folder", "hub"])
def test_predictions_in_python(name: str, request: pytest.FixtureRequest) -> None:
    theirs = vit_folder(Path("theirs"))
    source = request.getfixturevalue("cached") if name == "hub" else "theirs"
    model = tessera.load(source)
    assert isinstance(model, tessera.ImageClassifier)
    assert model.class_names == ["cat", "crane (1)", "crane (2)"]
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        logits = theirs(normalised(pixels)).logits  # (B, K)
    assert logits.std() > 0.1
    close(model.net(normalised(pixels)), logits, atol=1e-5)
    found = [list(one.probabilities.values()) for one in model.predict(list(pixels))]
    expected = [sorted(row.tolist(), reverse=True) for row in logits.softmax(-1)]
    close(torch.tensor(found), torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("name", ["folder", "hub"])
def test_training_takes_weights_and_normalisation(
    name: str, console: Console, request: pytest.FixtureRequest
) -> None:
    theirs = vit_folder(Path("theirs"))
    source = request.getfixturevalue("cached") if name == "hub" else "theirs"
    write_images(Path("images"), side=32)
    out, _ = console.printed(f"{FIT} --model.pretrained {source} --run_dir r")
    assert "anew" in out  # for two other classes
    net, metadata = trained()
    assert (metadata["mean"], metadata["std"]) == (VIT_MEAN, VIT_STD)
    assert metadata["image_size"] == 32 and net.config.num_classes == 2
    assert_same_features(net, theirs)


def test_positions_are_resized_to_larger_images() -> None:
    theirs = vit_folder(Path("theirs"))
    write_images(Path("images"), side=40)
    assert run(f"{FIT} --model.pretrained theirs --model.net.image_size 48 --run_dir r") == 0
    net, _ = trained()
    table = theirs.vit.embeddings.position_embeddings
    resized = timm.layers.resample_abs_pos_embed(table, (6, 6), num_prefix_tokens=1)  # (1, 37, E)
    close(net.position.table.flatten(0, 1), resized[0, 1:], atol=1e-6)  # (36, E)
    first = theirs.vit.embeddings.cls_token[0] + table[0, :1]  # (1, E)
    close(net.prefix.vectors, first, atol=1e-6)


def test_rows_of_the_classifier_are_ordered_by_the_names_of_classes(console: Console) -> None:
    theirs = vit_folder(Path("theirs"), ("dog", "cat", "crane"))
    write_images(Path("images"), CLASSES, side=32)
    out, _ = console.printed(f"{FIT} --model.pretrained theirs --run_dir r")
    assert "anew" not in out
    (suggested,) = re.findall(r"export .*--format hf", out)
    assert run(suggested) == 0
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        close(trained()[0](images), theirs(images).logits[:, [1, 2, 0]], atol=1e-5)


@pytest.mark.parametrize("architecture", ["ViTModel", "ViTForMaskedImageModeling"])
def test_models_without_a_classifier_are_trained_from(architecture: str) -> None:
    theirs = vit_folder(Path("theirs"), architecture=architecture)
    write_images(Path("images"), side=32)
    assert run(f"{FIT} --model.pretrained theirs --run_dir r") == 0
    assert_same_features(trained()[0], theirs)
    with pytest.raises(UsageError, match="no classifier.*--model.pretrained"):
        tessera.load("theirs")


def test_without_a_preprocessor() -> None:
    vit_folder(Path("theirs"))
    Path("theirs/preprocessor_config.json").unlink()
    write_images(Path("images"), side=32)
    assert run(f"{FIT} --model.pretrained theirs --run_dir r") == 0
    measured = trained()[1]["mean"]
    assert all(0.4 < value < 0.6 for value in measured)  # of random pixels
    with pytest.raises(UsageError, match="mean"):
        tessera.load("theirs")


@pytest.mark.parametrize("file, entries, named", [
    ("config.json", {"hidden_act": "mish"}, "mish"),
    ("config.json", {"image_size": [32, 32]}, "image_size"),
    ("config.json", {"image_size": 40}, "position_embeddings"),
    ("config.json", {"num_attention_heads": None}, "num_attention_heads"),
    ("config.json", {"model_type": "dinov2"}, "dinov2"),
    ("config.json", {"problem_type": "ranking"}, "problem_type"),
    ("config.json", {"id2label": {"0": 5, "1": "b", "2": "c"}}, "id2label"),
    ("preprocessor_config.json", {"rescale_factor": 1.0}, "rescale_factor"),
    ("preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
    ("preprocessor_config.json", {"image_mean": "a"}, "image_mean"),
    ("preprocessor_config.json", {"image_std": [0.5]}, "std"),
    ("preprocessor_config.json", {"image_std": [0, 0.5, 0.5]}, "above 0"),
    ("preprocessor_config.json", {"do_resize": False, "do_center_crop": True}, "do_resize"),
    ("preprocessor_config.json", {"resample": 1}, "resample"),
    ("preprocessor_config.json", {"crop_pct": 0}, "crop_pct"),
    ("preprocessor_config.json", {"do_center_crop": True, "crop_size": None}, "crop_size"),
])  # fmt: skip
def test_folders_that_are_refused(
    file: str, entries: dict[str, Any], named: str, console: Console
) -> None:
    vit_folder(Path("theirs"))
    write_images(Path("images"), side=32)
    change(file, **entries)
    console.refused(f"{FIT} --model.pretrained theirs --run_dir r", named)
    with pytest.raises(UsageError, match=named):
        tessera.load("theirs")


def test_models_of_other_tasks_are_refused(console: Console) -> None:
    encoder_folder(Path("texts"), "BertForSequenceClassification")
    vit_folder(Path("theirs"))
    console.refused("fit --model.pretrained texts", "bert")
    console.refused("fit --model.pretrained theirs", "vit", task="bert")
    Path("theirs/preprocessor_config.json").write_text("{")
    console.refused("fit --model.pretrained theirs", "preprocessor_config.json")
    shutil.rmtree("theirs")
    console.refused("fit --model.pretrained theirs", "theirs")
