"""Which ViT to build: presets by name, or what goes with pretrained weights; and loading those weights."""

from dataclasses import asdict, replace
from typing import Any

import torch

from modules.pretrained.vit import config_from_timm_model, config_from_timm_state, to_tessera
from modules.vit import VIT_PRESETS, ViT
from tasks.errors import DataError, UsageError, nearest
from tasks.parsing import Options
from tasks.weights import read_weights


def presets() -> dict[str, Options]:
    """The named sizes as options; classes and channels come from the data."""
    return {name: asdict(replace(config, num_classes=None, channels=None)) for name, config in VIT_PRESETS.items()}


def pretrained_options(source: str) -> Options:
    """The network, and the normalisation where it is known, that go with pretrained weights.

    Args:
        source: `timm/<model name>`, or a local .safetensors or .pth file with timm's names.

    Raises:
        UsageError: no such model or file, or one that is not a plain ViT.
    """
    data: Options = {}
    model = timm_model(source, device="meta") if source.startswith("timm/") else None
    weights = {} if model is not None else read_weights(source)
    try:
        config = config_from_timm_state(weights) if model is None else config_from_timm_model(model)
    except ValueError as error:
        raise UsageError(f"--model.pretrained {source}: {error}") from error
    if model is not None:
        data = {"dataset": {name: list(model.pretrained_cfg[name]) for name in ("mean", "std")}}
    return {"model": {"net": asdict(replace(config, num_classes=None))}, "data": data}


def load_pretrained(net: ViT, source: str) -> None:
    """Load pretrained weights into `net`, positions re-gridded to its image size; a head of other classes stays new.

    Raises:
        UsageError: the weights do not fit the network.
        DataError: timm cannot download them.
    """
    if not source.startswith("timm/"):
        state = read_weights(source)
    else:
        try:
            state = timm_model(source, pretrained=True).state_dict()
        except Exception as error:  # of the download: urllib's, huggingface_hub's, timm's own
            raise DataError(
                f"the weights of {source} could not be downloaded ({type(error).__name__}): fetch the file "
                "elsewhere and give it as --model.pretrained FILE.safetensors"
            ) from error
    try:
        weights = to_tessera("timm", state, net.config)
    except ValueError as error:
        raise UsageError(f"--model.pretrained {source} does not fit --model.net: {error}") from error
    net.load_state_dict(weights, strict=False)  # to_tessera allows only the head to be left out


def timm_model(source: str, pretrained: bool = False, device: str = "cpu") -> Any:
    """timm's model for `timm/<name>`.

    Raises:
        UsageError: timm has no such model.
    """
    import timm

    name = source.removeprefix("timm/")
    if not timm.is_model(name):
        raise UsageError(nearest(name, timm.list_models("vit_*"), "timm model"))
    with torch.device(device):
        return timm.create_model(name, pretrained=pretrained)
