"""Models of timm in Python, by name and from folders of timm's layout: equal logits and classes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo

from tasks.errors import UsageError
from tasks.vit.other_classifiers import find_other
from tests.helpers.command import Console, Patch, run
from tests.helpers.tiny import Malicious, write_images
from tests.helpers.tiny_models import close
from tests.parity.vit import timm_model
from tests.tasks.vit.test_timm import FIT, assert_same_features, trained

# Arguments of which none is the default of `vit_tiny_patch16_224`.
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "act_layer": "relu"}
SIZES |= {"global_pool": "avg", "reg_tokens": 2, "init_values": 0.1}
MEAN = [0.1, 0.2, 0.3]
STD = [0.4, 0.5, 0.6]
NAMES = ["n1", "n2", "n3", "n4"]
DESCRIBED = {"n1": "cat", "n2": "crane", "n4": "crane"}


@pytest.fixture
def theirs() -> Any:
    """A model, and the folder `theirs` that timm's own function wrote."""
    model = timm_model("vit_tiny_patch16_224", **SIZES, num_classes=len(NAMES))
    more = {"label_names": NAMES, "label_descriptions": DESCRIBED}
    arguments = {**SIZES, "num_classes": len(NAMES)}
    timm.models.save_for_hf(model, "theirs", more, arguments, safe_serialization=True)
    change(lambda settings: settings["pretrained_cfg"].update(mean=MEAN, std=STD, crop_pct=1.0))
    return model


def change(edit: Any) -> None:
    """Changes config.json in the folder `theirs`."""
    path = Path("theirs/config.json")
    settings = json.loads(path.read_text())
    edit(settings)
    path.write_text(json.dumps(settings))


def test_a_folder_in_python(theirs: Any) -> None:
    model = tessera.load("theirs")
    assert isinstance(model, tessera.ImageClassifier)
    assert model.class_names == ["cat", "crane (n2)", "n3", "crane (n4)"]
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))  # (C, 1, 1)
    with torch.no_grad():
        expected = theirs((pixels / 255 - mean) / std).softmax(-1)  # (B, K)
    found = [one.probabilities for one in model.predict(list(pixels))]
    rows = [[one[name] for name in model.class_names] for one in found]
    close(torch.tensor(rows), expected, atol=1e-5)
    assert expected.std() > 0.01


def test_training_from_a_folder(theirs: Any, console: Console) -> None:
    write_images(Path("images"), ("n3", "n4", "n1", "n2"), side=32)
    out, _ = console.printed(f"{FIT} --model.pretrained theirs --run_dir r")
    assert "anew" not in out
    (suggested,) = re.findall(r"export .*--format timm", out)
    assert run(suggested) == 0
    net, metadata = trained()
    assert (metadata["mean"], metadata["std"]) == (MEAN, STD)
    assert_same_features(net, theirs)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        close(net(images), theirs(images), atol=1e-5)  # classes are sorted in the data
    assert run(f"{FIT} --model.pretrained theirs --model.net.image_size 48 --run_dir s") == 0
    assert trained("s")[0].config.image_size == 48


def test_a_file_of_a_folder(theirs: Any, console: Console) -> None:
    """Of timm it is enough; otherwise the message names the folder to give."""
    file = "theirs/model.safetensors"
    assert tessera.load(file).class_names[0] == "cat"
    told = (file, "give its folder, theirs")
    console.refused(f"fit --model.pretrained {file}", *told, task="mae")
    console.refused(f"fit --model.pretrained {file}", *told, task="bert")
    console.refused(f"generate --ckpt_path {file}", *told, task="lm")
    Path("theirs/config.json").write_text(json.dumps({"model_type": "vit"}))
    console.refused(f"fit --model.pretrained {file}", *told)
    with pytest.raises(UsageError, match="give its folder, theirs$"):
        tessera.load(file)


@pytest.mark.parametrize("edit, named", [
    (lambda settings: settings.update(architecture="vit_of_tomorrow"), "which model"),
    (lambda settings: settings.update(architecture="resnet26"), "ResNet; .*--model.teacher.path"),
    (lambda settings: settings.update(architecture="convnext_atto"), "ConvNeXt; .*teacher"),
    (lambda settings: settings["model_args"].update(norm_layer="rmsnorm"), "RmsNorm"),
    (lambda settings: settings["model_args"].update(depth=10**9), "depth"),
    (lambda settings: settings["model_args"].update(num_heads="three"), "theirs"),
    (lambda settings: settings["model_args"].update(num_heads=5), "num_heads"),
    (lambda settings: settings["model_args"].update(embed_dim=96), "width"),
    (lambda settings: settings["pretrained_cfg"].update(mean=["a"]), "mean"),
    (lambda settings: settings["pretrained_cfg"].update(mean=[0.5]), "mean"),
    (lambda settings: settings["pretrained_cfg"].pop("std"), "standard deviation"),
    (lambda settings: settings["pretrained_cfg"].update(crop_pct=1.5), "crop_pct"),
    (lambda settings: settings["pretrained_cfg"].update(crop_pct="a"), "crop_pct"),
    (lambda settings: settings["pretrained_cfg"].update(interpolation="box"), "interpolation"),
    (lambda settings: settings.update(label_names=[1, 2]), "label_names"),
    (lambda settings: settings.update(model_args=[1, 2]), "model_args"),
])  # fmt: skip
def test_folders_that_are_refused(edit: Any, named: str, theirs: Any) -> None:
    change(edit)
    with pytest.raises(UsageError, match=named):
        tessera.load("theirs")


def test_unknown_arguments_are_named(theirs: Any, console: Console) -> None:
    change(lambda settings: settings["model_args"].update(pool_include_prefix=True))
    console.refused("fit --model.pretrained theirs", "pool_include_prefix", "--model.net.pool")


@pytest.mark.parametrize("edit, named", [
    (lambda settings: settings["model_args"].update(foo=1), "foo"),
    (lambda settings: settings["model_args"].update(num_classes="x"), "theirs"),
    (lambda settings: settings["pretrained_cfg"].update(input_size=[3, 32, 16]), "input_size"),
    (lambda settings: settings["pretrained_cfg"].update(input_size="abc"), "input_size"),
    (lambda settings: settings["pretrained_cfg"].update(std=[0.5, 0, 0.5]), "above 0"),
    (lambda settings: settings["pretrained_cfg"].update(mean=[0.5]), "1 numbers for 3"),
    (lambda settings: settings.update(label_names=["a", "b"]), "has 2 classes, but predicts 4"),
    (lambda settings: settings["pretrained_cfg"].update(mean=None, crop_pct=None), None),
])  # fmt: skip
def test_classifiers_of_other_architectures(edit: Any, named: str | None, theirs: Any) -> None:
    """As `compare` and `--model.teacher.path` read them."""
    change(edit)
    if named is None:
        found = find_other("theirs", "--model")
        assert found is not None and found.net.num_classes == 4
        return
    with pytest.raises(UsageError, match=named):
        find_other("theirs", "--model")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_224.dino"])
def test_a_file_named_after_a_model_has_its_mean_and_std(name: str) -> None:
    plain = name.partition(".")[0]
    save_file(timm_model(plain, num_classes=3).state_dict(), f"{name}.safetensors")
    model = tessera.load(f"{name}.safetensors")
    cfg = timm.get_pretrained_cfg(name)
    assert (model.metadata["mean"], model.metadata["std"]) == ([*cfg.mean], [*cfg.std])


def test_a_file_that_torch_saved_is_loaded_as_safetensors_are() -> None:
    state = timm_model("vit_tiny_patch16_224", num_classes=3).state_dict()
    save_file(state, "vit_tiny_patch16_224.safetensors")
    torch.save(state, "vit_tiny_patch16_224.pth")
    expected, found = (
        tessera.load(f"vit_tiny_patch16_224.{ending}", kind=tessera.ImageClassifier)
        for ending in ("safetensors", "pth")
    )
    assert found.metadata == expected.metadata
    image = torch.randint(0, 256, (3, 224, 224), dtype=torch.uint8)
    assert torch.equal(found.logits(image), expected.logits(image))
    torch.save({"weight": Malicious()}, "vit_tiny_patch16_224.pth")
    with pytest.raises(UsageError, match="could run code"):
        tessera.load("vit_tiny_patch16_224.pth")


def test_grey_weights_named_after_a_model_of_colour_images_are_trained(console: Console) -> None:
    net = timm_model("vit_tiny_patch16_224", in_chans=1, num_classes=10)
    save_file(net.state_dict(), "vit_tiny_patch16_224.safetensors")
    pretrained = "--model.pretrained vit_tiny_patch16_224.safetensors --model.net.image_size 16"
    console.printed(f"fit --data.source digits {pretrained} --trainer.fast_dev_run true")


def test_a_model_by_name(monkeypatch: Patch) -> None:
    theirs = timm_model("test_vit")
    create = timm.create_model

    def local(name: str, pretrained: bool = False) -> Any:
        return theirs if pretrained else create(name)  # nothing is downloaded

    monkeypatch.setattr(timm, "create_model", local)
    model = tessera.load("timm/test_vit")
    info = ImageNetInfo("imagenet-1k")
    assert model.class_names[0] == info.index_to_description(0)
    assert len({*model.class_names}) == 1000
    cfg = theirs.pretrained_cfg
    assert (model.metadata["mean"], model.metadata["std"]) == ([*cfg["mean"]], [*cfg["std"]])
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        close(model.net(images), theirs(images), atol=1e-4)
