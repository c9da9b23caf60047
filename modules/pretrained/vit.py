"""ViT weights from and to timm, torchvision and Hugging Face: one table of names per family, read both ways.

Those libraries may add a position to class and register tokens; that is a constant, so here it is part of the token.
"""

import math
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modules.config import FeedForwardName, PoolName, StackConfig, require
from modules.position import resize_grid
from modules.pretrained.names import Layers, Names, State, check_fit, check_given, full_names, give, take
from modules.pretrained.settings import check_feedforward, check_heads, check_options
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


def to_tessera(family: str, state: State, config: ViTConfig, prefix_positions: bool | None = None) -> State:
    """Weights of another library's ViT under our names, positions re-gridded to the image size of `config`.

    Args:
        family: Entry of `TABLES`.
        state: Their `state_dict()`.
        config: Our model; where its number of classes is not that of `state`, the classifier is left out.
        prefix_positions: Whether their table of positions covers class and register tokens; None: as its length tells.

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
    covered = covered_tokens(table.positions, len(positions), len(prefix), prefix_positions)
    patches = positions[covered:]
    side = math.isqrt(len(patches))
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


RANKS = {  # of weights whose shapes tell sizes
    "patch_embed.proj.weight": 4,
    "pos_embed": 3,
    "cls_token": 3,
    "reg_token": 3,
    "blocks.0.attn.qkv.weight": 2,
    "blocks.0.mlp.fc1.weight": 2,
    "head.bias": 1,
}
UNTOLD = ("heads", "feedforward", "norm_eps", "order")  # options of a stack that no shape tells; nor does one the pool


def config_from_timm_state(state: State, known: ViTConfig, prefix_positions: bool | None = None) -> ViTConfig:
    """The config of a timm ViT: sizes from the shapes of its weights, the rest from `known`.

    Args:
        state: timm's `state_dict()`.
        known: Says what shapes do not tell: pool, `UNTOLD`, and the start value of layer scale.
        prefix_positions: Whether pos_embed covers class and register tokens; None: as its length tells.

    Raises:
        ValueError: These are not weights of a plain timm ViT, or do not fit `known`.
    """
    needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    for name, rank in RANKS.items():
        require(name in state or name not in needed, f"{name} is missing: these are not weights of a plain timm ViT.")
        require(name not in state or state[name].dim() == rank, f"{name} does not have {rank} dimensions.")
    width, channels, patch, other = state["patch_embed.proj.weight"].shape
    require(patch == other, f"Patches of {patch} x {other} pixels are not square.")
    class_token = "cls_token" in state
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    covered = covered_tokens("pos_embed", state["pos_embed"].shape[1], class_token + registers, prefix_positions)
    hidden = len(state["blocks.0.mlp.fc1.weight"])
    numbers = [int(found[1]) for found in (re.match(r"blocks\.(\d{1,9})\.", name) for name in state) if found]
    stack = replace(
        known.stack,
        width=width,
        depth=1 + max(numbers),
        mlp_width=None if hidden == 4 * width else hidden,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        layer_scale=(known.stack.layer_scale or 1e-5) if "blocks.0.ls1.gamma" in state else None,
        final_norm=None if "norm.weight" in state or "fc_norm.weight" in state else False,
    )
    return replace(
        known,
        image_size=patch * round((state["pos_embed"].shape[1] - covered) ** 0.5),
        patch_size=patch,
        channels=channels,
        num_classes=len(state["head.bias"]) if "head.bias" in state else 1,
        class_token=None if class_token == (known.pool == "cls") else class_token,
        register_tokens=registers,
        norm_after_pool="fc_norm.weight" in state,
        stack=stack,
    )


def covered_tokens(name: str, count: int, prefix: int, covers: bool | None) -> int:
    """How many of a table's positions are of class and register tokens: all of those, or none.

    Args:
        name: Of the table, for errors.
        count: Number of positions.
        prefix: Number of class and register tokens.
        covers: Whether the table covers them; None: whichever leaves a square grid of patches.

    Raises:
        ValueError: Neither does, or both do.
    """
    choices = {prefix, 0} if covers is None else {prefix if covers else 0}
    fitting = [
        covered for covered in choices if count > covered and math.isqrt(count - covered) ** 2 == count - covered
    ]
    require(fitting != [], f"{count} positions in {name} do not form a square grid.")
    require(len(fitting) == 1, f"{count} positions in {name} form a grid with and without {prefix} tokens before them.")
    return fitting[0]


TIMM_POOLS: dict[PoolName, str] = {"cls": "token", "mean": "avg", "max": "max"}
TIMM_ACTIVATIONS: dict[str, FeedForwardName] = {
    "GELU()": "gelu",
    "GELU(approximate='none')": "gelu",
    "GELUTanh()": "gelu_tanh",
    "GELU(approximate='tanh')": "gelu_tanh",
    "SiLU()": "silu",
    "ReLU()": "relu",
}
TIMM_ALWAYS = {  # what no argument of timm's changes
    "position": "learned",
    "stem": "patch",
    "attention": "dot",
    "norm": "layernorm",
    "order": "pre",
    "bias": True,
    "mlp_bias": True,
}
START = ("training", "weight_init_mode", "fix_init", "pretrained_cfg", "default_cfg", "pretrained_model_args")


def timm_arguments(config: ViTConfig) -> dict[str, Any]:
    """Arguments with which timm's `VisionTransformer` is the same model, the eps of its norms (1e-6) aside.

    Raises:
        ValueError: It cannot be, with the option.
    """
    stack = config.stack
    check_options("timm", config, TIMM_ALWAYS)
    check_heads("timm", stack)
    check_feedforward("timm", config, TIMM_ACTIVATIONS)
    require(config.pool in TIMM_POOLS, f'timm models have no pool "{config.pool}".')
    ratio = stack.feedforward_width / stack.width
    if int(stack.width * ratio) < stack.feedforward_width:  # timm rounds down
        ratio = math.nextafter(ratio, math.inf)
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "embed_dim": stack.width,
        "depth": stack.depth,
        "num_heads": stack.heads,
        "mlp_ratio": ratio,
        "global_pool": TIMM_POOLS[config.pool],
        "class_token": config.has_class_token,
        "reg_tokens": config.register_tokens,
        "qkv_bias": stack.qkv_bias,
        "no_embed_class": config.register_tokens > 0,
        "final_norm": config.norm_after_pool or stack.has_final_norm,
        "fc_norm": config.norm_after_pool,
        "qk_norm": stack.qk_norm,
        "init_values": None if stack.layer_scale is None else stack.layer_scale or 1e-5,  # for 0 timm has none
        "act_layer": stack.feedforward,
    }


def config_from_timm_model(model: nn.Module) -> ViTConfig:
    """The config of a timm `VisionTransformer`.

    Raises:
        ValueError: The model has parts that this library does not, by name.
    """
    kind: Any = type(model)
    name = kind.__name__
    require(name == "VisionTransformer", f"timm's {name} is not a plain ViT; choose a vit_* or deit3_* model.")
    pool = next((ours for ours, name in TIMM_POOLS.items() if name == model.global_pool), None)
    require(pool is not None, f'timm pooling "{model.global_pool}" is not supported; choose a model with token or avg.')
    block: Any = model.blocks[0]  # type: ignore[index]
    name = type(block).__name__
    require(name == "Block", f"timm's {name} is not supported; choose a model of plain blocks.")
    act = repr(getattr(block.mlp, "act", None))
    require(act in TIMM_ACTIVATIONS, f"timm's activation {act} is not supported; choose a model with GELU.")
    norm: Any = type(block.norm1)
    require(norm.__name__ == "LayerNorm", f"timm's {norm.__name__} is not supported; choose a model with LayerNorm.")
    stack = StackConfig(
        width=model.embed_dim,  # type: ignore[arg-type]
        heads=block.attn.num_heads,
        feedforward=TIMM_ACTIVATIONS[act],
        norm_eps=block.norm1.eps,
        layer_scale=getattr(block.ls1, "init_values", None),
    )
    known = ViTConfig(pool=pool, stack=stack)  # type: ignore[arg-type]
    config = config_from_timm_state(model.state_dict(), known, not model.no_embed_class)
    arguments = timm_arguments(config) | {
        "num_classes": model.num_classes,  # 0: there is no classifier
        "no_embed_class": model.no_embed_class,
        "dynamic_img_size": model.dynamic_img_size,  # images of its own size are read alike
        "act_layer": lambda: deepcopy(block.mlp.act),
        "norm_layer": partial(norm, eps=block.norm1.eps),
    }
    with torch.device("meta"):
        plain = kind(**arguments)
    theirs, ours = anatomy(model), anatomy(plain)
    differ = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differ:
        had, wanted = theirs.get(differ[0], "missing"), ours.get(differ[0], "nothing")
        raise ValueError(f"{differ[0].strip('.')} of timm's model is {had}, where only {wanted} is supported.")
    return config


def anatomy(model: nn.Module) -> dict[str, Any]:
    """All that makes up a model but the values of its weights: classes of its parts, shapes and plain attributes."""
    found: dict[str, Any] = {}
    for path, part in model.named_modules():
        found[f"{path}."] = f"{type(part).__module__}.{type(part).__qualname__}"
        attributes = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        found |= {f"{path}.{name}": value for name, value in attributes.items() if name not in START}
    return found | {name: tuple(value.shape) for name, value in model.state_dict().items()}
