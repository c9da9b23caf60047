"""ViT weights from and to timm, torchvision and Hugging Face: one table of names per family, read both ways.

Those libraries may add a position to class and register tokens; that is a constant, so here it is part of the token.
"""

import math
from dataclasses import dataclass

import torch

from modules.config import require
from modules.models.vit import ViT, ViTConfig
from modules.position import resize_grid
from modules.pretrained.names import (
    Layers,
    Names,
    State,
    check_fit,
    check_given,
    full_names,
    give,
    take,
)


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
    layers |= {
        f"stack.blocks.{{i}}.{ours}": f"{block}.{theirs}"
        for ours, theirs in names.items()
        if len(ours) > 1
    }
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
            "stack.blocks.{i}.residual1.scale.gamma": "blocks.{i}.ls1.gamma",
            "stack.blocks.{i}.residual2.scale.gamma": "blocks.{i}.ls2.gamma",
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


def to_tessera(
    family: str, state: State, config: ViTConfig, prefix_positions: bool | None = None
) -> State:
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
    require(
        config.position == "learned",
        f'{family} weights need position "learned", not "{config.position}".',
    )
    ours = take(table.names(config), rest)
    require(
        table.positions in rest,
        f"{table.positions} is missing: these are not weights of a {family} ViT.",
    )
    positions = rest.pop(table.positions)[0]  # (prefix and patches, E)
    tokens = [rest.pop(name)[0] for name in table.tokens if name in rest]
    prefix = torch.cat(tokens) if tokens else positions[:0]  # (P, E)
    covered = covered_tokens(table.positions, len(positions), len(prefix), prefix_positions)
    patches = positions[covered:]
    side = math.isqrt(len(patches))
    ours["position.table"] = resize_grid(
        patches.unflatten(0, (side, side)), config.grid
    )  # (rows, columns, E)
    if len(prefix):
        ours["prefix.vectors"] = prefix + positions[:covered] if covered else prefix
    with torch.device("meta"):
        check_fit(family, ours, rest, ViT(config).state_dict(), ("head.linear.",))
    if len(ours.get("head.linear.bias", ())) != config.num_classes:
        ours = {name: value for name, value in ours.items() if not name.startswith("head.linear.")}
    return ours


def from_tessera(
    family: str, state: State, config: ViTConfig, prefix_positions: bool | None = None
) -> State:
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
    require(
        config.position == "learned",
        f'{family} has no position "{config.position}"; only "learned" can go there.',
    )
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
        covered
        for covered in choices
        if count > covered and math.isqrt(count - covered) ** 2 == count - covered
    ]
    require(fitting != [], f"{count} positions in {name} do not form a square grid.")
    require(
        len(fitting) == 1,
        f"{count} positions in {name} form a grid with and without {prefix} tokens before them.",
    )
    return fitting[0]
