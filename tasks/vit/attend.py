"""Attention of a Vision Transformer to each patch, by attention rollout."""

from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from modules.models.vit import ViT
from modules.record import AttentionRecord
from tasks.tracking.report import write_png


@torch.inference_mode()
def rollout(net: ViT, pixels: Tensor) -> Tensor:
    """Returns the attention to each patch, by attention rollout (Abnar & Zuidema 2020).

    Averages heads, adds the residual connection of each block, and multiplies over blocks.

    Args:
        net: In evaluation mode.
        pixels: Normalised images (B, C, H, W).

    Returns:
        (B, rows of patches, columns of patches), which sum to 1 for each image.
    """
    record = AttentionRecord()
    with torch.compiler.set_stance("force_eager"):
        net.features(pixels, record)
    identity = torch.eye(record.self_attn[0].shape[-1], device=pixels.device)  # (N, N)
    total = identity
    for weights in record.self_attn:
        heads_mean = weights.float().mean(1)  # (B, H, N, N) -> (B, N, N)
        total = (heads_mean + identity) / 2 @ total  # (B, N, N)
    prefix = net.config.prefix_tokens
    pooled = total[:, :1] if net.config.pool == "cls" else total[:, prefix:]
    attention = pooled[..., prefix:].mean(1)  # (B, P)
    attention = attention / attention.sum(-1, keepdim=True)
    return attention.unflatten(-1, net.config.grid)


def draw(images: Tensor, attention: Tensor, titles: Sequence[str], file: BinaryIO) -> None:
    """Draws images, uint8 (B, C, H, W), and below each its attention (B, rows, columns)."""
    import matplotlib.figure

    count, channels, height, width = images.shape
    figure = matplotlib.figure.Figure(figsize=(1.6 * count, 3.6), dpi=100, layout="constrained")
    panels = figure.subplots(2, count, squeeze=False)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    for number in range(count):
        pixels = images[number].permute(1, 2, 0).cpu().numpy()  # (H, W, C)
        if channels == 1:
            pixels = pixels[..., 0]
        for panel in panels[:, number]:
            panel.imshow(pixels, cmap="gray", vmin=0, vmax=255)
            panel.set_axis_off()
        panels[0, number].set_title(titles[number], fontsize=7)
        heat = attention[number].cpu().numpy()
        panels[1, number].imshow(heat, cmap="inferno", alpha=0.6, extent=extent)
    write_png(figure, file)
