"""The networks that classify images, by the name that the option `architecture` gives them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from modules.config import variant
from modules.models.swin import SWIN_PRESETS, Swin, SwinConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig

ImageConfig = ViTConfig | SwinConfig
ImageNet = ViT | Swin


class Architecture(NamedTuple):
    """The class of a config, and that of the network that it describes."""

    config: Any
    network: Any


ARCHITECTURES: dict[str, Architecture] = {
    "vit": Architecture(ViTConfig, ViT),
    "swin": Architecture(SwinConfig, Swin),
}
IMAGE_PRESETS: dict[str, ImageConfig] = {**VIT_PRESETS, **SWIN_PRESETS}


def architecture_of(options: Mapping[str, Any]) -> str:
    """The architecture of a network with these options; a ViT if they do not say.

    Raises `ValueError` if there is none of this name.
    """
    name: str = options.get("architecture") or "vit"
    variant("architecture", name, ARCHITECTURES)
    return name


def config_class(options: Mapping[str, Any]) -> Any:
    """The class of the config with these options; raises `ValueError` as `architecture_of`."""
    return ARCHITECTURES[architecture_of(options)].config


def build_image_net(config: ImageConfig) -> ImageNet:
    """The network of a config whose sizes are filled in."""
    net: ImageNet = ARCHITECTURES[config.architecture].network(config)
    return net
