"""`export` of `python -m tasks.mae`: a checkpoint's weights for other programs."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from datamodules.utils.files import write_text
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.pretrained.mae import MAE
from tasks.checkpoints.exporting import (
    new_file,
    new_folder,
    write_huggingface,
    write_safetensors,
)
from tasks.checkpoints.reading import KEY, best_checkpoint, load_network, read_checkpoint
from tasks.errors import UsageError
from tasks.vit.pretrained import PREPROCESSOR, preprocessor

Format = Literal["hf", "safetensors"]


def export(ckpt_path: str, format: Format = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, config and normalisation for
            `ViTMAEForPreTraining.from_pretrained`; safetensors: a file with our own names, config
            and the data's metadata in the header, which `tasks.vit fit --model.pretrained` takes.
        output: Folder or file to write; null: beside the checkpoint.
    """
    ckpt_path = best_checkpoint(ckpt_path)
    checkpoint = read_checkpoint(ckpt_path, "mae")
    net = load_network(checkpoint, MAEConfig, MaskedAutoencoder)
    metadata = checkpoint[KEY]["metadata"]
    target = Path(output) if output else Path(ckpt_path).with_suffix(f".{format}")
    if format == "safetensors":
        if target.suffix != ".safetensors":
            raise UsageError(
                f"--output {output} must end with .safetensors: readers check the suffix"
            )
        with new_file(target) as partial:
            hint = write_safetensors("mae", net, metadata, partial)
    else:
        with new_folder(target) as partial:
            hint = write_huggingface(net, partial, to_huggingface, lambda: "safetensors")
            write_text(partial / PREPROCESSOR, json.dumps(preprocessor(metadata), indent=2))
    print(f"wrote {target}\n{hint.format(file=target)}")


def to_huggingface(net: MaskedAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns `config.json` and weights of transformers' ViTMAE."""
    settings = MAE.config_to_external(net.config)
    return settings, MAE.weights_to_external(net.state_dict(), net.config)
