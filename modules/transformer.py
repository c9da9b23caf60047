"""Blocks (attention, feed-forward, norms, residual sums) and stacks of them."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.attention import ATTENTIONS
from modules.cache import NO_CACHE, BlockCache, StackCache
from modules.config import StackConfig, default, variant
from modules.convolution import NoConv, causal_conv, visible_before
from modules.feedforward import FEEDFORWARDS
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.masks import NO_MASK, Mask
from modules.norm import norm_factory
from modules.rotation import Rotation


class Context(NamedTuple):
    """What cross-attention attends to: vectors (B, M, context width), and their mask."""

    states: Tensor
    mask: Mask = NO_MASK

    def select(self, rows: Tensor) -> "Context":
        """The rows of the batch at the indices `rows`, (R,)."""
        return Context(self.states[rows], self.mask.select(rows))


NO_CONTEXT = Context(None)  # type: ignore[arg-type]  # cross-attention refuses it


class BlockInputs(NamedTuple):
    """What a block gets besides the tokens' vectors; arguments as in `Stack.forward`.

    `visible` is that of `CausalConv.forward`.
    """

    mask: Mask
    rotary: Rotation | None
    context: Context
    cache: BlockCache
    visible: Tensor | None


class LayerScale(nn.Module):
    """A learned factor per channel, `start` at first (Touvron 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        return x * self.gamma


class DropPath(nn.Module):
    """Zeroes whole samples with probability `rate` in training, scales the rest up (Huang 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * torch.rand(len(x), 1, 1, device=x.device).lt(keep).to(x.dtype).div(keep)


def residual_branch(config: StackConfig, drop_path: float) -> nn.Module:
    """Dropout, layer scale and drop path of a sub-layer's result, before the residual sum."""
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

    `drop_path` is the probability of skipping a sub-layer.
    """

    def __init__(self, config: StackConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        sizes = config.resolved
        norm = norm_factory(config)
        attention = partial(
            variant("attention", config.attention, ATTENTIONS),
            config.width,
            config.heads,
            sizes.kv_heads,
            sizes.head_dim,
            qkv_bias=config.qkv_bias,
            bias=config.bias,
            qk_norm=norm if config.qk_norm else nn.Identity,
            dropout=config.attention_dropout,
        )
        self.has_cross = config.cross_attention
        self.norm1 = norm(config.width)
        self.conv1 = causal_conv(config)
        self.attention = attention()
        self.residual1 = residual_branch(config, drop_path)
        if config.cross_attention:
            self.cross_norm = norm(config.width)
            context_width = default(config.context_width, config.width)
            self.cross_attention = attention(context_width=context_width)
            self.cross_residual = residual_branch(config, drop_path)
        self.norm2 = norm(config.width)
        self.conv2 = causal_conv(config)
        feedforward = variant("feedforward", config.feedforward, FEEDFORWARDS)
        self.feedforward = feedforward(
            config.width, sizes.mlp_width, sizes.mlp_bias, sizes.mlp_dropout
        )
        self.residual2 = residual_branch(config, drop_path)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(self.norm1(x), visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = x + self.residual1(y)
        if self.has_cross:
            y = self.cross_norm(x)
            y = self.cross_attention(y, context.states, context.mask, None, cache.cross_attn)
            x = x + self.cross_residual(y)
        y = self.conv2(self.norm2(x), visible, cache.conv2)
        return x + self.residual2(self.feedforward(y))


class PostBlock(Block):
    """One Transformer block, norms after the residual sums (Vaswani 2017)."""

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(x, visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = self.norm1(x + self.residual1(y))
        if self.has_cross:
            y = self.cross_attention(x, context.states, context.mask, None, cache.cross_attn)
            x = self.cross_norm(x + self.cross_residual(y))
        y = self.conv2(x, visible, cache.conv2)
        return self.norm2(x + self.residual2(self.feedforward(y)))


class ParallelBlock(Block):
    """One Transformer block whose sub-layers read the same normed input (Dehghani 2023)."""

    def __init__(self, config: StackConfig, drop_path: float = 0.0) -> None:
        super().__init__(config, drop_path)
        self.norm2 = nn.Identity()
        self.conv2 = NoConv()
        self.cross_norm = nn.Identity()

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        mask, rotary, context, cache, visible = inputs
        normed = self.conv1(self.norm1(x), visible, cache.conv1)
        x = x + self.residual1(self.attention(normed, None, mask, rotary, cache.self_attn))
        if self.has_cross:
            y = self.cross_attention(normed, context.states, context.mask, None, cache.cross_attn)
            x = x + self.cross_residual(y)
        return x + self.residual2(self.feedforward(normed))


ORDERS: dict[str, type[Block]] = {"pre": Block, "post": PostBlock, "parallel": ParallelBlock}


class Stack(nn.Module):
    """Blocks one after the other: an encoder, or with `causal` a decoder."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        block = variant("order", config.order, ORDERS)
        rates = [config.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(block(config, rate) for rate in rates)
        norm = norm_factory(config)
        self.norm = norm(config.width) if config.resolved.final_norm else nn.Identity()
        initialise(self, config.init, config.depth)

    def forward(
        self,
        x: Tensor,
        mask: Mask = NO_MASK,
        rotary: Rotation | None = None,
        context: Context = NO_CONTEXT,
        cache: StackCache = NO_CACHE,
    ) -> Tensor:
        """Runs all blocks and the final norm: (B, N, E) -> (B, N, E).

        Args:
            x: The tokens' vectors.
            mask: Who may attend to whom; combined with a causal mask if the config is causal.
            rotary: Rotary positions of the tokens; None: none.
            context: What cross-attention attends to.
            cache: KV cache of earlier tokens, or a recorder of attention weights.
        """
        if self.config.causal and x.shape[1] > 1:  # a single new token has no later ones
            mask = mask & cache.causal_mask(x.shape[1], x.device)
        visible = None
        if self.config.conv_kernel is not None:
            visible = visible_before(mask, x.shape[1], self.config.conv_kernel - 1)
        recompute = self.config.checkpoint_activations and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            inputs = BlockInputs(mask, rotary, context, cache.block(index), visible)
            if recompute and cache is NO_CACHE:
                x = checkpoint(block, x, inputs, use_reentrant=False)
            else:
                x = block(x, inputs)
        return self.norm(x)
