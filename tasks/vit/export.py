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
    write_huggingface,
    write_safetensors,
)
from tasks.checkpoints.onnx_graph import write_graph
from tasks.checkpoints.reading import (
    KEY,
    read_checkpoint,
)
from tasks.errors import UsageError
from tasks.vit.networks import load_image_net

Format = Literal["timm", "hf", "onnx", "safetensors"]
MAX_BYTES = 1536 * 2**20  # torch writes the weights of larger graphs into a second file
Converted = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and weights


def export(ckpt_path: str, format: Format, output: str | None = None) -> None:
    """Write a checkpoint's weights for timm, transformers, ONNX Runtime or readers of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: timm: a folder with weights and config.json, class names, mean and standard
            deviation in it; hf: a folder with weights, config and preprocessing for
            `AutoModelForImageClassification.from_pretrained`, as ViT, DeiT or Swin; onnx: a graph
            from pixels in [0, 1] to logits, of any batch size, with class names and the
            preprocessing of pictures in its metadata; safetensors: a file with our own names,
            config and class names in the header.
        output: Folder to write, for timm and hf, or a file whose name ends with the format, such as
            model.onnx; null: beside the checkpoint.
    """
    is_file = format in ("onnx", "safetensors")
    target = export_target(ckpt_path, format, output, is_file)
    checkpoint = read_checkpoint(ckpt_path, "vit")
    net = load_image_net(checkpoint)
    metadata = with_numbers_in_units(net, checkpoint[KEY]["metadata"])
    metadata = metadata | resizing(metadata)
    new = new_file if is_file else new_folder
    with new(target) as path:
        hint = WRITERS[format](net, metadata, path)
    print(f"wrote {target}\n{hint.format(file=target)}")


def write_timm(net: ImageNet, metadata: dict[str, Any], folder: Path) -> str:
    """Writes weights under timm's names and `config.json`; returns the code that loads them."""
    try:
        settings, state = to_timm(net, metadata)
    except ValueError as error:
        reason = str(error).rstrip(".")
        formats = other_formats("hf", net, metadata)
        raise UsageError(
            f"timm has no such model ({reason}): use --format {formats}, or train with one of the "
            f"presets that timm has, {', '.join(presets_of_timm())}"
        ) from error
    save_weights(state, folder / "model.safetensors")
    write_text(folder / "config.json", json.dumps(settings, indent=2))
    return "timm.create_model('local-dir:{file}', pretrained=True)"


def write_hf(net: ImageNet, metadata: dict[str, Any], folder: Path) -> str:
    """Writes weights, `config.json` and preprocessing of transformers' ViT, DeiT or Swin.

    Returns the code that loads them.
    """
    from tasks.vit.pretrained import PREPROCESSOR, preprocessor  # imports Lightning

    convert = partial(to_hf, metadata=metadata)
    hint = write_huggingface(net, folder, convert, partial(other_formats, "timm", net, metadata))
    write_text(folder / PREPROCESSOR, json.dumps(preprocessor(metadata), indent=2))
    return hint


def to_timm(net: ImageNet, metadata: dict[str, Any]) -> Converted:
    """Returns config.json and weights of timm; `ValueError` if it has no such model."""
    theirs = conversion(net.config)
    settings = theirs.settings(net.config, metadata)
    return settings, theirs.family.weights_to_external(net.state_dict(), net.config)


def to_hf(net: ImageNet, metadata: dict[str, Any]) -> Converted:
    """Returns config.json and weights of transformers; `ValueError` if it has no such model."""
    family: Any = conversion(net.config).transformers(net.config)
    names = metadata["class_names"]
    labels = {
        "problem_type": metadata["problem_type"],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    settings = family.config_to_external(net.config) | labels
    return settings, family.weights_to_external(net.state_dict(), net.config)


def other_formats(library: str, net: ImageNet, metadata: dict[str, Any]) -> str:
    """Returns the other formats of a network, with that of the library if it has such a model."""
    with suppress(ValueError):
        LIBRARIES[library](net, metadata)
        return f"{library}, onnx or safetensors"
    return "onnx or safetensors"


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

    def __init__(self, net: Any, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.net = net
        self.mean = metadata["mean"]
        self.std = metadata["std"]

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, K) of pixels (B, C, H, W) in [0, 1]."""
        return self.net(self.normalise(images))

    def normalise(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] to those of training: (B, C, H, W) -> (B, C, H, W)."""
        return normalise(images * 255, self.mean, self.std)


def write_onnx(net: ImageNet, metadata: dict[str, Any], path: Path) -> str:
    """Writes a graph from "images", float32 (B, C, H, W) in [0, 1], to "logits" (B, K)."""
    return write_image_graph(FromPixels(net, metadata), metadata, path)


def write_image_graph(
    graph: FromPixels, metadata: dict[str, Any], path: Path, output: str = "logits"
) -> str:
    """Writes a graph from "images"; returns the code that runs it.

    Raises `UsageError` if the weights are too large for one file.
    """
    size = sum(tensor.nbytes for tensor in (*graph.parameters(), *graph.buffers()))
    if size > MAX_BYTES:
        raise UsageError(
            f"the network has {size / 2**30:.1f} GiB of weights, and torch writes at most 1.5 GiB "
            "into one ONNX file: use --format safetensors"
        )
    config = graph.net.config
    example = torch.rand(2, graph.net.embed.shape[0], config.image_size, config.image_size)
    metadata = metadata | {"preprocessing": preprocessing(config, metadata)}
    axes = {"images": {0: "batch"}}
    write_graph(graph.eval(), {"images": example}, axes, metadata, path, output)
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


LIBRARIES: dict[str, Callable[[ImageNet, dict[str, Any]], Converted]] = {
    "timm": to_timm,
    "hf": to_hf,
}
WRITERS: dict[str, Callable[[ImageNet, dict[str, Any], Path], str]] = {
    "timm": write_timm,
    "hf": write_hf,
    "onnx": write_onnx,
    "safetensors": partial(write_safetensors, "vit"),
}
