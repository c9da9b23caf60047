"""The networks of image classifiers, from checkpoints."""

from modules.models.images import ImageConfig, ImageNet, build_image_net, config_class
from tasks.checkpoints.reading import (
    KEY,
    Checkpoint,
    checkpoint_errors,
    load_config,
    load_network,
)


def load_image_config(checkpoint: Checkpoint) -> ImageConfig:
    """Returns the config of a checkpoint's network; raises `RunError` if an entry is wrong."""
    options = checkpoint[KEY]["net"]
    with checkpoint_errors("the checkpoint"):
        kind = config_class(options)
    config: ImageConfig = load_config(kind, options)
    return config


def load_image_net(checkpoint: Checkpoint) -> ImageNet:
    """Returns the network of a checkpoint with its weights, in evaluation mode."""
    return load_network(checkpoint, config_class(checkpoint[KEY]["net"]), build_image_net)
