"""Swin on the command line and in Python: every command, for both versions."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import tessera
import timm
import torch
import yaml

from tasks.vit.task import SwinTask, ViTTask
from tests.helpers.command import Console, process, python, run
from tests.helpers.results import checkpoint, logged, metrics, same, summary
from tests.helpers.tiny import FEW_STEPS, SHORT, write_images
from tests.parity.vit import randomise

DEPTHS = "--model.net.depths [1,2] --model.net.stack.depth 3"
NET = (
    "--preset swin_cifar --model.net.image_size 8 --model.net.patch_size 1 "
    f"--model.net.window_size 3 {DEPTHS} --model.net.stack.width 8"
)
SECOND = (
    "--model.net.relative_bias mlp --model.net.stack.attention cosine "
    "--model.net.stack.order res_post"
)
SAME = "--model.augment.crop_padding 0"  # with any number of processes
ONE_BATCH = "--trainer.limit_test_batches 1"
FIT = f"fit {NET} {FEW_STEPS}"
KILL = """import os, signal
from tasks.base import Task
step = Task.training_step
def killed(self, batch, index):
    if self.current_epoch == 1 and index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, index)
Task.training_step = killed"""


def logits(net: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(images)


@pytest.mark.parametrize("version", ["", pytest.param(SECOND, marks=pytest.mark.slow)])
def test_a_run_is_used_by_every_command(version: str, console: Console) -> None:
    out, _ = console.printed(f"{FIT} {version} --run_dir r")
    assert "Swin" in out and "vit export" in out and "vit look" in out
    saved = yaml.safe_load(Path("r/config.yaml").read_text())["model"]["net"]
    assert saved["architecture"] == "swin" and saved["depths"] == [1, 2]
    accuracy = summary("r")["test/acc"]
    out, _ = console.printed(f"test --ckpt_path r --output results {ONE_BATCH}")
    assert json.loads(Path("results/test.json").read_text())["test/acc"] == accuracy
    model = tessera.load("r", kind=tessera.ImageClassifier)
    image = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    assert model.embed(image).shape == (16,)
    images = torch.rand(3, 1, 8, 8)
    expected = logits(model.net, images)
    for task in (ViTTask, SwinTask):
        loaded = task.load_from_checkpoint("r")
        assert type(loaded) is SwinTask
        torch.testing.assert_close(logits(loaded.net, images), expected)
    with pytest.raises(tessera.UsageError, match="Swin"):
        model.attention_map(image)
    out, _ = console.printed("look --ckpt_path r --samples 1 --ablate stages.1.1.2")
    assert "wrote" in out and "without stages.1 layer 1, head 2" in out
    console.refused("look --ckpt_path r --ablate 1.2", "--ablate", "stages.0, stages.1")
    console.refused("look --ckpt_path r --ablate stages.0.1.0", "layer 1")
    out, _ = console.printed("profile --ckpt_path r --lengths 8 --repetitions 1")
    assert "stage 2 attention scores" in out
    for format in ("timm", "safetensors"):
        console.printed(f"export --ckpt_path r --format {format} --output out.{format}")
        back = tessera.load(f"out.{format}")
        torch.testing.assert_close(logits(back.net, images), expected)
        line = f"fit --model.pretrained out.{format} {FEW_STEPS} --model.net.window_size 4"
        out, _ = console.printed(f"{line} --model.optimizer.lr 1e-12 --run_dir r{format}")
        assert "anew" not in out
    theirs = timm.create_model("local-dir:out.timm", pretrained=True)
    torch.testing.assert_close(logits(theirs, images), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", SECOND])
def test_onnx(version: str, console: Console) -> None:
    console.printed(f"{FIT} {version} --run_dir r")
    console.printed("export --ckpt_path r --format onnx --output out.onnx")
    session = onnxruntime.InferenceSession("out.onnx")
    model = tessera.load("r")
    mean, std = model.metadata["mean"][0], model.metadata["std"][0]
    for batch in (1, 5):
        pixels = torch.rand(batch, 1, 8, 8)
        (found,) = session.run(None, {"images": pixels.numpy()})
        expected = logits(model.net, (pixels - mean) / std)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    options = (
        f"{NET} {SHORT} {DEPTHS} --model.net.stack.drop_path 0.2 --model.net.stack.dropout 0.1 "
        "--checkpoint.every_n_train_steps 1"
    )
    assert run(f"fit {options} --run_dir whole") == 0
    done = process(f"fit {options} --run_dir r", KILL, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert run("fit --resume r") == 0
    assert metrics("r") == metrics("whole")
    assert same(checkpoint("r")["state_dict"], checkpoint("whole")["state_dict"])


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--trainer.devices 2", "--compile"])
def test_two_processes_and_the_compiler_train_alike(options: str, tmp_path: Path) -> None:
    plain = f"fit {NET} {FEW_STEPS} {SAME} --trainer.accelerator cpu"
    assert run(f"{plain} --data.batch_size 32 --run_dir plain") == 0
    size = 16 if "devices" in options else 32
    done = python(f"tasks.vit {plain} --data.batch_size {size} {options} --run_dir r", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("train/loss", "val/loss"):
        assert logged("r", name) == pytest.approx(logged("plain", name), abs=1e-3)


def test_the_last_preset_is_that_of_the_network(console: Console) -> None:
    out, _ = console.printed("fit --preset swin_tiny --help model.net")
    assert "--model.net.window_size" in out and "--model.net.pool" not in out
    assert re.search(r"--model\.net\.depths[^-]*2, ?2, ?6, ?2", out)
    out, _ = console.printed("fit --preset swin_tiny --preset tiny --help model.net")
    assert "--model.net.pool" in out and "--model.net.window_size" not in out
    out, _ = console.printed("fit --model.net.architecture swin --print_config")
    assert yaml.safe_load(out)["model"]["net"]["window_size"] == 7
    out, _ = console.printed("fit --help preset")
    assert re.search(r"swin_tiny:[^:]*architecture\s+swin", out) and "swinv2_tiny:" in out


def test_bad_input(console: Console) -> None:
    refused = {
        f"{FIT} --model.net.patch_size 3": ("--model.net.image_size 8", "6 or 9"),
        f"{FIT} --model.net.depths [1,1]": ("--model.net.stack.depth", "depths"),
        f"{FIT} --model.net.pool mean": ("--model.net.pool",),
        f"{FIT} --model.net.architecture swim": ("architecture", "vit, swin"),
        f"{FIT} --model.net.stack.attention additive": ("additive",),
        f"{FIT} --model.pretrained timm/vit_tiny_patch16_224 {NET} --data.dataset.mean [0.5] "
        "--data.dataset.std [0.5]": ("architecture is vit",),
    }
    for line, names in refused.items():
        console.refused(line, *names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_models_of_timm_by_name(
    name: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = randomise(timm.create_model(name))
    create = timm.create_model

    def local(name: str, pretrained: bool = False, **options: Any) -> Any:
        return theirs if pretrained else create(name, **options)

    monkeypatch.setattr(timm, "create_model", local)  # nothing is downloaded
    model = tessera.load(f"timm/{name}", kind=tessera.ImageClassifier)
    assert "goldfish" in model.class_names[1]
    pixels = torch.randn(1, 3, model.net.config.image_size, model.net.config.image_size)
    torch.testing.assert_close(logits(model.net, pixels), logits(theirs, pixels), atol=1e-4, rtol=0)
    write_images(Path("images"), side=32)
    small = "--model.net.image_size 32 --model.net.window_size 4"
    data = "--data.source folder --data.path images --data.batch_size 4"
    line = f"fit --model.pretrained timm/{name} {small} {data} {FEW_STEPS} --run_dir r"
    assert "anew" in console.printed(line)[0]
    net = tessera.load("r").net
    assert net.config.window_sizes == [4, 4, 2, 1]
    reach = {"swin": None, "swinv2": (8, 8, 8, 8)}[name.partition("_")[0]]
    assert net.config.pretrained_windows == reach
