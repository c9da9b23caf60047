"""Depths of the parameters of networks whose output layer is made before their blocks."""

from dataclasses import replace

import pytest

from modules.models.seq2seq import Seq2Seq
from modules.parameter_groups import parameter_depths
from tests.helpers.tiny_models import SEQ2SEQ


@pytest.mark.parametrize("tying", ["none", "inputs", "target"])
def test_the_output_layer_of_an_encoder_decoder_comes_last(tying: str) -> None:
    depths = parameter_depths(Seq2Seq(replace(SEQ2SEQ, tying=tying, output_bias=True)))
    top = max(depths.values())
    last = {name for name in depths if name.startswith(("unembed.", "head."))}
    assert {depths[name] for name in last} == {top} and "head.bias" in last
    assert ("unembed.weight" in last) == (tying != "target")
    assert depths["embed.weight"] == 0
    assert all(depths[name] < top for name in depths if ".blocks." in name)
