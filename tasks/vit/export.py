"""`python -m tasks.vit export`: a checkpoint's weights for other programs."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from datamodules.utils.files import write_text
from datamodules.vision.augment import normalise
from datamodules.vision.decoding import resizing
from modules.models.images import IMAGE_PRESETS, ImageConfig, ImageNet
from modules.pretrained.images import conversion
from tasks.checkpoints.exporting import (
    export_target,
    new_file,
    new_folder,
    save_weights,
    with_numbers_in_units,
    write_safetensors,
)
from tasks.checkpoints.onnx_graph import write_graph
from tasks.checkpoints.reading import (
    KEY,
    read_checkpoint,
)
from tasks.errors import UsageError
from tasks.vit.networks import load_image_net

Format = Literal["timm", "onnx", "safetensors"]


def export(ckpt_path: str, format: Format, output: str | None = None) -> None:
    """Write a checkpoint's weights for timm, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: timm: a folder with weights and config.json, class names, mean and standard
            deviation in it; onnx: a graph from pixels in [0, 1] to logits, of any batch size, with
            class names and the preprocessing of pictures in its metadata; safetensors: a file with
            our own names, config and class names in the header.
        output: Folder to write, for timm, or a file whose name ends with the format, such as
            model.onnx; null: beside the checkpoint.
    """
    target = export_target(ckpt_path, format, output, is_file=format != "timm")
    checkpoint = read_checkpoint(ckpt_path, "vit")
    net = load_image_net(checkpoint)
    metadata = with_numbers_in_units(net, checkpoint[KEY]["metadata"])
    metadata = metadata | resizing(metadata)
    new = new_folder if format == "timm" else new_file
    with new(target) as path:
        hint = WRITERS[format](net, metadata, path)
    print(f"wrote {target}\n{hint.format(file=target)}")


def write_timm(net: ImageNet, metadata: dict[str, Any], folder: Path) -> str:
    """Writes weights under timm's names and `config.json`; returns the code that loads them."""
    try:
        theirs = conversion(net.config)
        settings = theirs.settings(net.config, metadata)
        state = theirs.family.weights_to_external(net.state_dict(), net.config)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise UsageError(
            f"timm has no such model ({reason}): use --format onnx or safetensors, or train with "
            f"one of the presets that timm has, {', '.join(presets_of_timm())}"
        ) from error
    save_weights(state, folder / "model.safetensors")
    write_text(folder / "config.json", json.dumps(settings, indent=2))
    return "timm.create_model('local-dir:{file}', pretrained=True)"


def presets_of_timm() -> list[str]:
    """Returns the presets whose networks timm has."""
    found = []
    for name, config in IMAGE_PRESETS.items():
        with suppress(ValueError):
            conversion(config).arguments(config)
            found.append(name)
    return found


class FromPixels(nn.Module):
    """A network with the normalisation of its data in front."""

    def __init__(self, net: ImageNet, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.net = net
        self.mean = metadata["mean"]
        self.std = metadata["std"]

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, K) of pixels (B, C, H, W) in [0, 1]."""
        return self.net(normalise(images * 255, self.mean, self.std))


def write_onnx(net: ImageNet, metadata: dict[str, Any], path: Path) -> str:
    """Writes a graph from "images", float32 (B, C, H, W) in [0, 1], to "logits" (B, K)."""
    example = torch.rand(2, net.embed.shape[0], net.config.image_size, net.config.image_size)
    graph = FromPixels(net, metadata).eval()
    metadata = metadata | {"preprocessing": preprocessing(net.config, metadata)}
    write_graph(graph, {"images": example}, {0: "batch"}, metadata, path)
    return (
        "run it with onnxruntime.InferenceSession('{file}').run(None, {{'images': pixels_in_0_1}})"
        "\nits get_modelmeta().custom_metadata_map['preprocessing'] says how to prepare a picture"
    )


def preprocessing(config: ImageConfig, metadata: dict[str, Any]) -> dict[str, Any]:
    """What `predict` does to a picture, as a graph's metadata tell it; in timm's words.

    Convert it to `mode` (of Pillow), resize its shorter side to floor(size of the input /
    `crop_pct`), crop the centre, and multiply by `scale`. The graph itself normalises by `mean` and
    `std`.
    """
    return {
        "mode": "L" if config.channels == 1 else "RGB",
        "input_size": [config.channels, config.image_size, config.image_size],
        "interpolation": metadata["interpolation"],  # antialiased, as Pillow's
        "crop_pct": metadata["crop_pct"],
        "crop_mode": "center",
        "scale": 1 / 255,
        "normalized_by_graph": True,
        "mean": metadata["mean"],
        "std": metadata["std"],
    }


WRITERS: dict[str, Callable[[ImageNet, dict[str, Any], Path], str]] = {
    "timm": write_timm,
    "onnx": write_onnx,
    "safetensors": partial(write_safetensors, "vit"),
}
