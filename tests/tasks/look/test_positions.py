"""The views of position encodings."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modules.config import StackConfig
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from modules.models.swin import Swin, SwinConfig, second_version
from modules.position import build_position
from tasks.look.figures import draw_matrix
from tasks.look.page import encoded
from tasks.look.positions import LONGEST, LONGEST_BIAS, position_views, views_of
from tasks.look.views import Curves, Matrix
from tests.helpers.tiny_models import CROSS, STACK, close, shaken


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("grid", [(6,), (2, 3), (300,)], ids=str)
def test_each_head_of_a_bias_is_a_heat_map_of_queries_and_keys(
    kind: str, grid: tuple[int, ...]
) -> None:
    position = build_position(kind, {}, StackConfig(width=8, heads=2, depth=1), grid)
    with torch.no_grad():
        lines, *heads = views_of(position, "position", 8)
    assert isinstance(lines, Curves) and len(heads) == 2
    for number, view in enumerate(heads):
        assert isinstance(view, Matrix) and (view.row_name, view.column_name) == ("query", "key")
        assert len(view.rows) == len(view.columns) == len(view.values)
        if len(view.rows) == len(lines.x):
            close(view.values[len(lines.x) // 2], torch.tensor(lines.lines[f"head {number}"]))
    if kind == "alibi" and len(grid) == 1:  # slopes 1/16 and 1/256
        close(heads[0].values[5], -(torch.arange(len(heads[0].rows)) - 5).abs() / 16)
    is_cut = grid == (300,)
    assert (f"first {LONGEST} of 300 positions" in lines.note) == is_cut
    assert (f"first {LONGEST_BIAS} of 300 positions" in heads[0].note) == is_cut


def test_the_bias_of_a_causal_model_ends_with_the_query() -> None:
    config = Seq2SeqConfig(20, 20, 8, position="t5", encoder=STACK, decoder=CROSS)
    views = position_views(Seq2Seq(config))
    ends = {one.title.split()[0]: one.x[-1] for one in views if isinstance(one, Curves)}
    assert ends == {"encoder": 7, "decoder": 4}
    config = DecoderConfig(20, 8, position="alibi", stack=replace(STACK, causal=True))
    lines = position_views(Decoder(config))[0]
    assert isinstance(lines, Curves) and "query 4" in lines.title
    assert [len(line) for line in lines.lines.values()] == [len(lines.x)] * STACK.heads == [5] * 4


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "rotary"])
def test_encodings_that_are_cut_say_so(kind: str) -> None:
    stack = StackConfig(width=8, heads=2, depth=1)
    for length in (LONGEST, LONGEST + 1):
        position = build_position(kind, {}, stack, (length,))
        with torch.no_grad():
            views = views_of(position, "position", 8)
        for view in views:
            assert isinstance(view, Matrix | Curves)
            assert (f"first 256 of {length} positions" in view.note) == (length > LONGEST)


def test_vectors_of_a_narrow_embedding_have_its_width() -> None:
    stack = replace(STACK, causal=True)
    config = DecoderConfig(20, 8, position="sinusoidal", embedding_width=6, stack=stack)
    net = Decoder(config)
    added, *_ = position_views(net)
    assert isinstance(added, Matrix)
    close(added.values, net.position.embed(torch.zeros(1, 8, 6), torch.arange(8)[None, :, None])[0])


@pytest.mark.parametrize("is_second", [False, True])
def test_biases_of_a_swin_are_maps_of_offsets(is_second: bool) -> None:
    """Of each block, with those of H heads in a square: the score of each query and key has it."""
    config = SwinConfig(12, 2, 1, 3, depths=(1, 2), window_size=3, stack=StackConfig(12, 3, 3))
    net = shaken(Swin(second_version(config) if is_second else config))
    views = position_views(net)
    titles = [
        f"stage {name}: bias of each head" for name in ("0, layer 0", "1, layer 0", "1, layer 1")
    ]
    assert [view.title for view in views] == titles
    blocks: Any = [block for stage in net.stages for block in stage.stack.blocks]
    for view, block in zip(views, blocks, strict=True):
        assert isinstance(view, Matrix)
        bias = block.attention.bias().detach()  # (H, A, A)
        across = {3: 2, 6: 3}[len(bias)]
        maps = view.values.unfold(0, 5, 6).unfold(1, 5, 6).flatten(0, 1)  # without lines: (T, 5, 5)
        assert maps.shape[0] == 2 * across and f"{across} in a row" in view.note
        for query in range(9):
            for key in range(9):
                down, right = key // 3 - query // 3, key % 3 - query % 3
                assert (view.rows[down + 2], view.columns[right + 2]) == (str(down), str(right))
                close(maps[: len(bias), down + 2, right + 2], bias[:, query, key])
        assert maps[len(bias) :].isnan().all() and view.values[5].isnan().all()
        assert encoded(view, 255)["values"][5] == [None] * (6 * across - 1)
        (heat,) = draw_matrix(view).axes[0].images
        low, high = float(bias.min()), float(bias.max())  # 16 sigmoid is positive
        ends = (low, high) if is_second else (-max(-low, high), max(-low, high))
        assert (heat.norm.vmin, heat.norm.vmax) == pytest.approx(ends)
