"""Pictures are resized and cropped as the library of pretrained weights does, and in our runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from transformers import AutoImageProcessor

from datamodules.images import ImageData, LoadingOptions
from datamodules.sources import DatasetOptions
from datamodules.utils.errors import UsageError
from tasks.vit.architectures import find_described
from tasks.vit.frozen import image_data
from tests.helpers.command import Console
from tests.helpers.images import save_image
from tests.helpers.model_folders import vit_folder
from tests.helpers.results import checkpoint, table
from tests.parity.vit import timm_model

CLASSES = ("cat", "dog")
SIDE = 32
SIZES: dict[str, Any] = {"img_size": SIDE, "patch_size": 8, "depth": 2, "num_classes": 2}
BICUBIC = {"interpolation": "bicubic", "crop_pct": 0.9}
DEFAULTS = {"interpolation": "bilinear", "crop_pct": 1.0}
FIT = (
    "fit --data.source folder --data.path images --trainer.max_epochs 1 --data.batch_size 4 "
    "--model.optimizer.lr 1e-30"
)
Transform = Callable[[Image.Image], Tensor]


@pytest.fixture
def images() -> Path:
    """A folder of pictures of several shapes, one of them of the size of the network."""
    for split in ("train", "val"):
        for name in CLASSES:
            for seed, size in enumerate([(60, 45), (45, 70), (SIDE, SIDE)]):
                save_image(Path("images", split, name, f"{seed}.png"), seed, size)
    return Path("images")


@pytest.fixture
def theirs() -> tuple[Any, Transform]:
    """timm's model and transform of the folder `theirs`, which timm's own function wrote."""
    model = timm_model("vit_tiny_patch16_224", **SIZES)
    more = {"label_names": CLASSES}
    timm.models.save_for_hf(model, "theirs", more, SIZES, safe_serialization=True)
    path = Path("theirs/config.json")
    settings = json.loads(path.read_text())
    settings["pretrained_cfg"] |= {"input_size": [3, SIDE, SIDE]}
    assert BICUBIC.items() <= settings["pretrained_cfg"].items()
    path.write_text(json.dumps(settings))
    return model, create_transform(**resolve_data_config(settings["pretrained_cfg"], model=model))


def resizing(model: Any) -> dict[str, Any]:
    return {name: model.metadata[name] for name in DEFAULTS}


@torch.no_grad()
def assert_same_logits(source: str, images: Path, model: Any, transform: Transform) -> None:
    ours = tessera.load(source, kind=tessera.ImageClassifier)
    for path in images.glob("val/cat/*.png"):
        expected = model(transform(Image.open(path))[None])[0]  # (K,)
        torch.testing.assert_close(ours.logits(path), expected, atol=1e-4, rtol=0)


def test_logits_are_those_of_timm(images: Path, theirs: tuple[Any, Transform]) -> None:
    model, transform = theirs
    assert_same_logits("theirs", images, *theirs)
    pixels = transform(Image.open(images / "val/cat/0.png"))[None]
    other = create_transform((3, SIDE, SIDE), crop_pct=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    others = other(Image.open(images / "val/cat/0.png"))[None]
    with torch.no_grad():
        assert (model(pixels) - model(others)).abs().max() > 1e-2  # the crop matters


def test_a_run_keeps_what_comes_with_the_weights(
    images: Path, theirs: tuple[Any, Transform], console: Console
) -> None:
    console.printed(f"{FIT} --model.pretrained theirs --run_dir r")
    saved = checkpoint("r", "best")["tessera"]
    assert BICUBIC.items() <= saved["metadata"].items()
    assert BICUBIC.items() <= saved["config"]["data"]["dataset"].items()
    assert_same_logits("r", images, *theirs)
    console.printed("predict --ckpt_path r --input images/val/cat --output p.csv")
    model, transform = theirs
    for row in table("p.csv"):
        with torch.no_grad():
            expected = model(transform(Image.open(row["path"]))[None])[0].softmax(-1)  # (K,)
        found = torch.tensor([float(row[name]) for name in CLASSES])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    console.printed("export --ckpt_path r --format timm --output out")
    assert_same_logits("out", images, *theirs)
    back = timm.create_model("local-dir:out", pretrained=True).eval()
    assert BICUBIC.items() <= resolve_data_config({}, model=back).items()
    console.printed("export --ckpt_path r --format safetensors --output out.safetensors")
    assert_same_logits("out.safetensors", images, *theirs)
    console.refused("test --ckpt_path r --data.dataset.crop_pct 0.8", "crop_pct")
    console.printed(f"{FIT} --model.pretrained r --data.dataset.crop_pct 0.8 --run_dir s")
    assert resizing(tessera.load("s")) == {"interpolation": "bicubic", "crop_pct": 0.8}


def test_an_older_checkpoint_means_the_defaults(images: Path, console: Console) -> None:
    net = f"--model.net.image_size {SIDE} --model.net.patch_size 8 --model.net.stack.width 32"
    console.printed(f"{FIT} {net} --model.net.stack.heads 2 --run_dir r")
    new = checkpoint("r", "best")
    assert DEFAULTS.items() <= new["tessera"]["metadata"].items()
    for name in DEFAULTS:
        del new["tessera"]["metadata"][name]
        del new["tessera"]["config"]["data"]["dataset"][name]
    torch.save(new, "old.ckpt")
    image = images / "val/cat/0.png"
    old = tessera.load("old.ckpt", kind=tessera.ImageClassifier)
    expected = tessera.load("r", kind=tessera.ImageClassifier).logits(image)
    torch.testing.assert_close(old.logits(image), expected)
    console.printed("test --ckpt_path old.ckpt")
    console.refused("test --ckpt_path old.ckpt --data.dataset.interpolation bicubic", "bicubic")
    console.printed("export --ckpt_path old.ckpt --format onnx --output old.onnx")
    console.printed(f"{FIT} --model.pretrained old.ckpt --run_dir s")
    assert resizing(tessera.load("s")) == DEFAULTS


@pytest.mark.parametrize("limit", [4096, 0])
def test_training_images_are_not_cropped(limit: int, images: Path) -> None:
    options = DatasetOptions(interpolation="bicubic", crop_pct=0.5)
    loading = LoadingOptions(memory_limit_mb=limit, num_workers=0)
    data = ImageData(path=str(images), image_size=SIDE, dataset=options, loading=loading)
    whole = Image.open(images / "val/cat/2.png")  # SIDE x SIDE
    middle = whole.resize((2 * SIDE, 2 * SIDE), Image.Resampling.BICUBIC)
    middle = middle.crop((SIDE // 2, SIDE // 2, SIDE * 3 // 2, SIDE * 3 // 2))
    for split, expected in (("train", whole), ("val", middle)):
        found = data.dataset(split)[[2]]["image"][0]  # (C, H, W)
        assert torch.equal(found, pil_to_tensor(expected))


def test_frozen_networks_see_training_images_as_in_evaluation(
    images: Path, theirs: tuple[Any, Transform]
) -> None:
    model = find_described("theirs", "--ckpt_path")
    data = image_data(model.named, model.image_metadata(), {}, {"path": str(images)})
    data.setup("fit")
    train, val = (data.dataset(split)[[0, 1, 2]]["image"] for split in ("train", "val"))
    assert torch.equal(train, val)  # the same pictures
    expected = theirs[1](Image.open(images / "train/cat/0.png"))
    torch.testing.assert_close((train[0] / 255 - 0.5) / 0.5, expected)


@pytest.mark.parametrize("value", ["0", "1.01", "nan"])
def test_a_crop_out_of_range_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="crop_pct"):
        ImageData(dataset=DatasetOptions(crop_pct=float(value)))


@pytest.mark.parametrize("settings, expected", [
    ({"resample": 2}, DEFAULTS),
    ({"resample": 3}, {"interpolation": "bicubic", "crop_pct": 1.0}),
    ({"resample": 3, "crop_pct": 0.875}, {"interpolation": "bicubic", "crop_pct": 0.875}),
    ({"resample": 3, "size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": SIDE},
     {"interpolation": "bicubic", "crop_pct": 0.8}),
    ({"size": 40, "do_center_crop": False, "crop_size": SIDE}, DEFAULTS),
])  # fmt: skip
def test_folders_of_hugging_face(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    vit_folder(Path("theirs"))
    path = Path("theirs/preprocessor_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert resizing(tessera.load("theirs")) == expected


def test_an_export_to_hugging_face_prepares_pictures_as_here(
    images: Path, console: Console
) -> None:
    net = f"--model.net.image_size {SIDE} --model.net.patch_size 8"
    data = "--data.dataset.interpolation bicubic --data.dataset.crop_pct 0.8"
    line = f"{FIT} {net} {data} --model.net.stack.width 32 --model.net.stack.heads 2 --run_dir r"
    console.printed(line, "mae")
    console.printed("export --ckpt_path r --output out", "mae")
    processor = AutoImageProcessor.from_pretrained("out")
    ours = [tessera.load(name, kind=tessera.MaskedImageModel) for name in ("r", "out")]
    for path in images.glob("val/cat/*.png"):
        image = Image.open(path)
        found = processor(image, do_normalize=False, do_rescale=False, return_tensors="pt")
        one, other = (model.pixels(path) for model in ours)  # (C, S, S)
        assert torch.equal(one, other)
        assert (found["pixel_values"][0].int() - one.int()).abs().max() <= 2  # as torch resizes
