"""Blocks (attention, feed-forward, norms, residual sums) and stacks of them."""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.attention import ATTENTIONS, FREE
from modules.config import StackConfig, require
from modules.feedforward import FEEDFORWARDS
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.masks import Mask
from modules.memory import BlockMemory, Memory, StackMemory
from modules.norm import norm_factory
from modules.position import Rotation

NOTHING, FORGETFUL = BlockMemory(), StackMemory()


class Source(NamedTuple):
    """What a decoder's cross-attention looks at: vectors (B, M, source width) and who may see which."""

    states: Tensor
    mask: Mask = FREE

    def select(self, rows: Tensor) -> "Source":
        """Some of the rows, (R,) of B."""
        return Source(self.states[rows], self.mask.select(rows))


class LayerScale(nn.Module):
    """A learned factor per channel, small at first (Touvron 2021). Keeps the shape.

    Args:
        width: Number of channels E.
        start: Start value of the factors.
    """

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        return x * self.gamma


class DropPath(nn.Module):
    """Zeroes whole samples of a batch in training, scaling the rest up (Huang 2016). Keeps the shape.

    Args:
        rate: Probability of dropping a sample.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * torch.rand(len(x), 1, 1, device=x.device).lt(keep).to(x.dtype).div(keep)


def branch_end(config: StackConfig, drop_path: float) -> nn.Module:
    """What a sub-layer's result passes before it is added: dropout, layer scale, drop path, or nothing."""
    parts: dict[str, nn.Module] = {}
    if config.dropout:
        parts["dropout"] = Dropout(config.dropout)
    if config.layer_scale is not None:
        parts["scale"] = LayerScale(config.width, config.layer_scale)
    if drop_path:
        parts["drop_path"] = DropPath(drop_path)
    return nn.Sequential(OrderedDict(parts)) if parts else nn.Identity()


class Block(nn.Module):
    """One Transformer block, norms before the sub-layers (Xiong 2020).

    Args:
        config: Sizes and variants.
        drop_path: Probability of skipping a sub-layer.
    """

    def __init__(self, config: StackConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        norm = norm_factory(config.norm, config.norm_eps, config.bias)
        self.norm1 = norm(config.width)
        self.attention = ATTENTIONS[config.attention](config)
        self.end1 = branch_end(config, drop_path)
        if config.cross_attention:
            self.cross_norm = norm(config.width)
            self.cross_attention = ATTENTIONS[config.attention](
                config, config.source_width or config.width
            )
            self.cross_end = branch_end(config, drop_path)
        self.has_cross = config.cross_attention
        self.norm2 = norm(config.width)
        make = FEEDFORWARDS[config.feedforward]
        self.feedforward = make(
            config.width, config.feedforward_width, config.feedforward_bias, config.hidden_dropout
        )
        self.end2 = branch_end(config, drop_path)

    def attend(self, x: Tensor, mask: Mask, rotation: Rotation | None, memory: Memory) -> Tensor:
        """Self-attention sub-layer without its norm: (B, N, E) -> (B, N, E)."""
        return self.end1(self.attention(x, None, mask, rotation, memory))

    def attend_source(self, x: Tensor, source: Source | None, memory: Memory) -> Tensor:
        """Cross-attention sub-layer without its norm: (B, N, E) -> (B, N, E)."""
        if source is None:
            raise ValueError(
                "This block has cross-attention, so it needs a source; pass one, or switch it off."
            )
        return self.cross_end(self.cross_attention(x, source.states, source.mask, None, memory))

    def transform(self, x: Tensor) -> Tensor:
        """Feed-forward sub-layer without its norm: (B, N, E) -> (B, N, E)."""
        return self.end2(self.feedforward(x))

    def forward(
        self,
        x: Tensor,
        mask: Mask = FREE,
        rotation: Rotation | None = None,
        source: Source | None = None,
        memory: BlockMemory = NOTHING,
    ) -> Tensor:
        """(B, N, E) -> (B, N, E); arguments as in `Stack.forward`."""
        x = x + self.attend(self.norm1(x), mask, rotation, memory.own)
        if self.has_cross:
            x = x + self.attend_source(self.cross_norm(x), source, memory.cross)
        return x + self.transform(self.norm2(x))


class PostBlock(Block):
    """One Transformer block, norms after the residual sums (Vaswani 2017). Arguments as `Block`."""

    def forward(
        self,
        x: Tensor,
        mask: Mask = FREE,
        rotation: Rotation | None = None,
        source: Source | None = None,
        memory: BlockMemory = NOTHING,
    ) -> Tensor:
        """(B, N, E) -> (B, N, E); arguments as in `Stack.forward`."""
        x = self.norm1(x + self.attend(x, mask, rotation, memory.own))
        if self.has_cross:
            x = self.cross_norm(x + self.attend_source(x, source, memory.cross))
        return self.norm2(x + self.transform(x))


class ParallelBlock(Block):
    """One Transformer block whose sub-layers all read the same normed input (Dehghani 2023). Arguments as `Block`."""

    def __init__(self, config: StackConfig, drop_path: float = 0.0) -> None:
        super().__init__(config, drop_path)
        self.norm2 = nn.Identity()
        self.cross_norm = nn.Identity()

    def forward(
        self,
        x: Tensor,
        mask: Mask = FREE,
        rotation: Rotation | None = None,
        source: Source | None = None,
        memory: BlockMemory = NOTHING,
    ) -> Tensor:
        """(B, N, E) -> (B, N, E); arguments as in `Stack.forward`."""
        normed = self.norm1(x)
        x = x + self.attend(normed, mask, rotation, memory.own)
        if self.has_cross:
            x = x + self.attend_source(normed, source, memory.cross)
        return x + self.transform(normed)


ORDERS: dict[str, type[Block]] = {"pre": Block, "post": PostBlock, "parallel": ParallelBlock}


class Stack(nn.Module):
    """Blocks one after the other: an encoder, or a decoder where `causal` and `cross_attention` are on.

    Args:
        config: Sizes and variants.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        rates = [config.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(ORDERS[config.order](config, rate) for rate in rates)
        norm = norm_factory(config.norm, config.norm_eps, config.bias)
        self.norm = norm(config.width) if config.has_final_norm else nn.Identity()
        initialise(self, config.init, config.depth)

    def forward(
        self,
        x: Tensor,
        mask: Mask = FREE,
        rotation: Rotation | None = None,
        source: Source | None = None,
        memory: StackMemory = FORGETFUL,
    ) -> Tensor:
        """Runs all blocks and the final norm.

        Args:
            x: (B, N, E).
            mask: Who may attend to whom; with `causal`, earlier tokens only is added to it.
            rotation: Rotary positions of the tokens; None: none.
            source: What cross-attention looks at; None where there is none.
            memory: What keys, values and weights are handed to; it may add those of earlier tokens.

        Returns:
            (B, N, E).
        """
        require(
            x.shape[-1] == self.config.width,
            f"Vectors of size {x.shape[-1]} do not fit width {self.config.width}.",
        )
        if self.config.causal and x.shape[1] > 1:  # a single last token sees everything
            mask = mask & memory.order(x.shape[1], x.device)
        recompute = (
            self.config.checkpoint_activations and torch.is_grad_enabled() and memory is FORGETFUL
        )
        for index, block in enumerate(self.blocks):
            if recompute:
                x = checkpoint(block, x, mask, rotation, source, use_reentrant=False)
            else:
                x = block(x, mask, rotation, source, memory.block(index))
        return self.norm(x)
