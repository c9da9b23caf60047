"""Images as they are, with masked patches, and with what a masked autoencoder puts there."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datamodules.vision.augment import denormalise
from modules.models.mae import MaskedAutoencoder


def three_pictures(
    net: MaskedAutoencoder,
    metadata: Mapping[str, Any],
    pixels: Tensor,
    predicted: Tensor,
    masked: Tensor,
) -> dict[str, Tensor]:
    """Returns images "original", "masked" (with the mean colour there) and "reconstructed".

    uint8 (B, C, H, W) each.

    Args:
        net: The network.
        metadata: Of the data, with `mean` and `std`.
        pixels: Normalised images (B, C, H, W).
        predicted: What the network predicts of them, (B, M, C P P).
        masked: Which patches these are, (B, M).
    """
    shown = {
        "original": pixels,
        "masked": net.hide(pixels, masked),
        "reconstructed": net.reconstruct(pixels, predicted, masked),
    }
    images = {name: denormalise(x, metadata["mean"], metadata["std"]) for name, x in shown.items()}
    return {name: x.round().clamp(0, 255).to(torch.uint8) for name, x in images.items()}
