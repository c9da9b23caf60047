"""Attention of a Vision Transformer to each patch, by attention rollout."""

from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from modules.models.images import ImageNet
from modules.models.swin import Swin
from modules.models.vit import ViTConfig
from modules.record import AttentionRecord
from tasks.tracking.picture_grid import draw_grid


def patch_labels(config: ViTConfig) -> list[str]:
    """Returns names of the N tokens: those before the patches, and "row,column" of each patch."""
    labels = ["class"] * config.has_class_token + ["distillation"] * config.distillation_token
    labels += [f"register {i + 1}" for i in range(config.register_tokens)]
    return labels + grid_labels(*config.grid)


def grid_labels(rows: int, columns: int) -> list[str]:
    """Returns "row,column" of each patch or pixel, both from 1, row by row."""
    return [f"{row + 1},{column + 1}" for row in range(rows) for column in range(columns)]


@torch.inference_mode()
def rollout(net: ImageNet, pixels: Tensor) -> Tensor | None:
    """Returns the attention to each patch, by attention rollout (Abnar & Zuidema 2020).

    Averages heads, adds the residual connection of each block, and multiplies over blocks.

    Args:
        net: In evaluation mode.
        pixels: Normalised images (B, C, H, W).

    Returns:
        (B, rows of patches, columns of patches), which sum to 1 for each image. None: the network
        has no attention between all patches.
    """
    if isinstance(net, Swin):
        return None
    record = AttentionRecord()
    with torch.compiler.set_stance("force_eager"):
        net.features(pixels, record)
    if not record.self_attn:
        return None
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
    rows = {"image": images, "attention rollout\n(bright: more)": images}
    draw_grid(rows, titles, file, attention)
