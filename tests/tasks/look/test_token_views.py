"""The logit lens and the scores of heads of pixels, and the nearest embeddings of tokens."""

from pathlib import Path

import pytest
import tessera
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.activations import recorded
from modules.embedding import TokenEmbedding
from modules.measures import induction_score, previous_token_score, repeated_tokens
from tasks.igpt.architectures import PixelModel
from tasks.look import pictures
from tasks.look.inspector import Interventions
from tasks.look.inspectors import INSPECTORS
from tasks.look.pictures import PixelInspector
from tasks.look.views import Matrix, Table, View
from tasks.seq2seq.attend import token_labels
from tests.helpers.tiny import picture
from tests.helpers.tiny_models import close

FAST = Interventions(effects=False)


def test_lens_and_scores_of_pixels(runs: Path) -> None:
    model = tessera.load(runs / "igpt", kind=tessera.ImageGenerator)
    picture(8, "L").save("photo.png")
    sample = INSPECTORS["igpt"](model).sample("", ("photo.png",), FAST)
    (lens,) = sample.tabs["logit lens"]
    assert isinstance(lens, Matrix) and lens.columns == model.attention("photo.png").queries
    best = model.logits("photo.png").softmax(-1).max(-1)  # the last block is the output
    close(lens.values[-1], best.values)
    greys = torch.tensor(model.metadata["palette"])[best.indices, 0].round().int()
    assert lens.cells[-1] == [*map(str, greys.tolist())]
    *_, induction, previous = sample.tabs["heads"]
    tokens = repeated_tokens(17, 32)
    with torch.no_grad(), recorded(model.net, "*.attention.weights") as found:
        model.net(tokens)
    assert isinstance(induction, Matrix) and isinstance(previous, Matrix)
    weights = torch.cat([*found.values()])
    close(induction.values, induction_score(weights, 32))
    close(previous.values, previous_token_score(weights))


def test_the_lens_of_many_pixels_is_cut(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "LENS_PIXELS", 10)
    picture(8, "L").save("photo.png")
    model = tessera.load(runs / "igpt", kind=tessera.ImageGenerator)
    (lens,) = INSPECTORS["igpt"](model).sample("", ("photo.png",), FAST).tabs["logit lens"]
    assert isinstance(lens, Matrix) and lens.note.endswith("; the first 10 of 64 pixels")
    assert lens.values.shape == (2, 10) and lens.columns[-1] == "2,2"


def check_neighbours(view: View, table: Tensor, ids: list[int], labels: list[str]) -> None:
    """Rows are the tokens in their order, each with those of the largest cosines in `table`."""
    assert isinstance(view, Table)
    assert [row[0] for row in view.rows] == [*dict.fromkeys(labels)]
    cosines = F.cosine_similarity(table, table[ids[0]], dim=1)
    cosines[ids[0]] = -1
    shown = [float(text.rpartition(" ")[2]) for text in view.rows[0][1].split(", ")]
    assert shown == pytest.approx(cosines.topk(len(shown)).values.tolist(), abs=0.0051)


def test_neighbours_of_the_colours_of_an_image(runs: Path) -> None:
    model = tessera.load(runs / "igpt", kind=tessera.ImageGenerator)
    picture(8, "L").save("photo.png")
    (view,) = INSPECTORS["igpt"](model).sample("", ("photo.png",), FAST).tabs["neighbours"]
    greys = [str(grey) for grey in model.pixels("photo.png").flatten().tolist()]
    table = model.net.embed.weight[:-1].detach()
    check_neighbours(view, table, model.tokens("photo.png")[0].tolist(), greys)


def test_colours_of_a_palette_are_named(runs: Path) -> None:
    model = tessera.load(runs / "igpt", kind=tessera.ImageGenerator)
    metadata = {**model.metadata, "palette": [[0.0, 127.6, 255.0], [16.0, 0.0, 1.0]]}
    coloured = tessera.ImageGenerator(PixelModel(model.net, metadata), "")
    assert PixelInspector(coloured).colours([1, 0]) == ["#100001", "#0080ff"]


def test_neighbours_of_the_translation_are_in_its_own_table(runs: Path) -> None:
    model = tessera.load(runs / "seq2seq", kind=tessera.Translator)
    pair = ("two three", "TWO THREE")
    before = INSPECTORS["seq2seq"](model).sample("", pair, FAST).tabs["neighbours"]
    model.net.source_embed = TokenEmbedding(model.net.source_vocabulary, 32, False)
    source, target = INSPECTORS["seq2seq"](model).sample("", pair, FAST).tabs["neighbours"]
    pieces = model.model.tokenizer
    ids, tokens = model.pair(*pair)
    table = model.net.source_embed.weight.detach()
    check_neighbours(source, table, ids, token_labels(pieces.source, ids))
    table = model.net.embed.weight.detach()
    check_neighbours(target, table, tokens, token_labels(pieces.target, tokens))
    assert len(before) == 1 and target.title.endswith("of the translation")
