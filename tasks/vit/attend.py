"""Attention of a Vision Transformer to each patch, by attention rollout."""

from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from modules.models.vit import ViT
from modules.record import AttentionRecord
from tasks.tracking.report import plain, write_png


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
    size = record.self_attn[0].shape[-1]
    identity = torch.eye(size, dtype=torch.float32, device=pixels.device)  # (N, N)
    total = identity
    with torch.autocast(pixels.device.type, enabled=False):  # which would multiply in 16 bits
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

    count, _, height, width = images.shape
    column = 1.05 * width
    row = 1.05 * height
    inches = (1.6 * count + 0.8, 4.2)
    figure = matplotlib.figure.Figure(figsize=inches, dpi=100)
    # One axis for all: each axis of its own takes longer than the pictures.
    axis = figure.add_axes((0.7 / inches[0], 0.13, 1 - 0.8 / inches[0], 0.77))
    for number in range(count):
        left = column * number - 0.5  # pixels have their centres at whole numbers
        pixels = images[number].permute(1, 2, 0).cpu().numpy()  # (C, H, W) -> (H, W, C)
        heat = attention[number].cpu().numpy()
        for top in (-0.5, row - 0.5):
            extent = (left, left + width, top + height, top)
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=extent)
        axis.imshow(heat, cmap="inferno", alpha=0.6, extent=extent)
        axis.text(
            left + width / 2, -0.03 * height - 0.5, plain(titles[number]), fontsize=7, ha="center"
        )
    axis.set(
        xlim=(-0.5, column * (count - 1) + width - 0.5),
        ylim=(row + height - 0.5, -0.5),
    )
    for top, name in ((-0.5, "image"), (row - 0.5, "attention rollout\n(bright: more)")):
        middle = top + height / 2
        axis.text(-0.16 * width, middle, name, fontsize=7, rotation=90, ha="right", va="center")
    figure.supxlabel("x (pixels)", fontsize=8)
    figure.supylabel("y (pixels)", fontsize=8)
    across = [0, width // 2, width - 1]
    places = [column * number + x for number in range(count) for x in across]
    axis.set_xticks(places, [*map(str, across)] * count, fontsize=6)
    down = [0, height // 2, height - 1]
    axis.set_yticks([*down, *(row + y for y in down)], [*map(str, down)] * 2, fontsize=6)
    axis.spines[:].set_visible(False)
    write_png(figure, file)
