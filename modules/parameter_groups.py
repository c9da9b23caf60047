"""Roles and depths of parameters, for the optimizer's parameter groups."""

import re
from typing import Literal

from torch import nn

from modules.heads import ClassifierHead, PixelHead
from modules.models.seq2seq import Seq2Seq
from modules.patch_embedding import PatchEmbedding

Role = Literal["matrix", "table", "scalar"]


def parameter_roles(net: nn.Module) -> dict[str, Role]:
    """One role for each parameter of `net`, by name (shared ones under their first name).

    - "matrix": weights of hidden linear layers and convolutions; for Muon, with weight decay.
    - "table": weights of input and output layers: embeddings, the first layer of a patch embedding,
      classifiers; for AdamW, with weight decay.
    - "scalar": all others: biases, norms, scales, positions, class tokens and the like, learned
      queries; for AdamW, without weight decay.
    """
    ends: set[int] = set()  # the first and last layers
    for module in net.modules():
        if isinstance(module, PatchEmbedding):
            layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
            ends |= {id(first) for first in layers[:1]}
        elif isinstance(module, ClassifierHead | PixelHead):
            ends |= {id(part) for part in module.modules()}
    roles: dict[int, Role] = {}
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            role: Role = "scalar"
            if name == "weight" and isinstance(module, nn.Linear | nn.Conv2d):
                role = "table" if id(module) in ends else "matrix"
            elif name == "weight" and isinstance(module, nn.Embedding):
                role = "table"
            roles.setdefault(id(parameter), role)
    return {name: roles[id(parameter)] for name, parameter in net.named_parameters()}


def parameter_depths(net: nn.Module) -> dict[str, int]:
    """How far from the input each parameter is, by name (shared ones under their first name).

    0 for what comes before the first block (stem, embeddings, positions, extra tokens), i + 1 for
    block i, and one more than the last block for what follows (final norm, pooling, head).
    """
    blocks: list[str] = []
    depths: dict[str, int] = {}
    for name, _ in net.named_parameters():
        block = re.match(r"(.*\.)?blocks\.\d+\.", name)
        if block and block[0] not in blocks:
            blocks.append(block[0])
        depths[name] = len(blocks) + (block is None and bool(blocks))
    # An encoder-decoder registers its output layer before its blocks, and positions and embedding
    # norm of its decoder after the encoder. The decoder of a masked autoencoder does follow.
    last = [name for name in depths if name.startswith(("unembed.", "head."))]
    inputs = ("decoder.position.", "decoder.norm.") if isinstance(net, Seq2Seq) else ()
    first = [name for name in depths if name.startswith(inputs)]
    return depths | dict.fromkeys(last, len(blocks) + 1) | dict.fromkeys(first, 0)
