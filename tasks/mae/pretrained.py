"""Pretrained masked autoencoders: of Hugging Face, and our own."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_only

from modules.config import require
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.position import resize_grid
from modules.pretrained.mae import FAMILIES, TABLE
from modules.pretrained.vit import POSITION_TABLE, fitting_patches
from modules.pretrained.weights import load_weights
from tasks.checkpoints.pretrained import model_folder
from tasks.checkpoints.reading import best_checkpoint
from tasks.checkpoints.weights import PRETRAINED, State, load_pretrained_weights
from tasks.options import Options
from tasks.vit.architectures import require_described
from tasks.vit.pretrained import DECODER, HuggingFaceModel, RunCheckpoint
from tasks.vit.pretrained_base import Pretrained


def find_model(source: str) -> Pretrained:
    """Returns the pretrained model that `source` names.

    Args:
        source: `hf/<model>` of the hub, a folder of Hugging Face's layout, or a checkpoint or run
            folder.

    Raises:
        UsageError: There is no such model, or it is not supported.
        DataError: It cannot be downloaded, or is damaged.
    """
    if best_checkpoint(source).endswith(".ckpt"):
        return OwnAutoencoder(source, PRETRAINED)
    return HuggingFaceAutoencoder(source, PRETRAINED, model_folder(source))


def pretrained_options(source: str) -> Options:
    """Returns the network and, if known, the preprocessing of `--model.pretrained SOURCE`."""
    model = find_model(source)
    data = {"dataset": model.preprocessing} if model.normalisation else {}
    return {"model": {"net": asdict(model.config())}, "data": data}


def load_pretrained(net: MaskedAutoencoder, source: str) -> None:
    """Loads weights into `net`, positions resized; says if the decoder is initialised anew.

    Raises:
        UsageError: The weights do not fit the network.
        DataError: They cannot be downloaded.
    """
    model = find_model(source)
    weights = model.weights(net.config)
    if load_pretrained_weights(net, source, weights, model.new_parts):
        rank_zero_only(print)(f"{PRETRAINED} {source}: the decoder is initialised anew")


def with_weights(folder: Path, source: str, option: str) -> tuple[MaskedAutoencoder, Options]:
    """Builds a network with the weights of a folder of Hugging Face, and metadata as in a run.

    Args:
        folder: Where its files are.
        source: The same as the user named it.
        option: What names it in messages.

    Raises:
        UsageError: It has no decoder, or it is not known what its pixels are.
        DataError: It is damaged.
    """
    model = HuggingFaceAutoencoder(source, option, folder)
    require_described(model)
    config = model.folder.config
    net = MaskedAutoencoder(config)
    weights = model.weights(config)
    with model.errors():
        has_decoder = any(name.startswith(DECODER) for name in weights)
        require(has_decoder, f"it has no decoder: train one from it with {PRETRAINED}")
        load_weights(net, weights)
    sizes = {"channels": config.channels, "image_size": config.image_size}
    return net, {**sizes, **model.preprocessing}


class HuggingFaceAutoencoder(HuggingFaceModel):
    """A folder with the config.json of transformers' ViTMAE, whose file may lack the decoder."""

    families = FAMILIES
    new_parts = (DECODER,)


class OwnAutoencoder(RunCheckpoint):
    """A checkpoint of `tasks.mae fit`, or its run folder."""

    tasks = ("mae",)
    new_parts = ()
    saved: MAEConfig

    def config(self) -> Any:
        return self.saved

    def convert(self, state: State, config: Any) -> State:
        state = {name: fitting_patches(name, value, config) for name, value in state.items()}
        for name in (POSITION_TABLE, TABLE):
            if self.saved.position == "learned" and name in state:
                state[name] = resize_grid(state[name], config.grid)  # (rows, columns, E)
        return state
