"""Blocks (attention, feed-forward, norms, residual sums) and stacks of them."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.attention import ATTENTIONS
from modules.cache import NO_BLOCK_CACHE, NO_CACHE, BlockCache, StackCache
from modules.config import StackConfig, check_choice, default, require, variant
from modules.convolution import NoConv, causal_conv, visible_before
from modules.feedforward import FEEDFORWARDS
from modules.init import INITS, initialise
from modules.kernels.dropout import Dropout
from modules.masks import NO_MASK, Mask
from modules.norm import NORMS, norm_factory
from modules.rotation import Rotation


class Context(NamedTuple):
    """What cross-attention attends to: vectors (B, M, context width), and their mask."""

    states: Tensor
    mask: Mask = NO_MASK

    def select(self, rows: Tensor) -> "Context":
        """The rows of the batch at the indices `rows`, (R,)."""
        return Context(self.states[rows], self.mask.select(rows))


NO_CONTEXT = Context(None)  # type: ignore[arg-type]  # no states: no block reads them


class BlockInputs(NamedTuple):
    """What a block gets besides the tokens' vectors; arguments as in `Stack.forward`.

    `visible` is that of `CausalConv.forward`.

    >>> block = Block(StackConfig(width=8, depth=1, heads=2))
    >>> block(torch.zeros(1, 5, 8), BlockInputs(Mask(causal=True))).shape
    torch.Size([1, 5, 8])
    """

    mask: Mask = NO_MASK
    rotary: Rotation | None = None
    context: Context = NO_CONTEXT
    cache: BlockCache = NO_BLOCK_CACHE
    visible: Tensor | None = None


class LayerScale(nn.Module):
    """A learned factor per channel, `start` at first (Touvron 2021, CaiT)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth (Huang 2016), per sample as in timm.

    Zeroes samples with probability `rate` in training, and scales the others up.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if not self.training:
            return x
        keep = 1 - self.rate
        # Numbers in bfloat16 would be too coarse to compare with the rate.
        numbers = torch.rand(len(x), 1, 1, dtype=torch.float32, device=x.device)
        return x * numbers.lt(keep).to(x.dtype).div(keep)


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

    `drop_path` is the probability of skipping a sub-layer, `tokens` the number of tokens if it is
    always the same, which attention does not use.
    """

    def __init__(
        self, config: StackConfig, drop_path: float = 0.0, tokens: int | None = None
    ) -> None:
        super().__init__()
        sizes = config.resolved
        norm = norm_factory(config)
        attention = partial(
            variant("attention", config.attention, ATTENTIONS),
            config.width,
            config.heads,
            sizes.kv_heads,
            (sizes.head_dim, sizes.value_dim),
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
        """(B, N, E) -> (B, N or `mask.num_outputs`, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(self.norm1(x), visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = x[:, : mask.num_outputs] + self.residual1(y)
        if self.has_cross:
            y = self.cross_norm(x)
            y = self.cross_attention(y, context.states, context.mask, None, cache.cross_attn)
            x = x + self.cross_residual(y)
        y = self.conv2(self.norm2(x), visible, cache.conv2)
        return x + self.residual2(self.feedforward(y))


class PostBlock(Block):
    """One Transformer block, norms after the residual sums (Vaswani 2017)."""

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N or `mask.num_outputs`, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(x, visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = self.norm1(x[:, : mask.num_outputs] + self.residual1(y))
        if self.has_cross:
            y = self.cross_attention(x, context.states, context.mask, None, cache.cross_attn)
            x = self.cross_norm(x + self.cross_residual(y))
        y = self.conv2(x, visible, cache.conv2)
        return self.norm2(x + self.residual2(self.feedforward(y)))


class ParallelBlock(Block):
    """One Transformer block whose sub-layers read the same normed input (Dehghani 2023)."""

    def __init__(
        self, config: StackConfig, drop_path: float = 0.0, tokens: int | None = None
    ) -> None:
        super().__init__(config, drop_path, tokens)
        self.norm2 = nn.Identity()  # these replace what the base class has built: norm1 is enough
        self.conv2 = NoConv()
        if self.has_cross:
            self.cross_norm = nn.Identity()

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N or `mask.num_outputs`, E)."""
        mask, rotary, context, cache, visible = inputs
        normed = self.conv1(self.norm1(x), visible, cache.conv1)
        y = self.attention(normed, None, mask, rotary, cache.self_attn)
        x = x[:, : mask.num_outputs] + self.residual1(y)
        normed = normed[:, : mask.num_outputs]
        if self.has_cross:
            y = self.cross_attention(normed, context.states, context.mask, None, cache.cross_attn)
            x = x + self.cross_residual(y)
        return x + self.residual2(self.feedforward(normed))


class ResPostBlock(Block):
    """One Transformer block, norms at the end of the residual branches (Liu 2022).

    Weights and biases of the norms start at 0, so that a block with norms starts as the identity.
    """

    def __init__(
        self, config: StackConfig, drop_path: float = 0.0, tokens: int | None = None
    ) -> None:
        super().__init__(config, drop_path, tokens)
        for name, parameter in self.named_parameters():
            if name.startswith(("norm1.", "norm2.", "cross_norm.")):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N or `mask.num_outputs`, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(x, visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = x[:, : mask.num_outputs] + self.residual1(self.norm1(y))
        if self.has_cross:
            y = self.cross_attention(x, context.states, context.mask, None, cache.cross_attn)
            x = x + self.cross_residual(self.cross_norm(y))
        y = self.conv2(x, visible, cache.conv2)
        return x + self.residual2(self.norm2(self.feedforward(y)))


class NoResidualBlock(Block):
    """x -> sub-layer(norm(x)), without the residual sums: what these are for (Dong 2021).

    Without them attention makes all tokens alike, doubly exponentially with depth.
    """

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N or `mask.num_outputs`, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(self.norm1(x), visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = self.residual1(y)
        if self.has_cross:
            y = self.cross_norm(x)
            y = self.cross_attention(y, context.states, context.mask, None, cache.cross_attn)
            x = self.cross_residual(y)
        y = self.conv2(self.norm2(x), visible, cache.conv2)
        return self.residual2(self.feedforward(y))


class CCTBlock(Block):
    """One block of the Compact Convolutional Transformer (Hassani 2021).

    Its second norm is on the residual sum, as in the authors' code; the paper does not say so.
    """

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N or `mask.num_outputs`, E)."""
        mask, rotary, context, cache, visible = inputs
        y = self.conv1(self.norm1(x), visible, cache.conv1)
        y = self.attention(y, None, mask, rotary, cache.self_attn)
        x = x[:, : mask.num_outputs] + self.residual1(y)
        if self.has_cross:
            y = self.cross_norm(x)
            y = self.cross_attention(y, context.states, context.mask, None, cache.cross_attn)
            x = x + self.cross_residual(y)
        x = self.norm2(x)
        y = self.conv2(x, visible, cache.conv2)
        return x + self.residual2(self.feedforward(y))


class MixerBlock(nn.Module):
    """One block of the MLP-Mixer: perceptrons over tokens, then over channels (Tolstikhin 2021).

    x + W2 gelu(W1 norm(x)) with W1 (F, N) for each channel, in place of attention, then as `Block`.
    """

    def __init__(
        self, config: StackConfig, drop_path: float = 0.0, tokens: int | None = None
    ) -> None:
        super().__init__()
        require(tokens is not None, 'order "mixer" needs a fixed number of tokens.')
        sizes = config.resolved
        norm = norm_factory(config)
        feedforward = variant("feedforward", config.feedforward, FEEDFORWARDS)
        rest = (sizes.mlp_bias, sizes.mlp_dropout)
        self.norm1 = norm(config.width)
        self.token_mixing = feedforward(tokens, sizes.token_mlp_width, *rest)
        self.residual1 = residual_branch(config, drop_path)
        self.norm2 = norm(config.width)
        self.feedforward = feedforward(config.width, sizes.mlp_width, *rest)
        self.residual2 = residual_branch(config, drop_path)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        y = self.token_mixing(self.norm1(x).mT).mT  # (B, E, N) -> (B, N, E)
        x = x + self.residual1(y)
        return x + self.residual2(self.feedforward(self.norm2(x)))


ORDERS: dict[str, type[Block] | type[MixerBlock]] = {
    "pre": Block,
    "post": PostBlock,
    "parallel": ParallelBlock,
    "res_post": ResPostBlock,
    "no_residual": NoResidualBlock,
    "cct": CCTBlock,
    "mixer": MixerBlock,
}


VARIANTS: dict[str, Mapping[str, object]] = {  # options of `StackConfig`, and their families
    "attention": ATTENTIONS,
    "feedforward": FEEDFORWARDS,
    "norm": NORMS,
    "order": ORDERS,
    "init": INITS,
}


def check_variants(stack: StackConfig, name: str = "stack", any_length: bool = True) -> None:
    """Raises `ValueError` unless each variant is in its family; messages call the config `name`.

    `any_length`: inputs differ in their number of tokens, which not all orders can take.
    """
    for option, family in VARIANTS.items():
        check_choice(f"{name}.{option}", getattr(stack, option), family)
    require(
        stack.order != "mixer" or not any_length,
        f'{name}.order "mixer" takes a fixed number of tokens, as of an image; '
        "choose another order.",
    )


def drop_path_rates(config: StackConfig) -> list[float]:
    """The probability of skipping a sub-layer in each block, from 0 to `drop_path`, as in timm."""
    return [config.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]


class Stack(nn.Module):
    """Blocks one after the other: an encoder, or with `causal` a decoder.

    `tokens` is the number of tokens if it is always the same, which order "mixer" needs. `rates`
    are the probabilities of skipping sub-layers in each block; None: `drop_path_rates`.
    """

    def __init__(
        self,
        config: StackConfig,
        tokens: int | None = None,
        rates: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        block = variant("order", config.order, ORDERS)
        rates = drop_path_rates(config) if rates is None else rates
        self.blocks = nn.ModuleList(block(config, rate, tokens) for rate in rates)
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
        """Runs all blocks and the final norm: (B, N, E) -> (B, N or `mask.num_outputs`, E).

        If the mask has `num_outputs`, the last block skips the other tokens after keys and values,
        unless a cache, a recorder or BatchNorm needs them.

        Args:
            x: The tokens' vectors.
            mask: Who may attend to whom; combined with a causal mask if the config is causal.
            rotary: Rotary positions of the tokens; None: none.
            context: What cross-attention attends to.
            cache: KV cache of earlier tokens, or a recorder of attention weights.
        """
        num_outputs = mask.num_outputs
        mask = mask.with_outputs(None)
        if self.config.causal and x.shape[1] > 1:  # a single new token has no later ones
            mask = mask & cache.causal_mask(x.shape[1], x.device)
        visible = None
        if self.config.conv_kernel is not None:
            visible = visible_before(mask, x.shape[1], self.config.conv_kernel - 1)
        recompute = self.config.checkpoint_activations and torch.is_grad_enabled()
        # Caches and recorders need all tokens, and so does BatchNorm, whose means are over tokens.
        can_skip = cache is NO_CACHE and self.config.norm != "batchnorm"
        for index, block in enumerate(self.blocks):
            if can_skip and index == len(self.blocks) - 1:
                mask = mask.with_outputs(num_outputs)
            inputs = BlockInputs(mask, rotary, context, cache.block(index), visible)
            if recompute and cache is NO_CACHE:
                x = checkpoint(block, x, inputs, use_reentrant=False)
            else:
                x = block(x, inputs)
        return self.norm(x)[:, :num_outputs]
