"""ViT weights from and to timm, torchvision and Hugging Face: one table of names per family, read both ways.

Those libraries may add a position to class and register tokens; that is a constant, so here it is part of the token.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modules.config import FeedForwardName, PoolName, StackConfig, require
from modules.position import resize_grid
from modules.pretrained.names import Layers, Names, State, check_fit, check_given, full_names, give, take
from modules.vit import ViT, ViTConfig


@dataclass(frozen=True)
class Family:
    """How a library names the weights of a ViT.

    Args:
        layers: Our name -> theirs, without ".weight" / ".bias"; several names stand for rows one below the other.
        positions: Their table of positions, (1, prefix and patches or patches only, E).
        tokens: Their class token and register tokens, (1, count, E) each.
        raw: Our full name -> theirs, where theirs does not end in ".weight" or ".bias".
    """

    layers: Layers
    positions: str
    tokens: tuple[str, ...]
    raw: dict[str, str]

    def names(self, config: ViTConfig) -> Names:
        """All of our names, positions and tokens aside, with theirs."""
        return full_names(self.layers, config.stack.depth, self.raw)


def _hugging_face(block: str, names: dict[str, str]) -> Family:
    layers: Layers = {
        "embed.stem.conv": "vit.embeddings.patch_embeddings.projection",
        "stack.norm": "vit.layernorm",
        "head.linear": "classifier",
        "stack.blocks.{i}.norm1": f"{block}.layernorm_before",
        "stack.blocks.{i}.norm2": f"{block}.layernorm_after",
        "stack.blocks.{i}.attention.qkv": tuple(f"{block}.{names[part]}" for part in "qkv"),
    }
    layers |= {f"stack.blocks.{{i}}.{ours}": f"{block}.{theirs}" for ours, theirs in names.items() if len(ours) > 1}
    return Family(layers, "vit.embeddings.position_embeddings", ("vit.embeddings.cls_token",), {})


TABLES: dict[str, Family] = {
    "timm": Family(
        {
            "embed.stem.conv": "patch_embed.proj",
            "stack.blocks.{i}.norm1": "blocks.{i}.norm1",
            "stack.blocks.{i}.attention.qkv": "blocks.{i}.attn.qkv",
            "stack.blocks.{i}.attention.q_norm": "blocks.{i}.attn.q_norm",
            "stack.blocks.{i}.attention.k_norm": "blocks.{i}.attn.k_norm",
            "stack.blocks.{i}.attention.output": "blocks.{i}.attn.proj",
            "stack.blocks.{i}.norm2": "blocks.{i}.norm2",
            "stack.blocks.{i}.feedforward.up": "blocks.{i}.mlp.fc1",
            "stack.blocks.{i}.feedforward.down": "blocks.{i}.mlp.fc2",
            "stack.norm": "norm",
            "head.norm": "fc_norm",
            "head.linear": "head",
        },
        "pos_embed",
        ("cls_token", "reg_token"),
        {
            "stack.blocks.{i}.end1.scale.gamma": "blocks.{i}.ls1.gamma",
            "stack.blocks.{i}.end2.scale.gamma": "blocks.{i}.ls2.gamma",
        },
    ),
    "torchvision": Family(
        {
            "embed.stem.conv": "conv_proj",
            "stack.blocks.{i}.norm1": "encoder.layers.encoder_layer_{i}.ln_1",
            "stack.blocks.{i}.attention.output": "encoder.layers.encoder_layer_{i}.self_attention.out_proj",
            "stack.blocks.{i}.norm2": "encoder.layers.encoder_layer_{i}.ln_2",
            "stack.blocks.{i}.feedforward.up": "encoder.layers.encoder_layer_{i}.mlp.0",
            "stack.blocks.{i}.feedforward.down": "encoder.layers.encoder_layer_{i}.mlp.3",
            "stack.norm": "encoder.ln",
            "head.linear": "heads.head",
        },
        "encoder.pos_embedding",
        ("class_token",),
        {
            "stack.blocks.{i}.attention.qkv.weight": "encoder.layers.encoder_layer_{i}.self_attention.in_proj_weight",
            "stack.blocks.{i}.attention.qkv.bias": "encoder.layers.encoder_layer_{i}.self_attention.in_proj_bias",
        },
    ),
    "huggingface": _hugging_face(
        "vit.encoder.layer.{i}",
        {
            "q": "attention.attention.query",
            "k": "attention.attention.key",
            "v": "attention.attention.value",
            "attention.output": "attention.output.dense",
            "feedforward.up": "intermediate.dense",
            "feedforward.down": "output.dense",
        },
    ),
    "huggingface5": _hugging_face(  # names in memory from transformers 5 on; files keep the older ones
        "vit.layers.{i}",
        {
            "q": "attention.q_proj",
            "k": "attention.k_proj",
            "v": "attention.v_proj",
            "attention.output": "attention.o_proj",
            "feedforward.up": "mlp.fc1",
            "feedforward.down": "mlp.fc2",
        },
    ),
}


def to_tessera(family: str, state: State, config: ViTConfig) -> State:
    """Weights of another library's ViT under our names, positions re-gridded to the image size of `config`.

    Args:
        family: Entry of `TABLES`.
        state: Their `state_dict()`.
        config: Our model; where its number of classes is not that of `state`, the classifier is left out.

    Returns:
        What `ViT(config).load_state_dict` takes, less a classifier that does not fit.

    Raises:
        ValueError: Weights that our model has no place for, or that are missing, by name.
    """
    table, rest = TABLES[family], dict(state)
    require(config.position == "learned", f'{family} weights need position "learned", not "{config.position}".')
    ours = take(table.names(config), rest)
    require(table.positions in rest, f"{table.positions} is missing: these are not weights of a {family} ViT.")
    positions = rest.pop(table.positions)[0]  # (prefix and patches, E)
    tokens = [rest.pop(name)[0] for name in table.tokens if name in rest]
    prefix = torch.cat(tokens) if tokens else positions[:0]  # (P, E)
    side = round((len(positions) - len(prefix)) ** 0.5)
    covered = len(prefix) if side**2 + len(prefix) == len(positions) else 0
    patches = positions[covered:]
    side = round(len(patches) ** 0.5)
    require(side**2 == len(patches), f"{len(patches)} positions in {table.positions} do not form a square grid.")
    ours["position.table"] = resize_grid(patches.unflatten(0, (side, side)), config.grid)  # (rows, columns, E)
    if len(prefix):
        ours["prefix.vectors"] = prefix + positions[:covered] if covered else prefix
    with torch.device("meta"):
        check_fit(family, ours, rest, ViT(config).state_dict(), ("head.linear.",))
    if len(ours.get("head.linear.bias", ())) != config.num_classes:
        ours = {name: value for name, value in ours.items() if not name.startswith("head.linear.")}
    return ours


def from_tessera(family: str, state: State, config: ViTConfig, prefix_positions: bool | None = None) -> State:
    """Our weights under another library's names, for its model of the same sizes.

    Args:
        family: Entry of `TABLES`.
        state: Our `state_dict()`.
        config: Our model.
        prefix_positions: Whether their table of positions covers class and register tokens (zeros are put there);
            None: yes, unless there are registers, as in most of timm's models.

    Raises:
        ValueError: Weights that their model has no place for, by name.
    """
    table, rest = TABLES[family], dict(state)
    require(config.position == "learned", f'{family} has no position "{config.position}"; only "learned" can go there.')
    theirs = give(table.names(config), rest)
    positions = rest.pop("position.table").flatten(0, 1)  # (N, E)
    prefix = rest.pop("prefix.vectors", positions[:0])
    if prefix_positions if prefix_positions is not None else not config.register_tokens:
        positions = torch.cat((torch.zeros_like(prefix), positions))  # (P + N, E)
    theirs[table.positions] = positions[None]
    counts = (int(config.has_class_token), config.register_tokens)[: len(table.tokens)]
    require(sum(counts) == len(prefix), f"{family} has no place for register tokens.")
    for token, vectors in zip(table.tokens, prefix.split(list(counts)), strict=True):
        if len(vectors):
            theirs[token] = vectors[None]  # (1, count, E)
    check_given(family, rest)
    return theirs


def config_from_timm_state(state: State, heads: int | None = None) -> ViTConfig:
    """The config of a timm ViT, read off the shapes of its weights.

    Args:
        state: timm's `state_dict()`.
        heads: Number of attention heads, which shapes do not tell; None: heads of width 64, as in all published sizes.

    Raises:
        ValueError: These are not weights of a plain timm ViT.
    """
    for name in ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"):
        require(name in state, f"{name} is missing: these are not weights of a plain timm ViT.")
    width, channels, patch, _ = state["patch_embed.proj.weight"].shape
    class_token = "cls_token" in state
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    count = state["pos_embed"].shape[1]
    patches = next((n for n in (count - class_token - registers, count) if round(n**0.5) ** 2 == n), 0)
    require(patches > 0, f"{count} positions in pos_embed do not form a square grid.")
    hidden = len(state["blocks.0.mlp.fc1.weight"])
    pool: PoolName = "cls" if class_token and "fc_norm.weight" not in state else "mean"
    numbers = [int(found[1]) for found in (re.match(r"blocks\.(\d+)\.", name) for name in state) if found]
    stack = StackConfig(
        width=width,
        depth=1 + max(numbers),
        heads=heads or width // 64,
        mlp_width=None if hidden == 4 * width else hidden,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in state else None,
    )
    return ViTConfig(
        image_size=patch * round(patches**0.5),
        patch_size=patch,
        channels=channels,
        num_classes=len(state["head.bias"]) if "head.bias" in state else 1,
        pool=pool,
        class_token=None if class_token == (pool == "cls") else class_token,
        register_tokens=registers,
        norm_after_pool="fc_norm.weight" in state,
        stack=stack,
    )


TIMM_POOLS: dict[str, PoolName] = {"token": "cls", "avg": "mean", "max": "max"}
TIMM_ACTIVATIONS: list[tuple[str, FeedForwardName]] = [
    ("GELUTanh", "gelu_tanh"),
    ("GELU(approximate='tanh')", "gelu_tanh"),
    ("GELU", "gelu"),
    ("SiLU", "silu"),
    ("ReLU", "relu"),
]


def config_from_timm_model(model: nn.Module) -> ViTConfig:
    """The config of a timm `VisionTransformer`.

    Raises:
        ValueError: The model has parts that this library does not, by name.
    """
    kind = type(model).__name__
    require(kind == "VisionTransformer", f"timm's {kind} is not a plain ViT; choose a vit_* or deit3_* model.")
    pool = TIMM_POOLS.get(str(model.global_pool))
    require(pool is not None, f'timm pooling "{model.global_pool}" is not supported; choose a model with token or avg.')
    block: Any = model.blocks[0]  # type: ignore[index]
    require(type(block).__name__ == "Block", f"timm's {type(block).__name__} is not supported; choose a plain ViT.")
    require(isinstance(model.norm_pre, nn.Identity), "timm's norm before the blocks is not supported.")
    config = config_from_timm_state(model.state_dict(), block.attn.num_heads)
    activation = next((ours for name, ours in TIMM_ACTIVATIONS if repr(block.mlp.act).startswith(name)), None)
    require(activation is not None, f"timm's activation {block.mlp.act} is not supported.")
    stack = replace(config.stack, norm_eps=block.norm1.eps, feedforward=activation)  # type: ignore[arg-type]
    class_token = None if config.has_class_token == (pool == "cls") else config.has_class_token
    return replace(config, pool=pool, class_token=class_token, stack=stack)  # type: ignore[arg-type]
