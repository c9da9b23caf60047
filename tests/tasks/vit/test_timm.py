"""Training from weights of timm: by name, from files, and what their classes are."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
from safetensors.torch import save_file

from modules.config import StackConfig
from modules.models.vit import ViT, ViTConfig
from modules.schema import from_dict
from tasks.checkpoints.exporting import write_safetensors
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.vit.architectures import check_described, load_pretrained, pretrained_options
from tasks.vit.export import write_timm
from tests.helpers.command import Capture, Console, Patch, run
from tests.helpers.results import checkpoint
from tests.helpers.tiny import write_images
from tests.parity.vit import difference, randomise, timm_model

SINGLE = "single_label_classification"
TINY: Any = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
DESCRIPTION = {
    "--model.net.pool": "cls",
    "--model.net.stack.heads": "3",
    "--model.net.stack.feedforward": "gelu",
    "--model.net.stack.norm_eps": "1e-6",
    "--model.net.stack.order": "pre",
}
DESCRIBED = " ".join(f"{name} {value}" for name, value in DESCRIPTION.items())
MODEL = "model/model.safetensors"
OF_TEST_VIT = {"architecture": "test_vit"}
FIT = (
    "fit --data.source folder --data.path images --trainer.max_epochs 1 --data.batch_size 4 "
    "--model.optimizer.lr 1e-30"
)


def initial(source: str, class_names: list[str]) -> ViT:
    """The network that training from a file starts with."""
    options = pretrained_options(source)["model"]["net"] | {"num_classes": len(class_names)}
    net = ViT(from_dict(ViTConfig, options)).eval()
    load_pretrained(net, source, {"class_names": class_names, **external_targets(SINGLE)})
    return net


def save(model: Any, file: str, config: Any = None) -> None:
    """A file of weights, and a config.json beside it."""
    Path(file).parent.mkdir(exist_ok=True)
    save_file(model.state_dict(), file)
    if config is not None:
        Path(file).with_name("config.json").write_text(json.dumps(config))


def assert_same_features(net: Any, theirs: Any) -> None:
    """Compares what the classifiers see."""
    size = net.config.image_size
    images = torch.rand(2, 3, size, size) * 2 - 1
    with torch.inference_mode():
        expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        found = net.head.norm(net.features(images))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def trained(folder: str = "r") -> Any:
    """The network of a run's best checkpoint, and its metadata."""
    saved = checkpoint(folder, "best")["tessera"]
    net = ViT(from_dict(ViTConfig, saved["net"])).eval()
    state = checkpoint(folder, "best")["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    return net, saved["metadata"]


@pytest.fixture
def timms(monkeypatch: Patch) -> Any:
    """A small model that replaces timm's `vit_tiny_patch16_224`; nothing is downloaded."""
    model = timm_model("vit_tiny_patch16_224", **TINY)
    create = timm.create_model

    def local(name: str, pretrained: bool = False, **options: Any) -> Any:
        small = create(name, **TINY, **options)
        if pretrained:
            small.load_state_dict(model.state_dict())
        return small

    monkeypatch.setattr(timm, "create_model", local)
    return model


def test_a_model_by_name(timms: Any, console: Console) -> None:
    write_images(Path("images"), ("a", "b", "c", "d", "e"), side=32)
    line = f"{FIT} --model.pretrained timm/vit_tiny_patch16_224 --run_dir r"
    out, _ = console.printed(line)
    net, metadata = trained()
    assert_same_features(net, timms)
    assert metadata["mean"] == [0.5, 0.5, 0.5]  # timm's own normalisation
    assert "anew" in out  # nobody knows what its 5 classes are
    assert not torch.equal(net.head.linear.weight, timms.head.weight)


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_file_that_options_describe(ending: str, timms: Any) -> None:
    if ending == "pth":
        torch.save({"state_dict": timms.state_dict()}, "w.pth")
    else:
        save(timms, "w.safetensors")
    write_images(Path("images"), side=32)
    line = f"{FIT} --model.pretrained w.{ending} --model.net.image_size 32 {DESCRIBED} --run_dir r"
    assert run(line) == 0
    assert_same_features(trained()[0], timms)
    assert run("fit --config r/config.yaml --run_dir again") == 0  # which names them all


def test_no_network(monkeypatch: Patch, console: Console) -> None:
    write_images(Path("images"), side=32)
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: Any) -> Any:
        if pretrained:
            raise OSError("no route to host")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    line = f"{FIT} --model.pretrained timm/vit_tiny_patch16_224"
    console.refused(line, "--model.pretrained FOLDER", code=1)


KNOWN: list[tuple[str, str, Any, Any]] = [  # model, file, config.json beside it, options
    ("test_vit", "test_vit.safetensors", None, {}),  # 2 heads of 32; 64 wide ones would be 1
    ("test_vit", "test_vit.r160_in1k.safetensors", {"license": "mit"}, {"img_size": 96}),
    ("test_vit2", MODEL, {"architecture": "test_vit2", "global_pool": "avg"}, {"num_classes": 3}),
    ("test_vit2", MODEL, {"architecture": "test_vit2", "model_args": {"img_size": 64}}, {}),
    ("test_vit", "model/test_vit.safetensors", {**OF_TEST_VIT, "pretrained_cfg": {}}, {}),
]


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("name, file, config, options", KNOWN)
def test_a_file_of_a_known_model(name: str, file: str, config: Any, options: Any) -> None:
    theirs = timm_model(name, **options)
    save(theirs, file, config)
    assert_same_features(initial(file, ["a", "b"]), theirs)
    check_described(file, ())


UNKNOWN: list[tuple[str, Any]] = [
    (MODEL, {**OF_TEST_VIT, "global_pool": "avg"}),
    (MODEL, {**OF_TEST_VIT, "model_args": {"pretrained": True}}),
    (MODEL, {"architecture": "vit_of_tomorrow"}),
    ("model/test_vit.safetensors", {"architecture": "vit_tiny_patch16_224"}),
    ("model/test_vit.safetensors", {"architecture": "vit_of_tomorrow"}),
    ("weights.safetensors", None),
]


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("file, config", UNKNOWN)
def test_a_file_of_an_unknown_model(file: str, config: Any, console: Console) -> None:
    save(timm_model("test_vit"), file, config)
    write_images(Path("images"))
    names = list(DESCRIPTION)
    for missing in (names, names[1:], names[-1:]):
        options = " ".join(f"{name} {DESCRIPTION[name]}" for name in names if name not in missing)
        error = console.refused(f"{FIT} --model.pretrained {file} --run_dir r {options}")
        assert [name for name in names if name in error] == missing


@pytest.mark.parametrize("content", ["[]", "{", "[" * 10**5, '{"model_args": 3}'])
def test_a_damaged_config_beside_a_file(content: str, console: Console) -> None:
    save(timm_model("test_vit"), "weights.safetensors")
    Path("config.json").write_text(content)
    console.refused("fit --model.pretrained weights.safetensors", "config.json")


@pytest.mark.parametrize("name, depth, named", [
    ("vit_tiny_patch16_224", 6, "width"), ("test_vit", 3, "depth"),
    ("eva02_tiny_patch14_224", 6, "Eva"),
])  # fmt: skip
def test_a_file_of_another_model_than_its_name_says(
    name: str, depth: int, named: str, console: Console
) -> None:
    save(timm_model("test_vit", depth=depth), f"{name}.safetensors")
    console.refused(f"fit --model.pretrained {name}.safetensors", named)


PLAIN = ViTConfig(32, 8, 3, 5, stack=StackConfig(width=48, depth=2, heads=4))


CLASSES = {"config": json.dumps(asdict(PLAIN)), "metadata": json.dumps({"class_names": [1]})}


@pytest.mark.parametrize("header, named", [
    ({"config": "{"}, "header"), ({"config": "[]"}, "header"), ({"config": "[" * 10**5}, "header"),
    ({"config": json.dumps({"stack": {"heads": "three"}})}, "heads"),
    ({"config": json.dumps({"layers": 3})}, "layers"), (CLASSES, "class_names"),
])  # fmt: skip
def test_a_damaged_header(header: dict[str, str], named: str, console: Console) -> None:
    save_file(timm_model("test_vit").state_dict(), "out.safetensors", header)
    console.refused("fit --model.pretrained out.safetensors", named)


def test_an_export_of_another_task() -> None:
    save_file({"x": torch.ones(1)}, "lm.safetensors", {"config": '{"vocabulary": 9}'})
    with pytest.raises(UsageError) as error:
        tessera.load("lm.safetensors")
    assert str(error.value) == (
        "tessera.load lm.safetensors is of another task: give one of `tasks.vit` or `tasks.mae`"
    )


@pytest.mark.parametrize("write", [write_timm, partial(write_safetensors, "vit")])
def test_rows_of_the_classifier_are_ordered_by_names(write: Any, capsys: Capture) -> None:
    net = randomise(ViT(PLAIN))
    names = ["a", "b", "c", "d", "e"]
    out = "." if write is write_timm else "out.safetensors"
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3}
    write(net, {"class_names": names, **pixels, **external_targets(SINGLE)}, Path(out))
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        expected = net(images)[:, [4, 1, 0, 3, 2]]
        found = initial(out, ["e", "b", "a", "d", "c"])(images)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert "anew" not in capsys.readouterr().out
    for others in (["a", "b", "c", "d", "x"], ["a", "b", "c", "d"], ["0", "1", "2", "3", "4"]):
        other = initial(out, others)
        assert "anew" in capsys.readouterr().out
        assert not torch.isin(other.head.linear.weight, net.head.linear.weight).any()
    assert difference(initial(out, names), net) <= 1e-5


def test_rows_of_classifiers_of_imagenet_are_ordered_by_synsets(
    monkeypatch: Patch, capsys: Capture
) -> None:
    theirs = timm_model("test_vit")
    create = timm.create_model
    local = lambda name, pretrained: theirs if pretrained else create(name)  # noqa: E731
    monkeypatch.setattr(timm, "create_model", local)
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()
    other = initial("timm/test_vit", [str(number) for number in range(1000)])
    assert "anew" in capsys.readouterr().out
    assert (other.head.linear.bias - theirs.head.bias).abs().mean() > 0.001
    net = initial("timm/test_vit", names[::-1])
    assert "anew" not in capsys.readouterr().out
    assert torch.equal(net.head.linear.bias, theirs.head.bias.flip(0))
