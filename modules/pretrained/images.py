"""How weights of each network of images are converted: those of timm, and our own for new sizes."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from modules.config import require
from modules.models.images import ImageConfig
from modules.models.swin import SwinConfig
from modules.pretrained import swin, timm, vit
from modules.pretrained.family import TransformersFamily
from modules.pretrained.swin_transformers import BY_MODEL_TYPE as SWINS
from modules.pretrained.swin_transformers import SWIN, SWINV2
from modules.pretrained.vit_transformers import BY_MODEL_TYPE as VITS
from modules.pretrained.vit_transformers import DEIT, HUGGINGFACE
from modules.pretrained.weights import State


class Conversion(NamedTuple):
    """How weights of a network are converted.

    Args:
        family: timm's names.
        arguments: From a config to the arguments of timm's class; `ValueError` if it has no such
            model.
        known_arguments: Those that timm's config.json may have.
        settings: From a config and metadata to timm's config.json.
        from_model: From a model of timm to our config; `ValueError` if ours lacks a part.
        from_state: From timm's weights and the config of a model to that of the weights.
        resize: From our weights, their config and another to weights for the sizes of the other.
        transformers: From a config to the family of transformers that may have the same model.
        for_new_sizes: From a config to one that says what weights need to know if sizes change.
    """

    family: Any
    arguments: Callable[[Any], dict[str, Any]]
    known_arguments: Collection[str]
    settings: Callable[..., dict[str, Any]]
    from_model: Callable[[nn.Module], Any]
    from_state: Callable[..., Any]
    resize: Callable[[State, Any, Any], State]
    transformers: Callable[[Any], TransformersFamily[Any]]
    for_new_sizes: Callable[[Any], Any]


def with_pretrained_windows(config: SwinConfig) -> SwinConfig:
    """Returns a config that says with which windows its weights were trained."""
    if config.relative_bias != "mlp" or config.pretrained_windows is not None:
        return config
    return replace(config, pretrained_windows=tuple(config.window_sizes))


CONVERSIONS: dict[str, Conversion] = {
    "vit": Conversion(
        vit.TIMM,
        timm.timm_arguments,
        timm.ARGUMENTS,
        timm.timm_settings,
        timm.config_from_timm_model,
        timm.config_from_timm_state,
        vit.resize_vit,
        lambda config: DEIT if config.distillation_token else HUGGINGFACE,
        lambda config: config,
    ),
    "swin": Conversion(
        swin.TIMM_SWIN,
        swin.swin_arguments,
        swin.SWIN_ARGUMENTS,
        swin.swin_settings,
        swin.config_from_timm_swin,
        swin.config_from_swin_state,
        swin.resize_swin,
        lambda config: SWIN if config.relative_bias == "table" else SWINV2,
        with_pretrained_windows,
    ),
}
# Families of transformers by the model_type in config.json.
TRANSFORMERS: dict[str, TransformersFamily[Any]] = {**VITS, **SWINS}
TIMM_CLASSES = dict.fromkeys(timm.CLASSES, "vit") | dict.fromkeys(swin.VERSIONS, "swin")


def conversion(config: ImageConfig) -> Conversion:
    """How weights of the network of a config are converted."""
    return CONVERSIONS[config.architecture]


def timm_conversion(model: nn.Module) -> Conversion:
    """How weights of a model of timm are converted; `ValueError` if no network here is like it."""
    name = type(model).__name__
    require(name in TIMM_CLASSES, f"Tessera has no network like timm's {name}.")
    return CONVERSIONS[TIMM_CLASSES[name]]
