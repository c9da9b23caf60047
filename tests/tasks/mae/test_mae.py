"""Masked autoencoders through the command line: pictures, masks, and ViTs that start from them."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tessera
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tasks.errors import UsageError
from tasks.mae.task import MAETask
from tasks.tracking.picture_grid import draw_grid
from tests.helpers.command import Console, Patch, run
from tests.helpers.results import checkpoint, logged, metrics, summary
from tests.helpers.tiny import FEW_STEPS, NO_UPDATES, TINY, write_images
from tests.helpers.tiny_models import close
from tests.parity.test_mae import their_model

MAE = TINY["mae"]
FIT = f"fit {FEW_STEPS} {MAE}"
VIT = f"fit {FEW_STEPS} --data.batch_size 16 {NO_UPDATES}"
IMAGES = (
    "--data.source folder --data.path images --data.batch_size 4 --data.dataset.val_fraction 0.3"
)
ENCODER = ("net.embed", "net.position", "net.prefix", "net.stack")


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits with learned positions; not to be changed."""
    folder = tmp_path_factory.mktemp("pretraining") / "m"
    options = "--model.net.position learned --model.net.pool mean"
    assert run(f"{FIT} {options} --run_dir {folder}", "mae") == 0
    return folder


@pytest.fixture
def pretrained(pretraining: Path) -> str:
    """A copy of it."""
    return str(shutil.copytree(pretraining, "m"))


def encoder(folder: str, name: str = "last") -> dict[str, Any]:
    """The encoder's weights in a checkpoint."""
    state = checkpoint(folder, name)["state_dict"]
    return {key: value for key, value in state.items() if key.startswith(ENCODER)}


# Evaluation ---------------------------------------------------------------------------------------


def test_a_run_ends_with_its_pictures(pretrained: str, console: Console) -> None:
    assert Path("m/reconstructed.png").is_file()
    assert 0.3 < summary("m")["test/loss"] < 9
    assert len(logged("m")) == 3
    line = f"test --ckpt_path {pretrained} --trainer.limit_test_batches 1"
    losses = [logged_loss(console, f"{line} --output {folder}") for folder in "ab"]
    assert losses[0] == losses[1] == pytest.approx(summary("m")["test/loss"], rel=1e-5)
    assert Path("a/reconstructed.png").is_file()
    console.printed(f"validate --ckpt_path {pretrained} --output c", "mae")
    assert Path("c/val_reconstructed.png").is_file()


def logged_loss(console: Console, line: str) -> float:
    console.printed(line, "mae")
    return json.loads(Path(line.split()[-1], "test.json").read_text())["test/loss"]


def test_masks_differ_between_epochs_and_not_between_evaluations() -> None:
    """Without updates, the loss of the same batch shows the masks."""
    more = f"--trainer.overfit_batches 1 --trainer.max_epochs 3 {NO_UPDATES}"
    assert run(f"{FIT} --model.augment.crop_padding 0 {more} --run_dir r", "mae") == 0
    losses = logged("r")
    assert len(set(losses)) == 3
    evaluated = [float(row["val/loss"]) for row in metrics("r") if "val/loss" in row]
    assert len(evaluated) == 3 and max(evaluated) - min(evaluated) < 1e-6


@pytest.mark.parametrize("norm_pixels", [True, False])
def test_pictures_differ_where_patches_are_masked(norm_pixels: bool, monkeypatch: Patch) -> None:
    assert run(f"{FIT} --model.net.norm_pixels {norm_pixels} --run_dir r", "mae") == 0
    drawn: dict[str, Tensor] = {}

    def recorded(rows: dict[str, Tensor], *others: Any) -> None:
        drawn.update(rows)
        draw_grid(rows, *others)

    monkeypatch.setattr("tasks.mae.task.draw_grid", recorded)
    task = MAETask.load_from_checkpoint("r").eval()
    images = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    batch = {"image": images, "index": torch.arange(10)}
    with torch.no_grad():
        predicted, masked = task.step(batch, training=False).outputs
    task.collect_media(batch, (predicted, masked))
    assert [name.partition(",")[0] for name in drawn] == ["original", "masked", "reconstructed"]
    original, hidden, reconstructed = drawn.values()
    mean, std = (255 * task.metadata[name][0] for name in ("mean", "std"))
    expected = images.float()
    is_masked = torch.zeros(10, 1, 8, 8, dtype=torch.bool)
    for image, patch in product(range(10), range(masked.shape[1])):
        row, column = divmod(int(masked[image, patch]), 4)
        square = (image, 0, slice(2 * row, 2 * row + 2), slice(2 * column, 2 * column + 2))
        is_masked[square] = True
        pixels = images[square].float()
        level, spread = (pixels.mean(), pixels.std()) if norm_pixels else (mean, std)
        expected[square] = predicted[image, patch].view(2, 2) * spread + level
    assert torch.equal(original, images[:8])
    assert is_masked.sum() == 10 * 48
    close(hidden, images[:8].where(~is_masked[:8], round(mean)), atol=0)
    close(reconstructed.float(), expected[:8].clamp(0, 255), atol=0.51)
    assert torch.equal(reconstructed[~is_masked[:8]], original[~is_masked[:8]])


def test_in_python(pretrained: str) -> None:
    model = tessera.load(pretrained, kind=tessera.MaskedImageModel)
    image = torch.randint(0, 256, (8, 8), dtype=torch.uint8)
    shown = model.reconstruct(image)
    assert torch.equal(shown.original, image[None])
    hidden = shown.masked != shown.original
    assert 0.6 < hidden.float().mean() <= 0.75
    assert not torch.equal(shown.reconstructed[hidden], shown.original[hidden])
    assert torch.equal(shown.reconstructed[~hidden], shown.original[~hidden])
    assert torch.equal(model.reconstruct(image).masked, shown.masked)
    assert not torch.equal(model.reconstruct(image, seed=1).masked, shown.masked)
    weights, queries, _ = model.attention(image)
    assert weights.shape == (1, 2, 16, 16) and queries[:2] == ["1,1", "1,2"]
    assert model.embed([image.numpy(), image.numpy()]).shape == (2, 32)


# ViTs that start from it --------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_a_vit_takes_the_encoder_and_has_a_new_head(
    pool: str, pretrained: str, console: Console
) -> None:
    line = f"{VIT} --model.pretrained {pretrained} --model.net.pool {pool} --run_dir v"
    out, _ = console.printed(line)
    assert "the head is initialised anew" in out
    ours, theirs = encoder("v"), encoder("m", "best")
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, value in theirs.items():
        close(ours[name], value, atol=1e-5)
    assert "net.head.linear.weight" in checkpoint("v")["state_dict"]
    moments = [checkpoint(one)["tessera"]["metadata"]["mean"] for one in ("m", "v")]
    assert moments[0] == moments[1]


def test_positions_and_patches_are_resized(pretrained: str) -> None:
    write_images(Path("images"), side=24)
    sizes = "--model.net.image_size 24 --model.net.patch_size 4"
    line = f"{VIT} {IMAGES} --model.net.channels 1 {sizes} --model.pretrained {pretrained}"
    assert run(f"{line} --run_dir v") == 0
    state = checkpoint("v")["state_dict"]
    assert state["net.position.table"].shape == (6, 6, 32)
    assert state["net.embed.stem.conv.weight"].shape == (32, 1, 4, 4)
    # the same table, at the middle of the larger grid as of the smaller
    table = encoder("m", "best")["net.position.table"]
    close(state["net.position.table"].mean((0, 1)), table.mean((0, 1)), atol=5e-3)


def test_what_does_not_fit_is_refused(pretrained: str, console: Console) -> None:
    line = f"{VIT} --model.pretrained {pretrained}"
    console.refused(f"{line} --model.net.stack.width 64", "(64, 1, 2, 2)")
    console.refused(f"{line} --model.net.stack.depth 3", "blocks.1")
    console.refused(f"{line} --model.net.class_token true", "prefix.vectors")
    mae = f"{FIT} --model.pretrained {pretrained}"
    console.refused(f"{mae} --model.net.decoder.width 32", "decoder.", "32", task="mae")
    assert run(f"{VIT} --model.pretrained {pretrained} --run_dir v") == 0
    console.refused(f"{FIT} --model.pretrained v", "task 'vit'", "mae", task="mae")
    console.refused("test --ckpt_path m", "tasks.mae")


def test_it_goes_on_from_its_own_weights(pretrained: str) -> None:
    line = f"{FIT} {NO_UPDATES} --model.pretrained {pretrained}".replace("depth 2", "depth 1")
    assert run(f"{line} --run_dir r", "mae") == 0
    theirs = checkpoint("m", "best")["state_dict"]
    ours = checkpoint("r")["state_dict"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        close(ours[name], value, atol=1e-5)


@pytest.mark.slow
def test_few_labels_are_enough_after_pretraining(console: Console) -> None:
    """Of a tenth of the labels; the same network from random weights is far behind."""
    console.printed("fit --trainer.max_epochs 30 --run_dir m", "mae")
    line = "fit --data.label_fraction 0.1 --trainer.max_epochs 60 --model.pretrained m"
    line += " --trainer.check_val_every_n_epoch 20"
    for seed in (0, 1):
        accuracies = []
        for more in ("", "--model.pretrained null"):
            console.printed(f"{line} {more} --seed_everything {seed} --run_dir v{seed}{len(more)}")
            accuracies.append(summary(f"v{seed}{len(more)}")["test/acc"])
        assert accuracies[0] > accuracies[1] + 0.08, accuracies


# Other libraries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["ViTMAEForPreTraining", "ViTMAEModel"])
def test_weights_of_transformers(architecture: str, console: Console) -> None:
    model = their_model(architecture)
    model.save_pretrained("theirs")
    write_images(Path("images"), side=16)
    fit = f"fit {FEW_STEPS} {IMAGES} {NO_UPDATES} --model.pretrained theirs"
    out, _ = console.printed(f"{fit} --run_dir m", "mae")
    assert ("the decoder is initialised anew" in out) == (architecture == "ViTMAEModel")
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        theirs = getattr(model, "vit", model)
        theirs.config.mask_ratio = 0.0
        order = torch.arange(16).expand(2, -1) / 16  # all visible, in order
        expected = theirs(images, noise=order).last_hidden_state
        net = tessera.load("m").net
        close(net.tokens(images), expected, atol=1e-4)
        console.printed(f"{fit} --run_dir v")
        close(tessera.load("v").net.tokens(images), expected, atol=1e-4)


def test_export(console: Console) -> None:
    """The loss there is that of the test; a ViT starts from either format."""
    write_images(Path("images"), side=16)
    sizes = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2"
    sizes += " --model.net.decoder.width 16 --model.net.decoder.depth 1 --model.net.decoder.heads 2"
    line = f"fit --preset base {FEW_STEPS} {IMAGES} {sizes} --model.net.patch_size 4"
    console.printed(f"{line} --model.net.image_size 16 --run_dir m", "mae")
    out, _ = console.printed("export --ckpt_path m --output theirs", "mae")
    assert "ViTMAEForPreTraining.from_pretrained('theirs')" in out
    console.printed("export --ckpt_path m --format safetensors --output m.safetensors", "mae")
    model = transformers.ViTMAEForPreTraining.from_pretrained("theirs").eval()
    net = tessera.load("m").net
    images = torch.randn(2, 3, 16, 16)
    noise = torch.rand(2, 16)
    kept, masked = net.split(noise)
    with torch.no_grad():
        loss = net.loss(net(images, kept, masked), images, masked)
        torch.testing.assert_close(model(images, noise=noise).loss, loss)
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    ours, theirs = (tessera.load(name, kind=tessera.MaskedImageModel) for name in ("m", "theirs"))
    assert theirs.metadata.items() <= ours.metadata.items()
    for one, other in zip(ours.reconstruct(image), theirs.reconstruct(image), strict=True):
        close(one.float(), other.float(), atol=1)
    settings = json.loads(Path("theirs/preprocessor_config.json").read_text())
    metadata = checkpoint("m")["tessera"]["metadata"]
    assert settings["image_mean"] == metadata["mean"] and settings["image_std"] == metadata["std"]
    assert load_file("m.safetensors").keys() == net.state_dict().keys()
    for source in ("theirs", "m.safetensors"):
        line = f"fit {FEW_STEPS} {IMAGES} {NO_UPDATES} --model.pretrained {source}"
        console.printed(f"{line} --run_dir v/{source}")
        vit = tessera.load(f"v/{source}").net
        close(vit.tokens(images), net.tokens(images), atol=1e-4)
    for wrong, named in (
        ("safetensors --output x", "ends with .safetensors"),
        ("safetensors --output m.safetensors", "m.safetensors exists already"),
        ("hf --output x.onnx", "without .onnx"),
    ):
        console.refused(f"export --ckpt_path m --format {wrong}", named, task="mae")
    assert load_file("m.safetensors").keys() == net.state_dict().keys()


def test_an_encoder_alone_is_not_loaded() -> None:
    their_model("ViTMAEModel").save_pretrained("theirs")
    with pytest.raises(UsageError, match="nothing says mean and standard deviation"):
        tessera.load("theirs")
    Path("theirs/preprocessor_config.json").write_text("{}")
    with pytest.raises(UsageError, match="theirs: it has no decoder: train one"):
        tessera.load("theirs")


def test_models_that_transformers_lacks(pretrained: str, console: Console) -> None:
    line = f"export --ckpt_path {pretrained} --format hf --output x"
    console.refused(line, "Hugging Face has no such model", "safetensors", task="mae")


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, named",
    [
        ("--model.net.mask_ratio 0", "mask_ratio"),
        ("--model.net.mask_ratio 1", "mask_ratio"),
        ("--model.net.mask_ratio 0.95", "0 of 16 patches"),
        ("--model.net.patch_size 8", "0 of 1 patches"),
        ("--model.net.patch_size 3", "patch_size 3"),
        ("--model.augment.mixup 0.2", "mixup"),
        ("--model.net.stack.order mixer", "mixer"),
    ],
)
def test_bad_options(options: str, named: str, console: Console) -> None:
    console.refused(f"{FIT} {options} --run_dir r", named, task="mae")


def test_pictures_of_one_colour() -> None:
    for number in range(12):
        path = Path(f"images/train/class{number % 2}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (200, 10, 10)).save(path)
    line = f"{FIT.replace('--data.batch_size 16', '')} {IMAGES} --model.net.image_size 8"
    assert run(f"{line} --model.net.patch_size 2 --run_dir r", "mae") == 0
    assert all(value == value for value in logged("r"))


def test_classes_of_the_images_do_not_matter(pretrained: str, console: Console) -> None:
    write_images(Path("images"), count=6, side=9)
    line = f"test --ckpt_path {pretrained} --data.path images --data.source folder"
    console.printed(f"{line} --output t", "mae")
    assert json.loads(Path("t/test.json").read_text())["test/loss"] > 0


@pytest.mark.parametrize("options", [
    "--model.net.pool cls --model.net.distillation_token true", "--model.net.norm_after_pool true"
], ids=("distillation token", "norm after pooling"))  # fmt: skip
def test_parts_that_pretraining_does_not_learn_are_new(options: str, console: Console) -> None:
    assert run(f"{FIT} {options} --run_dir p", "mae") == 0
    assert run(f"{VIT} --model.pretrained p --run_dir v", "vit") == 0
    console.printed("probe --ckpt_path p", "vit")
    assert Path("p/probe.json").is_file()
