"""An MLP-Mixer on the command line: trained, resumed, exported, and where there is no attention."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tessera
import timm
import torch
from safetensors.torch import load_file

from modules.models.vit import VIT_PRESETS
from tests.helpers.command import Console, run
from tests.helpers.results import checkpoint, logged, same, summary
from tests.helpers.tiny import picture, write_images

FIT = (  # a rate that does not depend on the number of epochs
    "fit --trainer.max_epochs 2 --model.optimizer.lr 0.003 --model.optimizer.schedule constant "
    "--model.optimizer.warmup 0"
)
DIGITS = (
    f"{FIT} --data.source digits --preset mixer_cifar --model.net.image_size 8 "
    "--model.net.patch_size 2 --model.net.stack.width 32 --data.batch_size 64"
)
BASE = "r/checkpoints/best"


@pytest.mark.slow
def test_a_mixer_learns_resumes_and_is_exported(console: Console) -> None:
    assert run(f"{DIGITS} --run_dir r") == 0
    assert logged("r", "train/loss")[-1] < 1.5  # 2.3 at first
    assert summary("r")["test/acc"] > 0.5
    assert run(f"{DIGITS} --trainer.max_epochs 1 --run_dir again") == 0
    assert run("fit --resume again --trainer.max_epochs 2") == 0
    assert same(checkpoint("r")["state_dict"], checkpoint("again")["state_dict"])
    model = tessera.load("r")
    assert isinstance(model, tessera.ImageClassifier)
    photo = picture(8, "L")
    expected = model.logits(photo)
    for method in (model.attention, model.attention_map):
        with pytest.raises(tessera.UsageError, match="attention"):
            method(photo)
    console.refused("look --ckpt_path r --output look", "attention", "ablate", "activations")
    with model.ablate(0):
        assert not torch.equal(model.logits(photo), expected)
    with pytest.raises(tessera.UsageError, match="token_mixing"), model.ablate(0, 0):
        pass
    assert model.activations(photo, names="blocks.0.token_mixing")
    assert not Path("look").exists()
    console.refused("export --ckpt_path r --format timm", "timm has no such model")
    assert run("export --ckpt_path r --format onnx") == 0
    pixels = torch.from_numpy(np.asarray(photo) / np.float32(255))[None, None]
    session = onnxruntime.InferenceSession(f"{BASE}.onnx")
    (found,) = session.run(None, {"images": pixels.expand(3, -1, -1, -1).numpy()})
    torch.testing.assert_close(torch.from_numpy(found[2]), expected, atol=1e-4, rtol=0)
    assert run("export --ckpt_path r --format safetensors") == 0
    state = load_file(f"{BASE}.safetensors")
    assert same(
        state, {k.removeprefix("net."): v for k, v in checkpoint("r", "best")["state_dict"].items()}
    )
    start = f"fit --data.source digits --model.pretrained {BASE}.safetensors"
    console.refused(f"{start} --model.net.patch_size 4", "--model.net.patch_size 4", "2x2", "4x4")


@pytest.mark.slow
def test_a_mixer_of_timms_sizes_goes_there_and_comes_back() -> None:
    write_images(Path("images"), side=32)
    sizes = "--model.net.stack.token_mlp_width 8 --model.net.stack.mlp_width 32"
    data = "--data.source folder --data.path images --data.batch_size 4"
    size = "--model.net.image_size 32"
    assert run(f"{FIT} {data} --preset mixer_small {size} {sizes} --run_dir r") == 0
    assert run("export --ckpt_path r --format timm --output out") == 0
    theirs = timm.create_model("local-dir:out", pretrained=True).eval()
    net = tessera.load("r").net
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(net(images), theirs(images), atol=1e-4, rtol=0)
    line = f"{FIT} {data} --model.pretrained out --model.optimizer.lr 1e-30 --run_dir back"
    assert run(f"{line} --trainer.max_epochs 1") == 0
    with torch.inference_mode():
        found = tessera.load("back").net(images)
    torch.testing.assert_close(found, theirs(images), atol=1e-4, rtol=0)


def test_help_says_what_each_preset_sets(console: Console) -> None:
    out, _ = console.printed("fit --help preset")
    text = " ".join(out.split())
    assert all(f" {name}: " in text for name in VIT_PRESETS)
    assert "stack.depth 8, stack.heads 1, stack.order mixer mixer_base:" in text


def test_curves_of_attention_need_attention(console: Console) -> None:
    console.refused(f"{DIGITS} --look_every 5 --run_dir r", "--look_every")
