"""Which decoder to build for pixels: sizes that fit the data, and pretrained weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from datamodules.pixels import is_same_palette
from datamodules.utils.files import read_object
from datamodules.vision.palette import Palette, read_palette
from modules.config import require
from modules.models.gpt import Decoder, DecoderConfig
from modules.pretrained.decoder import IMAGE_FAMILIES
from tasks.checkpoints.pretrained import (
    CKPT_PATH,
    ModelFolder,
    file_with,
    find_checkpoint,
    read_task_checkpoint,
    without_dropout,
)
from tasks.checkpoints.reading import KEY, Checkpoint, load_network, net_weights, read_checkpoint
from tasks.checkpoints.weights import PRETRAINED, load_pretrained_weights
from tasks.errors import UsageError, usage_errors
from tasks.options import Options

TASKS = ("igpt",)  # whose checkpoints hold a decoder of pixels
PREPROCESSOR = "preprocessor_config.json"
CHANNELS = "channels"  # entry of it, for 1 in an export of a model of grey images


class PixelModel(NamedTuple):
    """A language model of pixels, with the palette of its tokens."""

    net: Decoder
    metadata: Mapping[str, Any]

    @property
    def palette(self) -> Palette:
        return Palette(torch.tensor(self.metadata["palette"]))

    @property
    def size(self) -> int:
        """Side of its images, in pixels."""
        return int(self.metadata["image_size"])

    @property
    def start(self) -> int:
        """The token that begins an image: the one after those of the palette."""
        return len(self.metadata["palette"])

    def inputs(self, tokens: Tensor) -> Tensor:
        """What the network reads to predict tokens (B, N): the start token, then all but the last.

        Returns (B, N).
        """
        start = torch.full_like(tokens[:, :1], self.start)  # (B, 1)
        return torch.cat([start, tokens[:, :-1]], 1)


def fit_to_data(config: DecoderConfig, metadata: Mapping[str, Any]) -> DecoderConfig:
    """Returns a config for the palette and the image size of the data.

    Raises `UsageError` if it is for others.
    """
    colours = len(metadata["palette"])
    side = metadata["image_size"]
    if config.vocabulary not in (None, colours + 1):
        raise UsageError(
            f"the palette has {colours} colours and the network {config.vocabulary - 1}: use the "
            "palette that the network was trained with, or leave --model.net.vocabulary out"
        )
    if config.max_length not in (None, side**2):
        raise UsageError(
            f"images of {side} x {side} pixels are {side**2} tokens, but the network is for "
            f"{config.max_length}: set --data.image_size {math.isqrt(config.max_length)}, or leave "
            "--model.net.max_length out"
        )
    outputs = None if config.tied else colours
    return replace(config, vocabulary=colours + 1, output_vocabulary=outputs, max_length=side**2)


def pretrained_options(source: str) -> Options:
    """Returns network, palette and image size of `--model.pretrained SOURCE` as options."""
    if source.endswith(".ckpt"):
        saved = read_task_checkpoint(source, TASKS)[KEY]
        net = without_dropout(saved["net"])
        palette = str(palette_file(source, saved["metadata"]))
        side = saved["metadata"]["image_size"]
        channels = saved["metadata"]["channels"]
    else:
        folder = ModelFolder(source, IMAGE_FAMILIES)
        net = asdict(folder.config)
        palette = str(folder.path / PREPROCESSOR)
        side = math.isqrt(folder.config.max_length or 0)
        channels = channels_of(folder)
    data = {"palette": palette, "image_size": side, "dataset": {"channels": channels}}
    return {"model": {"net": net}, "data": data}


def channels_of(folder: ModelFolder) -> int:
    """Returns the channels of the images that a model reads: 3 but for an export of a grey one."""
    try:
        channels = read_object(folder.path / PREPROCESSOR).get(CHANNELS, 3)
    except (OSError, ValueError):  # reported with the palette
        return 3
    return 1 if channels == 1 else 3


def palette_file(source: str, metadata: Mapping[str, Any]) -> Path:
    """Returns a file with the palette of a checkpoint: in its run folder, or in the cache."""
    return file_with(palette_json(metadata), source, "palette")


def palette_json(metadata: Mapping[str, Any]) -> str:
    """Returns the palette as in `preprocessor_config.json` of transformers' ImageGPT."""
    side = metadata["image_size"]
    settings = {
        "image_processor_type": "ImageGPTImageProcessor",
        "do_resize": True,
        "size": {"height": side, "width": side},
        "do_normalize": True,
        "do_color_quantize": True,
        CHANNELS: metadata["channels"],  # which transformers does not read
        "clusters": Palette(torch.tensor(metadata["palette"])).to_clusters(),
    }
    return json.dumps(settings)


def load_pretrained(config: DecoderConfig, source: str, metadata: Mapping[str, Any]) -> Decoder:
    """Builds a decoder for the data with pretrained weights.

    Raises `UsageError` if these are for another size or palette.
    """
    if source.endswith(".ckpt"):
        checkpoint = read_task_checkpoint(source, TASKS)
        colours = checkpoint[KEY]["metadata"]["palette"]
        state = net_weights(checkpoint)
    else:
        folder = ModelFolder(source, IMAGE_FAMILIES)
        path = str(folder.path / PREPROCESSOR)
        colours = read_palette(path, channels_of(folder), PRETRAINED).to_list()
        state = folder.weights()
    if not is_same_palette(metadata["palette"], colours):
        raise UsageError(
            f"the palette of the data ({len(metadata['palette'])} colours) is not that of {source} "
            f"({len(colours)} colours): leave --data.palette out, it comes with the weights"
        )
    net = Decoder(fit_to_data(config, metadata))
    load_pretrained_weights(net, source, state)
    return net


def load_model(source: str) -> PixelModel:
    """Loads a model: a checkpoint of `fit`, `hf/<model>` of the hub, or a local folder."""
    source = find_checkpoint(source)
    if source.startswith("hf/") or Path(source).is_dir():
        return load_folder(ModelFolder(source, IMAGE_FAMILIES, CKPT_PATH))
    return from_checkpoint(read_checkpoint(source, "igpt"))


def from_checkpoint(checkpoint: Checkpoint) -> PixelModel:
    """Returns the model of a checkpoint of `fit`."""
    net = load_network(checkpoint, DecoderConfig, Decoder)
    return PixelModel(net, checkpoint[KEY]["metadata"])


def load_folder(folder: ModelFolder) -> PixelModel:
    """Loads a model of Hugging Face."""
    channels = channels_of(folder)
    palette = read_palette(str(folder.path / PREPROCESSOR), channels, folder.option)
    metadata = {
        "palette": palette.to_list(),
        "channels": channels,
        "image_size": math.isqrt(folder.config.max_length or 0),
    }
    with usage_errors(f"{folder.option} {folder.source}"):
        colours = len(palette.to_list())
        require(
            folder.config.vocabulary == colours + 1,
            f"{PREPROCESSOR} has {colours} clusters, but the network has "
            f"{folder.config.vocabulary} tokens, one of which is no colour: take both files from "
            "one model",
        )
        net = Decoder(fit_to_data(folder.config, metadata))
    load_pretrained_weights(net, folder.source, folder.weights())
    return PixelModel(net.eval(), metadata)
