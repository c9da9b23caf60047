"""Masked autoencoders of transformers (`ViTMAEForPreTraining`), converted both ways.

Their positions are tables that are not trained: sin and cos of column and row. Here the tables are
learned positions.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modules.config import StackConfig, require
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.position import resize_grid
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    build_config,
    check_feedforward,
    check_fixed_options,
    check_heads,
    read_options,
    write_options,
)
from modules.pretrained.vit import POSITION_TABLE, TOKENS
from modules.pretrained.vit_transformers import (
    COMMON,
    HUGGINGFACE,
    OPTIONS,
    WHOLE,
    TransformersViT,
    with_learned_positions,
)
from modules.pretrained.weights import Layers, Names, State, weight_names

DECODER = "decoder.decoder_layers.{i}"
BLOCK = "decoder.stack.blocks.{i}"
TABLE = f"decoder.{POSITION_TABLE}"
THEIR_TABLE = "decoder.decoder_pos_embed"
DECODER_LAYERS: Layers = {
    "decoder.project": "decoder.decoder_embed",
    f"{BLOCK}.norm1": f"{DECODER}.layernorm_before",
    f"{BLOCK}.attention.qkv": (
        f"{DECODER}.attention.attention.query",
        f"{DECODER}.attention.attention.key",
        f"{DECODER}.attention.attention.value",
    ),
    f"{BLOCK}.attention.output": f"{DECODER}.attention.output.dense",
    f"{BLOCK}.norm2": f"{DECODER}.layernorm_after",
    f"{BLOCK}.feedforward.up": f"{DECODER}.intermediate.dense",
    f"{BLOCK}.feedforward.down": f"{DECODER}.output.dense",
    "decoder.stack.norm": "decoder.decoder_norm",
    "decoder.head": "decoder.decoder_pred",
}
DECODER_TENSORS = {"decoder.mask_token": "decoder.mask_token", TABLE: TABLE}
DECODER_OPTIONS = {  # of their config.json -> ours
    "decoder_hidden_size": "width",
    "decoder_num_hidden_layers": "depth",
    "decoder_num_attention_heads": "heads",
    "decoder_intermediate_size": "mlp_width",
}
SAME = ("norm_eps", "feedforward", "qkv_bias", "dropout", "attention_dropout")


@dataclass(frozen=True, kw_only=True)
class MAEFamily(TransformersViT):
    """ViTMAE of transformers; arguments as `TransformersViT`."""

    def full_name(self, name: str) -> str:
        """As in the base class; transformers 5 saves the decoder's blocks under another name."""
        return super().full_name(name.replace("decoder_encoder.layer.", "decoder_layers."))

    def names(self, config: Any) -> Names:
        decoder = weight_names(DECODER_LAYERS, config.decoder.depth, DECODER_TENSORS)
        return super().names(config) | decoder

    def networks(self, config: Any) -> list[nn.Module]:
        return [MaskedAutoencoder(config)]

    def check(self, config: Any) -> None:
        check_fixed_options(self.name, config, WHOLE)
        for stack in (config.stack, config.decoder):
            check_fixed_options(self.name, stack, COMMON)
            check_feedforward(self.name, stack, self.activations)
            check_heads(self.name, stack)
        check_fixed_options(
            f"{self.name} with this encoder: decoder",
            config.decoder,
            {name: getattr(config.stack, name) for name in SAME},
        )

    def import_tensor(self, name: str, value: Tensor, config: Any) -> Tensor:
        """As in the base class; their pixels are in the order (P, P, C), ours in (C, P, P)."""
        if name == "decoder.mask_token":
            return value.flatten()  # (1, 1, D) -> (D,)
        if not name.startswith("decoder.head."):
            return super().import_tensor(name, value, config)
        size = config.patch_size
        if len(value) != config.channels * size**2:
            return value  # which is refused
        pixels = value.unflatten(0, (size, size, -1))  # (P, P, C) or (P, P, C, D)
        return pixels.movedim(2, 0).flatten(0, 2)  # (C P P) or (C P P, D)

    def export_tensor(self, name: str, value: Tensor, config: Any) -> Tensor:
        if name == "decoder.mask_token":
            return value[None, None]  # (D,) -> (1, 1, D)
        if not name.startswith("decoder.head."):
            return super().export_tensor(name, value, config)
        size = config.patch_size
        pixels = value.unflatten(0, (-1, size, size))  # (C, P, P) or (C, P, P, D)
        return pixels.movedim(0, 2).flatten(0, 2)  # (P P C) or (P P C, D)

    def weights_from_external(
        self, state: State, config: Any, prefix_positions: bool | None = None
    ) -> State:
        """As in the base class; files of an encoder alone have no decoder."""
        rest = dict(state)
        if THEIR_TABLE in rest:
            table = rest.pop(THEIR_TABLE)  # (1, 1 + N, D)
            side = math.isqrt(table.shape[1] - 1) if table.dim() == 3 else 0
            require(
                table.dim() == 3 and table.shape[1] == 1 + side**2,
                f"{THEIR_TABLE} is {tuple(table.shape)}, not (1, 1 + rows x columns, width).",
            )
            require(
                not table[:, 0].any(),
                f"{THEIR_TABLE} has a position for the class token, which models here lack.",
            )
            grid = table[0, 1:].unflatten(0, (side, side))  # (rows, columns, D)
            rest[TABLE] = resize_grid(grid, config.grid)
        return super().weights_from_external(rest, config, prefix_positions)

    def tables(self, config: Any) -> dict[str, StackConfig]:
        return {**super().tables(config), TABLE: config.decoder}

    def weights_to_external(
        self, state: State, config: Any, prefix_positions: bool | None = None
    ) -> State:
        theirs = super().weights_to_external(state, config, prefix_positions)
        table = theirs.pop(TABLE).flatten(0, 1)  # (N, D)
        theirs[THEIR_TABLE] = torch.cat((torch.zeros_like(table[:1]), table))[None]  # (1, 1 + N, D)
        return theirs

    def config_from_external(self, settings: Settings) -> Any:
        """Returns our config, an `MAEConfig`."""
        options = self.read(settings, StackConfig, MAEConfig)
        decoder = read_options(
            settings, DECODER_OPTIONS, tuple(DECODER_OPTIONS.values()), StackConfig
        )
        shared = {"position": "learned", "num_classes": None, "mlp_dropout": 0.0}
        stacks = {"stack": {}, "decoder": decoder}
        return build_config(MAEConfig, {**options, **shared}, stacks)

    def config_to_external(self, config: Any) -> Settings:
        """Returns the config.json of a model of ours.

        Raises `ValueError` if no model of theirs can equal ours, with the reason.
        """
        config = with_learned_positions(config)
        self.check(config)
        return {
            **write_options(config, self.plain_options, self.activations),
            **write_options(config.decoder, DECODER_OPTIONS, self.activations),
            "model_type": "vit_mae",
            "architectures": [f"{self.architecture}ForPreTraining"],
        }


MAE = MAEFamily(
    name="vit_mae",
    layers={ours: theirs for ours, theirs in HUGGINGFACE.layers.items() if ours != "head.linear"},
    positions=HUGGINGFACE.positions,
    tokens=HUGGINGFACE.tokens,
    architecture="ViTMAE",
    options={**OPTIONS, "mask_ratio": "mask_ratio", "norm_pix_loss": "norm_pixels"},
    activations=ACTIVATIONS,
    unused=r"$^",
    optional=("decoder.",),
    heads=("decoder.", POSITION_TABLE, TOKENS),
)
FAMILIES = {"vit_mae": MAE}
