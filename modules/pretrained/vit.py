"""ViT weights of timm, torchvision and transformers, converted both ways.

Those libraries may add a position to class and register tokens. It is a constant, so here it is
part of the token.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from modules.config import StackConfig, require
from modules.models.vit import ViT, ViTConfig
from modules.position import resize_grid
from modules.pretrained.family import Family, TransformersFamily
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    build_config,
    check_fixed_options,
    count_classes,
)
from modules.pretrained.weights import Layers, Names, State, drop_other_classifier, weight_names

POSITION_TABLE = "position.table"
TOKENS = "prefix.vectors"
BLOCK = "stack.blocks.{i}"
OPTIONS = {  # of transformers' config.json -> ours
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_channels": "channels",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_width",
    "hidden_act": "feedforward",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_eps",
    "qkv_bias": "qkv_bias",
}
DEFAULTS = {
    "image_size": 224,
    "patch_size": 16,
    "channels": 3,
    "feedforward": "gelu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "norm_eps": 1e-12,
    "qkv_bias": True,
}


@dataclass(frozen=True, kw_only=True)
class ViTFamily(Family[ViTConfig]):
    """How a library names the weights of a ViT; arguments as `Family`, and:

    Args:
        positions: Their table of positions, (1, prefix and patches or patches only, E).
        tokens: Their class token and register tokens, (1, count, E) each.
    """

    positions: str
    tokens: tuple[str, ...]
    optional: tuple[str, ...] = ("head.linear.",)

    def names(self, config: ViTConfig) -> Names:
        """Returns our names with theirs; positions and tokens keep ours."""
        tensors = {**self.tensors, POSITION_TABLE: POSITION_TABLE, TOKENS: TOKENS}
        return weight_names(self.layers, config.stack.depth, tensors)

    def networks(self, config: ViTConfig) -> list[nn.Module]:
        return [ViT(replace(config, num_classes=config.num_classes or 1))]

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
        for name in (self.positions, *self.tokens):
            shape = tuple(state[name].shape) if name in state else (1, 1, config.stack.width)
            fits = len(shape) == 3 and shape[::2] == (1, config.stack.width)
            require(fits, f"{name} is {shape}, not (1, count, {config.stack.width}).")
        rest = dict(state)
        positions = rest.pop(self.positions)[0]  # (P + N, E) or (N, E)
        tokens = [rest.pop(name)[0] for name in self.tokens if name in rest]
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
        counts = [int(config.has_class_token), config.register_tokens][: len(self.tokens)]
        require(sum(counts) == len(prefix), f"{self.name} has no place for register tokens.")
        for name, vectors in zip(self.tokens, prefix.split(counts), strict=True):
            if len(vectors):
                theirs[name] = vectors[None]  # (1, count, E)
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


@dataclass(frozen=True, kw_only=True)
class TransformersViT(ViTFamily, TransformersFamily[ViTConfig]):
    """The ViT of transformers, whose config.json says the sizes; arguments as of both bases."""

    architecture: str = "ViT"
    options: dict[str, str] = field(default_factory=lambda: OPTIONS)
    required: tuple[str, ...] = ("width", "depth", "heads", "mlp_width")
    defaults: dict[str, Any] = field(default_factory=lambda: DEFAULTS)
    activations: Any = field(default_factory=lambda: ACTIVATIONS)
    unused: str = r"(pooler|decoder)\.|mask_token$"  # of heads for other tasks
    prefix: str = "vit."
    heads: tuple[str, ...] = ("classifier.", POSITION_TABLE, TOKENS)

    def config_from_external(self, settings: Settings) -> ViTConfig:
        """Returns our config; `num_classes` is null unless the file describes a classifier."""
        options = self.read(settings, StackConfig, ViTConfig)
        options["num_classes"] = count_classes(settings, "ImageClassification")
        return build_config(ViTConfig, options | {"mlp_dropout": 0.0})


def transformers_vit(
    name: str, block: str, qkv: tuple[str, str, str], layers: dict[str, str]
) -> TransformersViT:
    """Returns a family of transformers; `layers` are our names in a block -> theirs."""
    names: Layers = {
        "embed.stem.conv": "vit.embeddings.patch_embeddings.projection",
        f"{BLOCK}.norm1": f"{block}.layernorm_before",
        f"{BLOCK}.attention.qkv": tuple(f"{block}.{part}" for part in qkv),
        f"{BLOCK}.norm2": f"{block}.layernorm_after",
        "stack.norm": "vit.layernorm",
        "head.linear": "classifier",
    }
    names |= {f"{BLOCK}.{ours}": f"{block}.{theirs}" for ours, theirs in layers.items()}
    return TransformersViT(
        name=name,
        layers=names,
        positions="vit.embeddings.position_embeddings",
        tokens=("vit.embeddings.cls_token",),
    )


TIMM = ViTFamily(
    name="timm",
    layers={
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
    },
    tensors={
        f"{BLOCK}.residual1.scale.gamma": "blocks.{i}.ls1.gamma",
        f"{BLOCK}.residual2.scale.gamma": "blocks.{i}.ls2.gamma",
    },
    positions="pos_embed",
    tokens=("cls_token", "reg_token"),
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
    tokens=("class_token",),
)
HUGGINGFACE = transformers_vit(
    "huggingface",
    "vit.encoder.layer.{i}",
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    {
        "attention.output": "attention.output.dense",
        "feedforward.up": "intermediate.dense",
        "feedforward.down": "output.dense",
    },
)
HUGGINGFACE5 = transformers_vit(  # names in memory since transformers 5; files keep the older ones
    "huggingface5",
    "vit.layers.{i}",
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    {
        "attention.output": "attention.o_proj",
        "feedforward.up": "mlp.fc1",
        "feedforward.down": "mlp.fc2",
    },
)
FAMILIES: dict[str, ViTFamily] = {
    family.name: family for family in (TIMM, TORCHVISION, HUGGINGFACE, HUGGINGFACE5)
}
BY_MODEL_TYPE = {"vit": HUGGINGFACE}  # of files, by the model_type in config.json
