"""Exported models: other programs give the same logits; what cannot be written leaves nothing."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tessera
import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file

from modules.models.images import IMAGE_PRESETS
from modules.models.vit import ViT
from tasks.checkpoints.exporting import (
    NextTokenGraph,
    export_target,
    new_folder,
    write_text_graph,
)
from tasks.errors import UsageError
from tasks.vit.export import write_onnx
from tests.helpers.command import Console, Patch, run
from tests.helpers.images import random_image
from tests.helpers.results import same
from tests.helpers.tiny import SHORT, write_images
from tests.helpers.tiny_models import tiny
from tests.tasks.vit.test_timm import trained

Fit = Callable[[str], Path]
WEIGHTS = "model.safetensors"
TINY = "--model.net.image_size 8 --model.net.stack.width 24 --model.net.stack.depth 1"
SIBLINGS = [
    f"--preset deit_tiny --model.net.patch_size 2 {TINY}",
    f"--preset cct_2_3x2 --model.net.patch_size 2 {TINY}",
    f"--preset hybrid_tiny --model.net.patch_size 8 {TINY}",
]
ROTARY = "--model.net.position rotary2d --model.net.stack.feedforward swiglu"


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Runs by their options, each made once."""
    made: dict[str, Path] = {}

    def fit(options: str) -> Path:
        if options not in made:
            folder = tmp_path_factory.mktemp("fits") / "run"
            assert run(f"fit {SHORT} --trainer.max_epochs 1 {options} --run_dir {folder}") == 0
            made[options] = folder
        return made[options]

    return fit


def export(folder: Path, format: str, output: str) -> int:
    path = folder / "checkpoints" / "best.ckpt"
    return run(f"export --ckpt_path {path} --format {format} --output {output}")


def test_timm(fit: Fit, console: Console) -> None:
    options = "--model.net.register_tokens 2 --model.net.stack.qk_norm true --model.ema 0.9"
    folder = fit(f"--model.net.position learned --model.net.stem patch {options}")
    line = f"export --ckpt_path {folder}/checkpoints/best.ckpt --format timm"
    out, _ = console.printed(f"{line} --output out")
    call = re.search(r"timm\.create_model\(.*\)", out)
    assert call
    model = eval(call[0], {"timm": timm}).eval()  # as a user would paste it
    images = torch.randn(3, 1, 8, 8)
    net, metadata = trained(str(folder))
    with torch.no_grad():
        torch.testing.assert_close(model(images), net(images), atol=1e-5, rtol=0)
    found = timm.data.resolve_model_data_config(model)
    assert (found["mean"], found["std"]) == (metadata["mean"], metadata["std"])
    back = tessera.load("out")
    for name in ("class_names", "mean", "std", "image_size", "channels"):
        assert back.metadata[name] == metadata[name]
    with torch.no_grad():
        torch.testing.assert_close(back.net(images), net(images), atol=1e-6, rtol=0)
    assert sorted(path.name for path in Path("out").iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("output", ["out.onnx", "out.safetensors", "out"])
def test_what_exists_is_kept(output: str, fit: Fit, console: Console) -> None:
    Path(output).write_text("mine")
    name = output.partition(".")[2] or "timm"
    line = f"export --ckpt_path {fit('')} --format {name}"
    console.refused(f"{line} --output {output}", output, "exists already")
    assert Path(output).read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("options", [ROTARY, "", *SIBLINGS])
def test_onnx(options: str, fit: Fit) -> None:
    assert export(fit(options), "onnx", "out.onnx") == 0
    session = onnxruntime.InferenceSession("out.onnx")
    net, metadata = trained(str(fit(options)))
    for batch in (1, 7):
        pixels = torch.rand(batch, 1, 8, 8)
        (logits,) = session.run(None, {"images": pixels.numpy()})
        with torch.no_grad():
            expected = net((pixels - metadata["mean"][0]) / metadata["std"][0])
        torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-5, rtol=0)
    assert '"9"' in session.get_modelmeta().custom_metadata_map["class_names"]


def test_weights_too_large_for_one_file() -> None:
    with torch.device("meta"):
        net = ViT(replace(IMAGE_PRESETS["giant"], num_classes=10, channels=3))
    with pytest.raises(UsageError, match="1.5 GiB into one ONNX file: use --format safetensors"):
        write_onnx(net, {"mean": [0.5] * 3, "std": [0.5] * 3}, Path("x.onnx"))


def preprocessed(path: str, settings: dict[str, Any]) -> np.ndarray:
    """A picture as a graph's metadata say, (1, C, S, S), without Tessera or torch."""
    channels, _, size = settings["input_size"]
    image = ImageOps.exif_transpose(Image.open(path)).convert(settings["mode"])
    shorter = min(image.size)
    resized = math.floor(size / settings["crop_pct"])
    width, height = (side * resized // shorter for side in image.size)
    filters = Image.Resampling[settings["interpolation"].upper()]
    image = image.resize((width, height), filters)
    left = round((width - size) / 2)
    top = round((height - size) / 2)
    pixels = np.array(image.crop((left, top, left + size, top + size)))
    # (S, S) or (S, S, C) -> (S, S, C) -> (C, S, S)
    pixels = pixels.reshape(size, size, channels).transpose(2, 0, 1)
    return (pixels[None] * settings["scale"]).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_onnx_on_a_picture(mode: str, console: Console) -> None:
    """Its metadata tell how to get the probabilities of `predict` from a picture."""
    write_images(Path("data"))
    grey = "--model.net.channels 1 " if mode == "L" else ""
    net = "--model.net.image_size 16 --model.net.patch_size 4 --model.net.stack.width 32"
    line = f"fit --data.path data {grey}{net} --model.net.stack.heads 2 --model.optimizer.lr 3e-3"
    if mode == "RGB":
        line += " --data.dataset.interpolation bicubic --data.dataset.crop_pct 0.8"
    line += " --data.batch_size 4 --trainer.max_epochs 20 --trainer.limit_test_batches 0"
    console.printed(f"{line} --run_dir r")
    out, _ = console.printed("export --ckpt_path r --format onnx --output out.onnx")
    assert "custom_metadata_map['preprocessing']" in out
    session = onnxruntime.InferenceSession("out.onnx")
    found = session.get_modelmeta().custom_metadata_map
    names, kind, settings = (
        json.loads(found[name]) for name in ("class_names", "problem_type", "preprocessing")
    )
    assert settings["mode"] == mode and kind == "single_label_classification"
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees
    random_image(0, (61, 40)).save("a.png", exif=exif)
    (logits,) = session.run(None, {"images": preprocessed("a.png", settings)})
    powers = np.exp(logits[0] - logits[0].max())
    expected = tessera.load("r").predict("a.png").probabilities
    assert dict(zip(names, powers / powers.sum(), strict=True)) == pytest.approx(expected, abs=2e-3)


def test_safetensors(fit: Fit) -> None:
    assert export(fit(""), "safetensors", "a/b.safetensors") == 0
    net, _ = trained(str(fit("")))
    assert same(load_file("a/b.safetensors"), dict(net.state_dict()))
    assert [path.name for path in Path("a").iterdir()] == ["b.safetensors"]


def test_a_folder_that_cannot_be_filled_leaves_nothing() -> None:
    for kept in ([], ["x"]):
        with pytest.raises(ValueError, match="no"), new_folder(Path("x/y/z")) as folder:
            (folder / "file").touch()
            raise ValueError("no")
        assert [str(path) for path in Path().rglob("*")] == kept
        Path("x").mkdir(exist_ok=True)
    with new_folder(Path("x/y/z")) as folder:
        (folder / "file").touch()
    assert sorted(str(path) for path in Path("x/y").rglob("*")) == ["x/y/z", "x/y/z/file"]


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("output", [".", "..", "there", "here/..", "/proc/model"])
def test_places_that_take_no_file(
    output: str, best: Path, lm_letters: Path, console: Console
) -> None:
    for name in ("here", "there/more"):
        Path(name).mkdir(parents=True)
    sources = {"vit": best, "lm": lm_letters}
    for task, format in (("vit", "safetensors"), ("vit", "onnx"), ("lm", "hf")):
        path = f"{output}.safetensors" if output == "/proc/model" and task == "vit" else output
        line = f"export --ckpt_path {sources[task]} --format {format} --output {path}"
        assert ".tmp" not in console.refused(line, path, task=task)


@pytest.mark.parametrize(
    ("task", "format", "output", "says"),
    [
        ("vit", "safetensors", "out_timm", "ends with .safetensors"),
        ("vit", "onnx", "out", "ends with .onnx"),
        ("vit", "onnx", "out.safetensors", "ends with .onnx"),
        ("vit", "timm", "out.safetensors", "folder"),
        ("bert", "onnx", "out.onnx", "folder"),
        ("bert", "hf", "out.bin", "folder"),
        ("mlm", "safetensors", "out.onnx", "ends with .safetensors"),
        ("lm", "hf", "out.safetensors", "folder"),
        ("seq2seq", "hf", "out.pt", "folder"),
        ("seq2seq", "safetensors", "out", "ends with .safetensors"),
    ],
)
def test_names_that_do_not_fit_the_format(
    task: str, format: str, output: str, says: str, console: Console
) -> None:
    """Before a checkpoint is read: this one does not exist."""
    line = f"export --ckpt_path none.ckpt --format {format} --output {output}"
    console.refused(line, f"--output {output}", says, task=task)


@pytest.mark.parametrize("source, format, written", [
    ("runs/a/checkpoints/best.ckpt", "onnx", "runs/a/checkpoints/best.onnx"),
    ("my.model.v1", "hf", "my.model.v1_hf"),
    ("my.model.v1", "safetensors", "my.model.v1.safetensors"),
    ("hf/someone/qwen2.5", "hf", "qwen2.5_hf"),
])  # fmt: skip
def test_names_without_output(source: str, format: str, written: str) -> None:
    assert export_target(source, format, None, format != "hf") == Path(written)


def test_an_export_of_the_current_folder_lies_beside_it(monkeypatch: Patch) -> None:
    Path("in/deep").mkdir(parents=True)
    monkeypatch.chdir("in/deep")
    for source, name in ((".", "in/deep_hf"), ("..", "in_hf")):
        assert export_target(source, "hf", None, False) == Path.cwd().parents[1] / name


def test_a_model_of_two_tokens_has_no_graph() -> None:
    graph = NextTokenGraph(tiny("gpt", max_length=2))
    with pytest.raises(UsageError, match="max_length of the model is 2.*safetensors"):
        write_text_graph(graph, {}, Path())
    write_text_graph(NextTokenGraph(tiny("gpt", max_length=3)), {}, Path())


@pytest.mark.parametrize(
    "line",
    [
        "vit predict --input . --ckpt_path",
        "vit fit --model.pretrained",
        "bert fit --model.pretrained",
        "lm generate --ckpt_path",
        "seq2seq translate --text a --ckpt_path",
        "mlm export --ckpt_path",
    ],
)
def test_onnx_files_are_run_by_another_program(line: str, console: Console) -> None:
    Path("model.onnx").touch()
    task, _, line = line.partition(" ")
    console.refused(f"{line} model.onnx", "model.onnx", "onnxruntime", "checkpoint", task=task)
