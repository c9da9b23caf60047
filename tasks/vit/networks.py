"""The networks of image classifiers, from checkpoints."""

from modules.models.images import ImageConfig, ImageNet, build_image_net, config_class
from tasks.checkpoints.reading import (
    KEY,
    Checkpoint,
    checkpoint_errors,
    load_config,
    load_network,
)


def load_image_config(checkpoint: Checkpoint, what: str) -> ImageConfig:
    """As `load_config`, of a network of images."""
    options = checkpoint[KEY]["net"]
    with checkpoint_errors(what):
        kind = config_class(options)
    config: ImageConfig = load_config(kind, options, what)
    return config


def load_image_net(checkpoint: Checkpoint) -> ImageNet:
    """Returns the network of a checkpoint with its weights, in evaluation mode."""
    return load_network(checkpoint, config_class(checkpoint[KEY]["net"]), build_image_net)
