"""Weights from timm and back: other programs give the same logits."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modules.models.vit import ViT, ViTConfig
from tasks.checkpoints.exporting import new_folder
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tests.tasks.command import SHORT, checkpoint, run, write_images

TINY = {"img_size": 32, "patch_size": 8, "depth": 2}  # of timm's vit_tiny, to be quick


def ours(folder: str | Path) -> tuple[ViT, dict[str, Any]]:
    """The network of a run's best checkpoint, and its metadata."""
    saved = checkpoint(folder, "best")
    net = ViT(load_config(ViTConfig, saved[KEY]["config"]["model"]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    return net, saved[KEY]["metadata"]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs by their options, each made once."""
    made: dict[str, Path] = {}

    def fit(options: str) -> Path:
        if options not in made:
            made[options] = tmp_path_factory.mktemp("fits") / "run"
            assert (
                run(f"fit {SHORT} --trainer.max_epochs 1 {options} --run_dir {made[options]}") == 0
            )
        return made[options]

    return fit


VARIANTS = [
    "--model.net.pool cls",
    "--model.net.pool mean",
    "--model.net.register_tokens 2",
    "--model.net.stack.layer_scale 0.1 --model.net.stack.qk_norm true",
    "--model.ema 0.9",
]


@pytest.mark.parametrize("options", VARIANTS)
def test_timm_by_name(options: str, fits: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fits(f"--model.net.position learned --model.net.stem patch {options}")
    capsys.readouterr()
    assert (
        run(
            f"export --ckpt_path {folder}/checkpoints/best.ckpt --format timm --output out.safetensors"
        )
        == 0
    )
    call = re.search(r"timm\.create_model\(.*\)", capsys.readouterr().out)
    model = eval(call[0]).eval()  # what it printed, as a user would paste it
    net, _ = ours(folder)
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(model(images), net(images), atol=1e-5)


@pytest.mark.parametrize(
    "options", ["", "--model.net.position rotary2d --model.net.stack.feedforward swiglu"]
)
def test_onnx(options: str, fits: Any) -> None:
    folder = fits(options)
    assert (
        run(f"export --ckpt_path {folder}/checkpoints/best.ckpt --format onnx --output out.onnx")
        == 0
    )
    session = onnxruntime.InferenceSession("out.onnx")
    net, metadata = ours(folder)
    for batch in (1, 2, 7):
        pixels = torch.rand(batch, 1, 8, 8)
        (logits,) = session.run(None, {"images": pixels.numpy()})
        with torch.no_grad():
            expected = net((pixels - metadata["mean"][0]) / metadata["std"][0])
        assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-5)
    assert '"9"' in session.get_modelmeta().custom_metadata_map["class_names"]


def test_safetensors(fits: Any) -> None:
    assert (
        run(
            f"export --ckpt_path {fits('')}/checkpoints/best.ckpt --format safetensors --output a/b.safetensors"
        )
        == 0
    )
    net, _ = ours(fits(""))
    assert load_file("a/b.safetensors").keys() == net.state_dict().keys()
    assert all(
        torch.equal(value, net.state_dict()[name])
        for name, value in load_file("a/b.safetensors").items()
    )
    assert [path.name for path in Path("a").iterdir()] == ["b.safetensors"]


def test_what_timm_does_not_have(fits: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fits("--model.net.position rotary2d --model.net.stack.feedforward swiglu")
    assert (
        run(
            f"export --ckpt_path {folder}/checkpoints/best.ckpt --format timm --output no.safetensors"
        )
        == 2
    )
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "onnx or safetensors" in error
    assert list(Path().iterdir()) == []


def test_a_folder_that_cannot_be_filled_leaves_nothing() -> None:
    for kept in ([], ["x"]):
        with pytest.raises(ValueError, match="no"), new_folder(Path("x/y/z")) as folder:
            (folder / "file").touch()
            raise ValueError("no")
        assert [str(path) for path in Path().rglob("*")] == kept
        Path("x").mkdir(exist_ok=True)
    with new_folder(Path("x/y/z")) as folder:
        (folder / "file").touch()
    assert [path.name for path in Path("x/y").iterdir()] == ["z"] and Path("x/y/z/file").exists()


# Pretrained ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def timms(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A small timm ViT, and timm's `vit_tiny_patch16_224` replaced by it, so that nothing is downloaded."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **TINY)
    create = timm.create_model

    def local(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        small = create(name, num_classes=5, **TINY, **options)
        if pretrained:
            small.load_state_dict(model.state_dict())
        return small

    monkeypatch.setattr(timm, "create_model", local)
    return model.eval()


def pretrained(source: str, more: str = "") -> ViT:
    """The network that a fit of zero learning rate ends with, so its start."""
    write_images(Path("images"), ("a", "b", "c", "d", "e"), side=32)
    line = f"fit --model.pretrained {source} --data.source folder --data.path images --run_dir r {more}"
    assert run(f"{line} --trainer.max_epochs 1 --model.optimizer.lr 1e-30 --data.batch_size 4") == 0
    return ours("r")[0]


def same_features(net: ViT, theirs: Any) -> bool:
    """Whether both give their classifiers the same vectors."""
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        return torch.allclose(net.features(images), features, atol=1e-5)


def test_timms_download(timms: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    net = pretrained("timm/vit_tiny_patch16_224")
    assert same_features(net, timms)
    assert ours("r")[1]["mean"] == [0.5, 0.5, 0.5]  # timm's own normalisation
    assert "anew" in capsys.readouterr().out  # nobody knows what its 5 classes are
    assert not torch.equal(net.head.linear.weight, timms.head.weight)


UNTOLD = (
    "--model.net.pool cls --model.net.stack.heads 3 --model.net.stack.feedforward gelu --model.net.stack.norm_eps 1e-6 "
    "--model.net.stack.order pre"
)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_local_file(ending: str, timms: nn.Module) -> None:
    if ending == "pth":
        torch.save({"state_dict": timms.state_dict()}, "w.pth")
    else:
        save_file(timms.state_dict(), "w.safetensors")
    assert same_features(pretrained(f"w.{ending}", f"--model.net.image_size 32 {UNTOLD}"), timms)
    assert run("fit --config r/config.yaml --run_dir again") == 0  # which names them all


def test_another_image_size_and_head(timms: nn.Module) -> None:
    write_images(Path("images"), side=48)
    line = "fit --model.pretrained timm/vit_tiny_patch16_224 --model.net.image_size 48 --data.source folder"
    line += " --data.path images --run_dir r --trainer.max_epochs 1 --model.optimizer.lr 1e-30 --data.batch_size 4"
    assert run(line) == 0
    net, _ = ours("r")
    create = timm.create_model("vit_tiny_patch16_224")
    create.set_input_size(img_size=48)  # timm's own re-gridding
    create.load_state_dict(timms.state_dict() | {"pos_embed": create.pos_embed}, strict=False)
    grid = timm.layers.pos_embed.resample_abs_pos_embed(
        timms.pos_embed, [6, 6], num_prefix_tokens=1
    )
    create.pos_embed.data = grid.data
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        assert torch.allclose(net.features(images), create.eval().forward_head(
            create.forward_features(images), pre_logits=True), atol=1e-4)  # fmt: skip
        assert net(images).shape == (2, 2)


def test_no_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("images"), side=32)
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            raise OSError("no route to host")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    line = (
        "fit --model.pretrained timm/vit_tiny_patch16_224 --data.source folder --data.path images"
    )
    assert run(line) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--model.pretrained FILE.safetensors" in error
    assert [path.name for path in Path().iterdir()] == ["images"]


@pytest.mark.parametrize("format", ["timm", "safetensors"])
def test_names_that_readers_would_misread(
    format: str, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"export --ckpt_path {best} --format {format} --output out_timm") == 2
    assert "must end with .safetensors" in capsys.readouterr().err and not Path("out_timm").exists()


@pytest.mark.parametrize("output", [".", "..", "there", "here/.."])
@pytest.mark.parametrize("task, format", [("vit", "safetensors"), ("vit", "onnx"), ("lm", "hf")])
def test_a_folder_that_is_there_is_no_file_to_write(
    task: str,
    format: str,
    output: str,
    best: Path,
    lm_letters: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = best if task == "vit" else lm_letters
    for name in ("here", "there/more"):
        Path(name).mkdir(parents=True)
    before = sorted(Path().rglob("*"))
    assert run(f"export --ckpt_path {source} --format {format} --output {output}", task) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and output in said and "--debug" not in said
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("format", ["hf", "safetensors"])
def test_names_of_files_that_are_there_for_a_while_are_not_said(
    format: str, lm_letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"export --ckpt_path {lm_letters} --format {format} --output /proc/model", "lm") == 2
    said = capsys.readouterr().err
    assert "'/proc/model' cannot be used" in said and ".tmp" not in said
