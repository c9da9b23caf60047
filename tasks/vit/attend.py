"""Where a Vision Transformer looks: attention from its class token, or of all patches, to each patch."""

from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from modules.models.vit import ViT
from modules.record import AttentionRecord


@torch.inference_mode()
def rollout(net: ViT, pixels: Tensor) -> Tensor:
    """Share of each patch in what the network pools, by attention rollout (Abnar & Zuidema 2020).

    Attention is the mean over heads, half of each block's output is its input, and blocks follow one another.

    Args:
        net: as in evaluation.
        pixels: normalised images (B, C, Y, X).

    Returns:
        (B, rows of patches, patches of a row); each image's sum to 1.
    """
    record = AttentionRecord()
    with torch.compiler.set_stance("force_eager"):
        net.features(pixels, record)
    count = record.self_attn[0].shape[-1]
    flow = torch.eye(count, device=pixels.device)  # (N, N)
    for weights in record.self_attn:
        flow = (
            (weights.float().mean(1) + torch.eye(count, device=pixels.device)) / 2 @ flow
        )  # (B, N, N)
    config, first = net.config, net.config.prefix_tokens
    looks = flow[:, :1] if config.pool == "cls" else flow[:, first:]
    shares = looks[..., first:].mean(1)  # (B, P)
    return (shares / shares.sum(-1, keepdim=True)).unflatten(-1, config.grid)


def draw(images: Tensor, shares: Tensor, titles: Sequence[str], file: BinaryIO) -> None:
    """Draw images, each above the same with where the network looks.

    Args:
        images: uint8 (B, C, Y, X).
        shares: (B, rows, columns), as of `rollout`.
        titles: B of them.
        file: PNG to write.
    """
    import matplotlib.figure

    count, _, height, width = images.shape
    figure = matplotlib.figure.Figure(figsize=(1.6 * count, 3.6), layout="constrained")
    panels = figure.subplots(2, count, squeeze=False)
    for number in range(count):
        pixels = images[number].permute(1, 2, 0).cpu().numpy()
        for panel in panels[:, number]:
            panel.imshow(
                pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=255
            )
            panel.set_axis_off()
        panels[0, number].set_title(titles[number], fontsize=7)
        place = (-0.5, width - 0.5, height - 0.5, -0.5)
        panels[1, number].imshow(
            shares[number].cpu().numpy(), cmap="inferno", alpha=0.6, extent=place
        )
    figure.savefig(file, dpi=100)
