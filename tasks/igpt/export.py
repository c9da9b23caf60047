"""`python -m tasks.igpt export`: a checkpoint's weights for other programs."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.utils.files import write_text
from modules.pretrained.decoder import IMAGEGPT
from tasks.checkpoints.exporting import (
    NextTokenGraph,
    TextFormat,
    export_model,
    text_target,
    write_text_graph,
)
from tasks.igpt.architectures import PREPROCESSOR, load_model, palette_json


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        format: hf: a folder with weights, config and palette for `from_pretrained`; onnx: a folder
            with a graph from `input_ids`, the start token and pixels of any number of images, to
            `logits` of the pixel that follows each, and the palette; safetensors: a file with our
            own names, config and the data's metadata in the header.
        output: Folder to write, or for safetensors a file, such as model.safetensors; null: beside
            the checkpoint.
    """
    target = text_target(ckpt_path, format, output)
    model = load_model(ckpt_path)

    def convert(net: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state = IMAGEGPT.weights_to_external(net.state_dict(), net.config)
        return IMAGEGPT.config_to_external(net.config), state

    def write_palette(metadata: dict[str, Any], folder: Path) -> None:
        write_text(folder / PREPROCESSOR, palette_json(metadata))

    metadata = dict(model.metadata)
    write_onnx = partial(write_text_graph, NextTokenGraph(model.net), metadata)
    export_model("igpt", model.net, metadata, target, format, convert, write_onnx, write_palette)
