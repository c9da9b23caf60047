"""`export` of `python -m tasks.mae`: a checkpoint's weights for other programs."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.utils.files import write_text
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.pretrained.mae import MAE
from tasks.checkpoints.exporting import TextFormat, export_text_model, text_target
from tasks.checkpoints.reading import KEY, load_network, read_checkpoint
from tasks.vit.pretrained import PREPROCESSOR, preprocessor


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, config and normalisation for
            `ViTMAEForPreTraining.from_pretrained`; safetensors: a file with our own names, config
            and the data's metadata in the header, which `tasks.vit fit --model.pretrained` takes.
        output: Folder or file to write; null: beside the checkpoint.
    """
    target = text_target(ckpt_path, format, output)
    checkpoint = read_checkpoint(ckpt_path, "mae")
    net = load_network(checkpoint, MAEConfig, MaskedAutoencoder)

    def write_preprocessor(metadata: dict[str, Any], folder: Path) -> None:
        write_text(folder / PREPROCESSOR, json.dumps(preprocessor(metadata), indent=2))

    metadata = checkpoint[KEY]["metadata"]
    export_text_model("mae", net, metadata, target, format, to_huggingface, write_preprocessor)


def to_huggingface(net: MaskedAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns `config.json` and weights of transformers' ViTMAE."""
    settings = MAE.config_to_external(net.config)
    return settings, MAE.weights_to_external(net.state_dict(), net.config)
