"""ViT weights of timm, torchvision and transformers, converted both ways.

Those libraries may add a position to class tokens and the like. It is a constant, so here it is
part of the token.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from modules.config import require
from modules.kernels.upcast import upcast
from modules.models.vit import ViT, ViTConfig
from modules.patch_embedding import resize_patches
from modules.position import resize_grid
from modules.pretrained.family import Family
from modules.pretrained.settings import (
    check_fixed_options,
)
from modules.pretrained.timm_parallel import to_parallel_blocks, to_plain_blocks
from modules.pretrained.weights import (
    CLASSIFIERS,
    Names,
    State,
    drop_other_classifier,
    weight_names,
)

POSITION_TABLE = "position.table"
PATCHES = "embed.stem.conv.weight"
TOKENS = "prefix.vectors"
BLOCK = "stack.blocks.{i}"
TokenKind = Literal["class", "distillation", "register"]
TOKEN_KINDS: tuple[TokenKind, ...] = get_args(TokenKind)  # as in `ViTConfig.prefix_counts`


@dataclass(frozen=True, kw_only=True)
class ViTFamily(Family[ViTConfig]):
    """How a library names the weights of a ViT; arguments as `Family`, and:

    Args:
        positions: Their table of positions, (1, prefix and patches or patches only, E).
        tokens: Their name of each kind of tokens that they have, in our order, (1, count, E) each.
    """

    positions: str
    tokens: dict[TokenKind, str]
    optional: tuple[str, ...] = CLASSIFIERS

    def names(self, config: ViTConfig) -> Names:
        """Returns our names with theirs; positions and tokens keep ours."""
        tensors = {**self.tensors, POSITION_TABLE: POSITION_TABLE, TOKENS: TOKENS}
        return weight_names(self.layers, config.stack.depth, tensors)

    def networks(self, config: ViTConfig) -> list[nn.Module]:
        return [ViT(replace(config, num_classes=config.num_classes or 1))]

    def import_tensor(self, name: str, value: Tensor, config: ViTConfig) -> Tensor:
        return fitting_patches(name, value, config)

    def check(self, config: ViTConfig) -> None:
        check_fixed_options(self.name, config, {"position": "learned"})

    def weights_from_external(
        self, state: State, config: ViTConfig, prefix_positions: bool | None = None
    ) -> State:
        """As in the base class; positions are resized to the image size of `config`.

        A classifier for another number of classes is left out. `prefix_positions`: whether their
        table of positions has rows for class and register tokens; None: inferred from its length.
        """
        self.check(config)
        state = {self.full_name(name): value for name, value in state.items()}
        missing = f"{self.positions} is missing: these are not weights of a {self.name} ViT."
        require(self.positions in state, missing)
        for name in (self.positions, *self.tokens.values()):
            shape = tuple(state[name].shape) if name in state else (1, 1, config.stack.width)
            fits = len(shape) == 3 and shape[::2] == (1, config.stack.width)
            require(fits, f"{name} is {shape}, not (1, count, {config.stack.width}).")
        rest = dict(state)
        positions = upcast(rest.pop(self.positions))[0]  # (P + N, E) or (N, E)
        tokens = [upcast(rest.pop(name))[0] for name in self.tokens.values() if name in rest]
        prefix = torch.cat(tokens) if tokens else positions[:0]  # (P, E)
        covered = count_prefix_positions(
            self.positions, len(positions), len(prefix), prefix_positions
        )
        patches = positions[covered:]  # (N, E)
        side = math.isqrt(len(patches))
        grid = patches.unflatten(0, (side, side))  # (rows, columns, E)
        rest[POSITION_TABLE] = resize_grid(grid, config.grid)  # (rows, columns, E)
        if len(prefix):
            rest[TOKENS] = prefix + positions[:covered] if covered else prefix  # (P, E)
        return drop_other_classifier(
            super().weights_from_external(rest, config), config.num_classes
        )

    def weights_to_external(
        self, state: State, config: ViTConfig, prefix_positions: bool | None = None
    ) -> State:
        """As in the base class.

        `prefix_positions`: whether their table of positions has rows for class and register tokens,
        which are then zeros; None: unless there are registers, as in most models of timm.
        """
        theirs = super().weights_to_external(state, config)
        positions = theirs.pop(POSITION_TABLE).flatten(0, 1)  # (N, E)
        prefix = theirs.pop(TOKENS, positions[:0])  # (P, E)
        if prefix_positions is None:
            prefix_positions = not config.register_tokens
        if prefix_positions:
            positions = torch.cat((torch.zeros_like(prefix), positions))  # (P + N, E)
        theirs[self.positions] = positions[None]  # (1, P + N, E) or (1, N, E)
        parts = prefix.split(config.prefix_counts)  # (1 or 0, E), (1 or 0, E), (registers, E)
        for kind, vectors in zip(TOKEN_KINDS, parts, strict=True):
            if len(vectors):
                require(kind in self.tokens, f"{self.name} has no place for {kind} tokens.")
                theirs[self.tokens[kind]] = vectors[None]  # (1, count, E)
        return theirs


def resize_vit(state: State, saved: ViTConfig, config: ViTConfig) -> State:
    """Returns weights of a config under our names for the images and patches of another."""
    state = resize_stem(state, saved, config)
    if saved.position == "learned" and POSITION_TABLE in state:
        table = resize_grid(state[POSITION_TABLE], config.grid)  # (rows, columns, E)
        state = {**state, POSITION_TABLE: table}
    return state


def resize_stem(state: State, saved: Any, config: Any) -> State:
    """Returns weights of a config of an image network with filters for the patches of another."""
    if PATCHES not in state or saved.stem != config.stem:
        return state
    return {**state, PATCHES: fitting_patches(PATCHES, state[PATCHES], config)}


def fitting_patches(name: str, value: Tensor, config: Any) -> Tensor:
    """Resizes the filters of patches, given our name, to the patch size of `config`."""
    if name != PATCHES or config.stem not in ("patch", "hybrid"):
        return value
    size = config.patch_size if config.stem == "patch" else config.patch_size // 4
    return resize_patches(value, size)


@dataclass(frozen=True, kw_only=True)
class MixerFamily(Family[ViTConfig]):
    """How timm names the weights of an MLP-Mixer."""

    optional: tuple[str, ...] = CLASSIFIERS

    def names(self, config: ViTConfig) -> Names:
        return weight_names(self.layers, config.stack.depth, self.tensors)

    def networks(self, config: ViTConfig) -> list[nn.Module]:
        return [ViT(replace(config, num_classes=config.num_classes or 1))]

    def import_tensor(self, name: str, value: Tensor, config: ViTConfig) -> Tensor:
        return fitting_patches(name, value, config)

    def check(self, config: ViTConfig) -> None:
        check_fixed_options(f"{self.name} Mixer", config, MIXER_OPTIONS)

    def weights_from_external(self, state: State, config: ViTConfig) -> State:
        """As in the base class; a classifier for another number of classes is left out."""
        ours = super().weights_from_external(state, config)
        return drop_other_classifier(ours, config.num_classes)


@dataclass(frozen=True, kw_only=True)
class TimmFamily(ViTFamily):
    """How timm names the weights of a ViT of plain or parallel blocks, or of an MLP-Mixer."""

    mixer: MixerFamily

    def names(self, config: ViTConfig) -> Names:
        if config.stack.order == "mixer":
            return self.mixer.names(config)
        return super().names(config)

    def weights_from_external(
        self, state: State, config: ViTConfig, prefix_positions: bool | None = None
    ) -> State:
        if config.stack.order == "mixer":
            return self.mixer.weights_from_external(state, config)
        state = to_plain_blocks(state)
        return super().weights_from_external(state, config, prefix_positions)

    def weights_to_external(
        self, state: State, config: ViTConfig, prefix_positions: bool | None = None
    ) -> State:
        if config.stack.order == "mixer":
            return self.mixer.weights_to_external(state, config)
        theirs = super().weights_to_external(state, config, prefix_positions)
        if config.stack.order == "parallel":
            return to_parallel_blocks(theirs, config.stack.depth)
        return theirs


def count_prefix_positions(name: str, count: int, prefix: int, covered: bool | None) -> int:
    """Returns how many of `count` rows of positions belong to class and register tokens.

    That is 0 or `prefix`, the number of these tokens: as `covered` says; None: whichever leaves a
    square grid of patches. Raises `ValueError` if neither does, or both do.
    """
    choices = {prefix, 0}
    if covered is not None:
        choices = {prefix} if covered else {0}
    fitting = [
        choice
        for choice in choices
        if count > choice and math.isqrt(count - choice) ** 2 == count - choice
    ]
    require(fitting != [], f"{count} positions in {name} do not form a square grid.")
    require(
        len(fitting) == 1,
        f"{count} positions in {name} form a grid with and without {prefix} tokens before them.",
    )
    return fitting[0]


MIXER_OPTIONS = {  # of all of timm's Mixers
    "order": "mixer",
    "stem": "patch",
    "position": "none",
    "pool": "mean",
    "has_class_token": False,
    "distillation_token": False,
    "register_tokens": 0,
    "norm_after_pool": False,
    "feedforward": "gelu",
    "norm": "layernorm",
    "final_norm": True,
    "layer_scale": None,
    "bias": True,
    "mlp_bias": True,
}
TIMM = TimmFamily(
    name="timm",
    layers={
        "embed.stem.first": "patch_embed.backbone.conv",
        "embed.stem.norm": "patch_embed.backbone.norm",
        "embed.stem.conv": "patch_embed.proj",
        f"{BLOCK}.norm1": "blocks.{i}.norm1",
        f"{BLOCK}.attention.qkv": "blocks.{i}.attn.qkv",
        f"{BLOCK}.attention.q_norm": "blocks.{i}.attn.q_norm",
        f"{BLOCK}.attention.k_norm": "blocks.{i}.attn.k_norm",
        f"{BLOCK}.attention.output": "blocks.{i}.attn.proj",
        f"{BLOCK}.norm2": "blocks.{i}.norm2",
        f"{BLOCK}.feedforward.up": "blocks.{i}.mlp.fc1",
        f"{BLOCK}.feedforward.down": "blocks.{i}.mlp.fc2",
        "stack.norm": "norm",
        "head.norm": "fc_norm",
        "head.linear": "head",
        "distillation_head.linear": "head_dist",
    },
    tensors={
        f"{BLOCK}.residual1.scale.gamma": "blocks.{i}.ls1.gamma",
        f"{BLOCK}.residual2.scale.gamma": "blocks.{i}.ls2.gamma",
    },
    positions="pos_embed",
    tokens={"class": "cls_token", "distillation": "dist_token", "register": "reg_token"},
    mixer=MixerFamily(
        name="timm",
        layers={
            "embed.stem.conv": "stem.proj",
            f"{BLOCK}.norm1": "blocks.{i}.norm1",
            f"{BLOCK}.token_mixing.up": "blocks.{i}.mlp_tokens.fc1",
            f"{BLOCK}.token_mixing.down": "blocks.{i}.mlp_tokens.fc2",
            f"{BLOCK}.norm2": "blocks.{i}.norm2",
            f"{BLOCK}.feedforward.up": "blocks.{i}.mlp_channels.fc1",
            f"{BLOCK}.feedforward.down": "blocks.{i}.mlp_channels.fc2",
            "stack.norm": "norm",
            "head.linear": "head",
        },
    ),
)
LAYER = "encoder.layers.encoder_layer_{i}"
TORCHVISION = ViTFamily(
    name="torchvision",
    layers={
        "embed.stem.conv": "conv_proj",
        f"{BLOCK}.norm1": f"{LAYER}.ln_1",
        f"{BLOCK}.attention.output": f"{LAYER}.self_attention.out_proj",
        f"{BLOCK}.norm2": f"{LAYER}.ln_2",
        f"{BLOCK}.feedforward.up": f"{LAYER}.mlp.0",
        f"{BLOCK}.feedforward.down": f"{LAYER}.mlp.3",
        "stack.norm": "encoder.ln",
        "head.linear": "heads.head",
    },
    tensors={
        f"{BLOCK}.attention.qkv.weight": f"{LAYER}.self_attention.in_proj_weight",
        f"{BLOCK}.attention.qkv.bias": f"{LAYER}.self_attention.in_proj_bias",
    },
    positions="encoder.pos_embedding",
    tokens={"class": "class_token"},
)
