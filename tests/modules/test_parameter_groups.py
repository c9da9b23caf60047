"""Depths and roles of parameters, of encoder-decoders and of stems of one's own."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.models.seq2seq import Seq2Seq
from modules.models.vit import ViT, ViTConfig
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.patch_embedding import STEMS, cut_patches
from tests.helpers.command import Patch
from tests.helpers.tiny_models import SEQ2SEQ, STACK


@pytest.mark.parametrize("tying", ["none", "inputs", "target"])
def test_the_output_layer_of_an_encoder_decoder_comes_last(tying: str) -> None:
    depths = parameter_depths(Seq2Seq(replace(SEQ2SEQ, tying=tying, output_bias=True)))
    top = max(depths.values())
    last = {name for name in depths if name.startswith(("unembed.", "head."))}
    assert {depths[name] for name in last} == {top} and "head.bias" in last
    assert ("unembed.weight" in last) == (tying != "target")
    assert depths["embed.weight"] == 0
    assert all(depths[name] < top for name in depths if ".blocks." in name)


def test_positions_and_norms_of_both_sides_come_first() -> None:
    net = Seq2Seq(replace(SEQ2SEQ, position="learned", embedding_norm=True))
    depths = parameter_depths(net)
    for side in ("encoder", "decoder"):
        assert depths[f"{side}.position.table"] == depths[f"{side}.norm.weight"] == 0
    masked = MaskedAutoencoder(
        MAEConfig(8, 2, 1, position="learned", stack=STACK, decoder=replace(STACK, depth=1))
    )
    assert parameter_depths(masked)["decoder.position.table"] == 1 + STACK.depth


class LinearStem(nn.Module):
    """Patches by a linear layer: (B, C, H, W) -> (B, N, E)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = nn.Linear(channels * patch**2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(cut_patches(x, self.patch))  # (B, N, C P P) -> (B, N, E)


class NoLayer(LinearStem):
    """The pixels themselves."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        nn.Module.__init__(self)
        self.patch = patch
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        patches = cut_patches(x, self.patch)  # (B, N, C P P)
        return F.pad(patches, (0, len(self.scale) - patches.shape[-1])) * self.scale


@pytest.mark.parametrize("stem", [LinearStem, NoLayer])
@pytest.mark.parametrize("patch", [1, 4, 6])
def test_stems_of_your_own(stem: type[nn.Module], patch: int, monkeypatch: Patch) -> None:
    monkeypatch.setitem(STEMS, "mine", stem)
    net = ViT(ViTConfig(12, patch, 1, 3, stem="mine", stack=replace(STACK, width=36)))
    assert net(torch.rand(2, 1, 12, 12)).shape == (2, 3)
    roles = parameter_roles(net)
    tables = {name for name, role in roles.items() if role == "table"}
    assert tables == {name for name in roles if "linear.weight" in name}
    assert len(tables) == 1 + (stem is LinearStem)
