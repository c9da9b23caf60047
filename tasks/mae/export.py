"""`export` of `python -m tasks.mae`: a checkpoint's weights for other programs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.utils.files import write_text
from datamodules.vision.decoding import resizing
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.pretrained.mae import MAE
from tasks.checkpoints.exporting import TextFormat, export_model, export_target
from tasks.checkpoints.reading import KEY, load_network, read_checkpoint
from tasks.vit.export import FromPixels, write_image_graph
from tasks.vit.pretrained import PREPROCESSOR, preprocessor


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, config and normalisation for
            `ViTMAEForPreTraining.from_pretrained`; onnx: a graph from pixels in [0, 1] to
            `last_hidden_state`, the encoder's vectors of class and register tokens, if there are
            any, and of all patches, none masked; safetensors: a file with our own names, config and
            the data's metadata in the header, which `tasks.vit fit --model.pretrained` takes.
        output: Folder or file to write; null: beside the checkpoint.
    """
    target = export_target(ckpt_path, format, output, is_file=format != "hf")
    checkpoint = read_checkpoint(ckpt_path, "mae")
    net = load_network(checkpoint, MAEConfig, MaskedAutoencoder)

    def write_preprocessor(metadata: dict[str, Any], folder: Path) -> None:
        write_text(folder / PREPROCESSOR, json.dumps(preprocessor(metadata), indent=2))

    metadata = checkpoint[KEY]["metadata"]
    metadata = metadata | resizing(metadata)
    write_onnx = partial(write_features_graph, net, metadata)
    export_model(
        "mae", net, metadata, target, format, to_huggingface, write_onnx, write_preprocessor
    )


class Features(FromPixels):
    """The encoder of a masked autoencoder, with the normalisation of its data in front."""

    def forward(self, images: Tensor) -> Tensor:
        """Returns vectors (B, P + N, E) of pixels (B, C, H, W) in [0, 1]."""
        return self.net.tokens(self.normalise(images))


def write_features_graph(net: MaskedAutoencoder, metadata: dict[str, Any], path: Path) -> str:
    """Writes a graph from "images" to "last_hidden_state"; returns the code that runs it."""
    return write_image_graph(Features(net, metadata), metadata, path, "last_hidden_state")


def to_huggingface(net: MaskedAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns `config.json` and weights of transformers' ViTMAE."""
    settings = MAE.config_to_external(net.config)
    return settings, MAE.weights_to_external(net.state_dict(), net.config)
