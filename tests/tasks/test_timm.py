"""Training from weights of timm: by name, from files, and what their classes are."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from modules.config import StackConfig
from modules.models.vit import ViT, ViTConfig
from modules.schema import from_dict
from tasks.vit.architectures import check_described, load_pretrained, pretrained_options
from tasks.vit.export import write_timm
from tests.helpers.model_folders import refused
from tests.parity.vit import difference, randomise, timm_model
from tests.tasks.command import checkpoint, run, write_images

TINY: Any = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
DESCRIPTION = {
    "--model.net.pool": "cls",
    "--model.net.stack.heads": "3",
    "--model.net.stack.feedforward": "gelu",
    "--model.net.stack.norm_eps": "1e-6",
    "--model.net.stack.order": "pre",
}
DESCRIBED = " ".join(f"{name} {value}" for name, value in DESCRIPTION.items())
FIT = (
    "fit --data.source folder --data.path images --trainer.max_epochs 1 --data.batch_size 4 "
    "--model.optimizer.lr 1e-30"
)


def initial(source: str, class_names: list[str]) -> ViT:
    """The network that training from a file starts with."""
    options = pretrained_options(source)["model"]["net"] | {"num_classes": len(class_names)}
    net = ViT(from_dict(ViTConfig, options)).eval()
    load_pretrained(net, source, {"class_names": class_names})
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
def timms(monkeypatch: pytest.MonkeyPatch) -> Any:
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


def test_a_model_by_name(timms: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("images"), ("a", "b", "c", "d", "e"), side=32)
    assert run(f"{FIT} --model.pretrained timm/vit_tiny_patch16_224 --run_dir r") == 0
    net, metadata = trained()
    assert_same_features(net, timms)
    assert metadata["mean"] == [0.5, 0.5, 0.5]  # timm's own normalisation
    assert "anew" in capsys.readouterr().out  # nobody knows what its 5 classes are
    assert not torch.equal(net.head.linear.weight, timms.head.weight)


def test_another_image_size_and_head(timms: Any) -> None:
    write_images(Path("images"), side=48)
    line = f"{FIT} --model.pretrained timm/vit_tiny_patch16_224 --model.net.image_size 48"
    assert run(f"{line} --run_dir r") == 0
    timms.set_input_size(img_size=48)  # which resizes its positions
    net, _ = trained()
    assert_same_features(net, timms)
    assert net.config.num_classes == 2


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


def test_no_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("images"), side=32)
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: Any) -> Any:
        if pretrained:
            raise OSError("no route to host")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    line = f"{FIT} --model.pretrained timm/vit_tiny_patch16_224"
    assert "--model.pretrained FILE.safetensors" in refused(line, "vit", 1, capsys)
    assert [path.name for path in Path().iterdir()] == ["images"]


@pytest.mark.parametrize(
    "name, file, config, options",
    [
        ("test_vit", "test_vit.safetensors", None, {}),  # 2 heads of 32; 64 wide ones would be 1
        ("test_vit", "test_vit.r160_in1k.safetensors", {"license": "mit"}, {"img_size": 96}),
        (
            "test_vit2",
            "model/model.safetensors",
            {"architecture": "test_vit2", "global_pool": "avg"},
            {"num_classes": 3},
        ),
        (
            "test_vit2",
            "model/model.safetensors",
            {"architecture": "test_vit2", "model_args": {"img_size": 64}},
            {},
        ),
        (
            "test_vit",
            "model/test_vit.safetensors",
            {"architecture": "test_vit", "pretrained_cfg": {}},
            {},
        ),
    ],
)
def test_a_file_of_a_known_model(name: str, file: str, config: Any, options: Any) -> None:
    theirs = timm_model(name, **options)
    save(theirs, file, config)
    assert_same_features(initial(file, ["a", "b"]), theirs)
    check_described(file, ())


@pytest.mark.parametrize(
    "file, config",
    [
        ("model/model.safetensors", {"architecture": "test_vit", "global_pool": "avg"}),
        (
            "model/model.safetensors",
            {"architecture": "test_vit", "model_args": {"act_layer": "relu"}},
        ),
        (
            "model/model.safetensors",
            {"architecture": "test_vit", "model_args": {"pretrained": True}},
        ),
        ("model/model.safetensors", {"architecture": "vit_of_tomorrow"}),
        ("model/test_vit.safetensors", {"architecture": "vit_tiny_patch16_224"}),
        ("model/test_vit.safetensors", {"architecture": "vit_of_tomorrow"}),
        ("weights.safetensors", None),
    ],
)
def test_a_file_of_an_unknown_model(
    file: str, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save(timm_model("test_vit"), file, config)
    write_images(Path("images"))
    names = list(DESCRIPTION)
    for missing in (names, names[1:], names[-1:]):
        options = " ".join(f"{name} {DESCRIPTION[name]}" for name in names if name not in missing)
        line = f"{FIT} --model.pretrained {file} --run_dir r {options}"
        error = refused(line, "vit", 2, capsys)
        assert [name for name in names if name in error] == missing
    assert not Path("r").exists()


@pytest.mark.parametrize("content", ["[]", "{", "[" * 10**5, '{"model_args": 3}'])
def test_a_damaged_config_beside_a_file(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(timm_model("test_vit"), "weights.safetensors")
    Path("config.json").write_text(content)
    line = "fit --model.pretrained weights.safetensors"
    assert "config.json" in refused(line, "vit", 2, capsys)


@pytest.mark.parametrize(
    "name, depth, named",
    [
        ("vit_tiny_patch16_224", 6, "width"),
        ("test_vit", 3, "depth"),
        ("eva02_tiny_patch14_224", 6, "Eva"),
    ],
)
def test_a_file_of_another_model_than_its_name_says(
    name: str, depth: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(timm_model("test_vit", depth=depth), f"{name}.safetensors")
    assert named in refused(f"fit --model.pretrained {name}.safetensors", "vit", 2, capsys)


PLAIN = ViTConfig(32, 8, 3, 5, stack=StackConfig(width=48, depth=2, heads=4))


@pytest.mark.parametrize(
    "header, named",
    [
        ({"config": "{"}, "header"),
        ({"config": "[]"}, "header"),
        ({"config": "[" * 10**5}, "header"),
        ({"config": json.dumps({"stack": {"heads": "three"}})}, "heads"),
        ({"config": json.dumps({"layers": 3})}, "layers"),
        (
            {"config": json.dumps(asdict(PLAIN)), "metadata": json.dumps({"class_names": [1]})},
            "class_names",
        ),
    ],
)
def test_a_damaged_header(
    header: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(timm_model("test_vit").state_dict(), "out.safetensors", header)
    assert named in refused("fit --model.pretrained out.safetensors", "vit", 2, capsys)


def test_rows_of_the_classifier_are_ordered_by_the_names_in_the_header(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = randomise(ViT(PLAIN))
    names = ["a", "b", "c", "d", "e"]
    write_timm(net, {"class_names": names}, Path("out.safetensors"))
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        expected = net(images)[:, [4, 1, 0, 3, 2]]
        found = initial("out.safetensors", ["e", "b", "a", "d", "c"])(images)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert "anew" not in capsys.readouterr().out
    for others in (["a", "b", "c", "d", "x"], ["a", "b", "c", "d"], ["0", "1", "2", "3", "4"]):
        other = initial("out.safetensors", others)
        assert "anew" in capsys.readouterr().out
        assert not torch.isin(other.head.linear.weight, net.head.linear.weight).any()
    assert difference(initial("out.safetensors", names), net) <= 1e-5


def test_rows_of_classifiers_of_imagenet_are_ordered_by_synsets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = timm_model("test_vit")
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained: theirs if pretrained else create(name)
    )
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()
    other = initial("timm/test_vit", [str(number) for number in range(1000)])
    assert "anew" in capsys.readouterr().out
    assert (other.head.linear.bias - theirs.head.bias).abs().mean() > 0.001
    net = initial("timm/test_vit", names[::-1])
    assert "anew" not in capsys.readouterr().out
    assert torch.equal(net.head.linear.bias, theirs.head.bias.flip(0))
