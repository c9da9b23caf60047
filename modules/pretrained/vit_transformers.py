"""ViT and DeiT of transformers: weights and config.json, converted both ways."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from modules.config import StackConfig, require
from modules.models.vit import ViTConfig
from modules.position import build_position
from modules.pretrained.family import TransformersFamily
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    build_config,
    check_feedforward,
    check_fixed_options,
    check_heads,
    count_classes,
    write_options,
)
from modules.pretrained.vit import (
    BLOCK,
    POSITION_TABLE,
    TIMM,
    TOKENS,
    TORCHVISION,
    ViTFamily,
)
from modules.pretrained.weights import Layers, State

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
FIXED_POSITIONS = ("none", "sinusoidal", "sincos2d")  # which are added, so that a table equals them
COMMON = {  # of the blocks of all their models
    "order": "pre",
    "norm": "layernorm",
    "final_norm": True,
    "attention": "dot",
    "bias": True,
    "mlp_bias": True,
    "qk_norm": False,
    "layer_scale": None,
    "conv_kernel": None,
}
WHOLE = {  # of the rest of their encoders
    "position": "learned",
    "stem": "patch",
    "has_class_token": True,
    "register_tokens": 0,
    "norm_after_pool": False,
}


@dataclass(frozen=True, kw_only=True)
class TransformersViT(ViTFamily, TransformersFamily[ViTConfig]):
    """The ViT of transformers, whose config.json says the sizes; arguments as in both bases, and:

    Args:
        head: How the name of the class of a classifier ends.
    """

    architecture: str = "ViT"
    head: str = ""
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

    def config_to_external(self, config: Any) -> Settings:
        """Returns the config.json of a classifier of ours, without the names of its classes.

        Raises `ValueError` if no model of theirs can equal ours, with the reason.
        """
        family = f"transformers' {self.architecture}"
        check_fixed_options(family, config, {"architecture": "vit"})
        check_fixed_options(family, config.stack, COMMON)
        config = with_learned_positions(config)
        check_fixed_options(family, config, {"pool": "cls"} | WHOLE)
        check_feedforward(family, config, self.activations)
        check_heads(family, config.stack)
        return {
            **write_options(config, self.plain_options, self.activations),
            "model_type": self.architecture.lower(),
            "architectures": [f"{self.architecture}ForImageClassification{self.head}"],
        }

    def check_saved(self, state: State, config: ViTConfig) -> None:
        wanted = config.prefix_tokens + math.prod(config.grid)
        rows = state[self.positions].shape[1]
        require(rows == wanted, f"{self.positions} has {rows} rows, but {wanted} by config.json.")

    @property
    def plain_options(self) -> dict[str, str]:
        """`options` without the size of heads, which follows from others in what is written."""
        return {theirs: ours for theirs, ours in self.options.items() if ours != "head_dim"}

    def tables(self, config: Any) -> dict[str, StackConfig]:
        """Returns our names of the tables of positions, each with the stack that reads it."""
        return {POSITION_TABLE: config.stack}

    def weights_to_external(
        self, state: State, config: Any, prefix_positions: bool | None = None
    ) -> State:
        """As in the base class; fixed positions become the tables that they stand for."""
        if config.position in FIXED_POSITIONS:
            device = next(iter(state.values())).device
            with device:
                state = state | fixed_tables(config, self.tables(config))
            config = with_learned_positions(config)
        return super().weights_to_external(state, config, prefix_positions)


def with_learned_positions(config: Any) -> Any:
    """Returns the config of an equal network with learned positions, if they are fixed."""
    if config.position not in FIXED_POSITIONS:
        return config
    return replace(config, position="learned", position_options={})


def fixed_tables(config: Any, stacks: Mapping[str, StackConfig]) -> State:
    """Returns the tables that fixed positions stand for, by name; `stacks` read them."""
    tables = {}
    for name, stack in stacks.items():
        position = build_position(config.position, config.position_options, stack, config.grid)
        nothing = torch.zeros(1, math.prod(config.grid), stack.width)
        tables[name] = position.embed(nothing)[0].unflatten(0, config.grid)  # (rows, columns, E)
    return tables


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
        tokens={"class": "vit.embeddings.cls_token"},
    )


def transformers_deit(vit: TransformersViT) -> TransformersViT:
    """Returns the family of `DeiTForImageClassificationWithTeacher`, given that of the ViT."""

    def renamed(theirs: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(theirs, str):
            return re.sub("^vit", "deit", theirs)
        return tuple(re.sub("^vit", "deit", part) for part in theirs)

    layers: Layers = {ours: renamed(theirs) for ours, theirs in vit.layers.items()}
    layers |= {
        "head.linear": "cls_classifier",
        "distillation_head.linear": "distillation_classifier",
    }
    return replace(
        vit,
        name=vit.name.replace("huggingface", "deit"),
        architecture="DeiT",
        head="WithTeacher",
        layers=layers,
        positions="deit.embeddings.position_embeddings",
        tokens={
            "class": "deit.embeddings.cls_token",
            "distillation": "deit.embeddings.distillation_token",
        },
        fixed={"distillation_token": True},
        prefix="deit.",
        heads=("cls_classifier.", "distillation_classifier.", POSITION_TABLE, TOKENS),
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
DEIT = transformers_deit(HUGGINGFACE)
DEIT5 = transformers_deit(HUGGINGFACE5)
FAMILIES: dict[str, ViTFamily] = {
    family.name: family for family in (TIMM, TORCHVISION, HUGGINGFACE, HUGGINGFACE5, DEIT, DEIT5)
}
# Of files, by the model_type in config.json. Of a masked autoencoder, the decoder is left out.
BY_MODEL_TYPE: dict[str, TransformersViT] = {
    "vit": HUGGINGFACE,
    "vit_mae": HUGGINGFACE,
    "deit": DEIT,
}
