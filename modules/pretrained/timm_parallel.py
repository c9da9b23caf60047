"""timm's `ParallelScalingBlock` (Dehghani 2023): its weights as those of timm's plain `Block`."""

import re
from typing import Any, NamedTuple

import torch

from modules.config import require
from modules.pretrained.weights import State

PARALLEL = "ParallelScalingBlock"
IN_PROJ = "blocks.0.in_proj.weight"
LAYERS = {  # of a parallel block -> of a plain one
    "in_norm": "norm1",
    "q_norm": "attn.q_norm",
    "k_norm": "attn.k_norm",
    "attn_out_proj": "attn.proj",
    "mlp_out_proj": "mlp.fc2",
}
TIMM_NORMS = {"LayerNorm": "layernorm", "RmsNorm": "rmsnorm"}  # timm's class -> ours
# timm's model of such blocks; exports override its `pre_norm` and `norm_layer`.
PARALLEL_ARCHITECTURE = "vit_large_patch14_xp_224"


class BlockParts(NamedTuple):
    """What the weights of a block of timm do not tell."""

    heads: int
    norm: Any
    activation: Any
    scale: Any


def block_parts(block: Any) -> BlockParts:
    """Returns parts of timm's block; raises `ValueError` if it is not supported, by name."""
    name = type(block).__name__
    if name == PARALLEL:
        return BlockParts(block.num_heads, block.in_norm, block.mlp_act, block.ls)
    reason = "is not supported; choose a model of plain or parallel blocks"
    require(name == "Block", f"timm's {name} {reason}.")
    act = getattr(block.mlp, "act", None)
    return BlockParts(block.attn.num_heads, block.norm1, act, block.ls1)


def is_parallel(state: State) -> bool:
    """Whether weights of timm are of parallel blocks."""
    return IN_PROJ in state


def to_plain_blocks(state: State) -> State:
    """Returns weights of timm, those of parallel blocks under the names of plain ones.

    Raises `ValueError` if `in_proj` has too few rows.
    """
    if not is_parallel(state):
        return state
    width = state[IN_PROJ].shape[-1]
    plain: State = {}
    for name, value in state.items():
        found = re.fullmatch(r"(blocks\.\d+\.)(\w+)(\.\w+)?", name)
        block, layer, end = found.groups() if found else ("", "", "")
        if layer == "in_proj":
            hidden = len(value) - 3 * width
            require(hidden > 0, f"{name} has {len(value)} rows, too few for width {width}.")
            up, qkv = value.split((hidden, 3 * width))  # (F, E) and (3 E, E), or (F,) and (3 E,)
            plain |= {f"{block}mlp.fc1{end}": up, f"{block}attn.qkv{end}": qkv}
        elif layer == "mlp_bias":
            plain[f"{block}mlp.fc1.bias"] = value
        elif layer == "ls":  # one scale of both sub-layers
            plain |= {f"{block}ls1{end}": value, f"{block}ls2{end}": value.clone()}
        else:
            plain[f"{block}{LAYERS[layer]}{end}" if layer in LAYERS else name] = value
    return plain


def to_parallel_blocks(state: State, depth: int) -> State:
    """Returns weights of timm's plain blocks under the names of parallel ones.

    Two scales that differ become parts of the projections that they scale.
    """
    theirs = dict(state)
    names = {plain: parallel for parallel, plain in LAYERS.items()}
    for i in range(depth):
        block = f"blocks.{i}."
        found = [name for name in theirs if name.startswith(block)]
        plain = {name.removeprefix(block): theirs.pop(name) for name in found}
        if "ls1.gamma" in plain:
            theirs[f"{block}ls.gamma"] = merge_scales(plain)
        parts = plain.pop("mlp.fc1.weight"), plain.pop("attn.qkv.weight")
        theirs[f"{block}in_proj.weight"] = torch.cat(parts)  # (F + 3 E, E)
        bias = plain.pop("mlp.fc1.bias")
        if "attn.qkv.bias" in plain:
            theirs[f"{block}in_proj.bias"] = torch.cat((bias, plain.pop("attn.qkv.bias")))
        else:
            theirs[f"{block}mlp_bias"] = bias
        for name, value in plain.items():
            layer, _, end = name.rpartition(".")
            theirs[f"{block}{names.get(layer, layer)}.{end}"] = value
    return theirs


def merge_scales(plain: State) -> torch.Tensor:
    """Removes both scales (E,) of a block and returns one, with which it is the same function."""
    first, second = plain.pop("ls1.gamma"), plain.pop("ls2.gamma")
    if torch.equal(first, second):
        return first
    for layer, gamma in (("attn.proj", first), ("mlp.fc2", second)):
        plain[f"{layer}.weight"] = plain[f"{layer}.weight"] * gamma[:, None]
        plain[f"{layer}.bias"] = plain[f"{layer}.bias"] * gamma
    return torch.ones_like(first)
