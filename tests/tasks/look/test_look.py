"""`look` of each task writes its page; what it shows is what the model computes."""

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
import torch
import torch.nn.functional as F
from PIL import Image

from modules.activations import patch
from tasks.look.inspector import Component, Interventions, uniform_entropy
from tasks.look.inspectors import INSPECTORS
from tasks.look.views import Heads, Matrix, Table, Tokens
from tasks.seq2seq.attend import token_labels
from tests.helpers.command import Console, run
from tests.helpers.page import content, tab_views, unpacked
from tests.helpers.tiny import picture
from tests.helpers.tiny_models import close

FAST = Interventions(effects=False)
IMAGE_TASKS = ("vit", "mae", "igpt")
TASKS = (*IMAGE_TASKS, "bert", "mlm", "lm", "seq2seq")
TABS = {
    "vit": {"prediction"},
    "mae": set(),
    "igpt": {"logit lens", "losses", "neighbours"},
    "bert": {"prediction", "neighbours"},
    "mlm": {"fill-mask", "logit lens", "neighbours"},
    "lm": {"logit lens", "losses", "neighbours"},
    "seq2seq": {"logit lens", "losses", "neighbours"},
}


@pytest.mark.slow
@pytest.mark.exhaustive_except("vit", "bert", "mlm", "seq2seq")
@pytest.mark.parametrize("task", TASKS)
def test_samples_of_the_test_split(
    task: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)  # the data of the training are relative to it
    ckpt = runs / task / "checkpoints/best.ckpt"
    output = runs / f"look_{task}"
    line = f"look --ckpt_path {ckpt} --output {output} --samples 2 --ablate 0.1"
    patched = set()
    if task in IMAGE_TASKS:
        picture(20, "L").save(tmp_path / "photo.png")
        line += f" --patch 0.1 --patch_from {tmp_path}/photo.png"
        patched = {"patching"}
    assert run(line, task) == 0
    data = content(output / "look.html")
    assert len(data["samples"]) == 2
    found = tab_views(data)
    assert {"attention", "rollout", "heads", "ablation"} | TABS[task] | patched == set(found)
    for tab in {"ablation"} | patched:
        for number in (1, 2):
            assert {path.suffix for path in output.glob(f"{number}-{tab}-*")} == {".svg", ".png"}
    rollout = "rollout-of-self-attention-over-all-layers"
    assert (output / f"2-rollout-{rollout}.svg").exists() or task == "seq2seq"


def test_next_tokens_are_those_after_the_last_token(runs: Path, console: Console) -> None:
    model = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    text = "The two"
    (ids,) = model.tokenizer.encode_batch([text])
    last = token_labels(model.tokenizer, ids)[-1]
    line = f"look --ckpt_path {runs}/lm --text '{text}' --ablate 0.0 --figures false --output out"
    out, _ = console.printed(line, "lm")
    assert f"next token after {last}: " in out


@pytest.mark.parametrize("task", IMAGE_TASKS)
def test_the_weights_of_the_page_are_the_models(task: str, runs: Path, tmp_path: Path) -> None:
    picture(20, "L").save(tmp_path / "photo.png")
    ckpt = runs / task / "checkpoints/best.ckpt"
    line = f"look --ckpt_path {ckpt} --image photo.png --output out --effects false --figures false"
    assert run(line, task) == 0
    (view,) = tab_views(content(tmp_path / "out/look.html"))["attention"]
    model: Any = tessera.load(ckpt)
    weights, queries, keys = model.attention("photo.png")
    if task == "igpt":
        weights = F.pad(weights, (0, 1))  # to the last pixel, which is not read
        keys = [*keys, "8,8"]
    close(unpacked(view)[0], weights, atol=0.005)
    (exact,) = INSPECTORS[task](model).sample("", ("photo.png",), FAST).tabs["attention"]
    assert isinstance(exact, Heads)
    close(exact.weights[0], weights, atol=1e-6)
    assert (view["queries"], view["keys"]) == (queries, keys)
    shown = Image.open(io.BytesIO(base64.b64decode(view["image"].partition(",")[2])))
    assert np.array_equal(np.asarray(shown), model.pixels("photo.png")[0])


def test_rollout_is_the_map_of_attention(runs: Path) -> None:
    picture(20, "L").save("photo.png")
    model = tessera.load(runs / "vit", kind=tessera.ImageClassifier)
    rollout = INSPECTORS["vit"](model).sample("", ("photo.png",), FAST).tabs["rollout"]
    assert isinstance(rollout[0], Heads)
    heat = rollout[0].weights[0, 0, 0].mean(0)  # (N,), of a model without a class token
    close(heat / heat.sum(), model.attention_map("photo.png").flatten())


def test_ablation_in_python_is_that_of_the_command(runs: Path, console: Console) -> None:
    ckpt = runs / "bert/checkpoints/best.ckpt"
    line = f"look --ckpt_path {ckpt} --text 'a good film' --ablate 1.0 --figures false"
    out, _ = console.printed(line, "bert")
    model = tessera.load(ckpt, kind=tessera.TextClassifier)
    before = model.predict("a good film").probabilities
    with model.ablate(1, 0):
        after = model.predict("a good film").probabilities
    for name in before:
        assert f"{before[name]:.4f} -> {after[name]:.4f}" in out
    assert before == model.predict("a good film").probabilities
    found = model.activations("a good film", names="blocks.1.attention*")
    assert found["blocks.1.attention.heads"].shape[1:] == (2, 16)
    with model.intervene({"blocks.1.attention.heads": patch(0.0, np.s_[:, :, 0])}):
        assert model.predict("a good film").probabilities == after
    close(found["blocks.1.attention.weights"], model.attention("a good film").weights[1])


def test_losses_and_lens_of_a_language_model(runs: Path) -> None:
    model = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    text = "The interpreter is a program"
    sample = INSPECTORS["lm"](model).sample("", (text,), Interventions())
    (losses,) = sample.tabs["losses"]
    assert isinstance(losses, Tokens) and losses.values[0] is None
    ids = torch.tensor(model.token_ids(text))
    logits = model.logits(text)
    expected = -logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    close(torch.tensor(losses.values[1:]), expected)
    (lens,) = sample.tabs["logit lens"]
    assert isinstance(lens, Matrix)
    close(lens.values[-1], logits.softmax(-1).max(-1).values)  # the last block is the output
    (effects,) = sample.tabs["ablation"]
    assert isinstance(effects, Matrix)
    with model.ablate(1, 1):
        other = model.logits(text)
    divergence = torch.nn.functional.kl_div(
        other.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none"
    )
    close(effects.values[1, 1], divergence.sum(-1).mean())


def test_uniform_entropy_counts_the_keys_that_a_query_sees() -> None:
    causal = torch.rand(2, 3, 5, 5).tril().clamp(min=0)
    assert uniform_entropy(causal) == pytest.approx(math.log(math.factorial(5)) / 5)
    padded = F.pad(torch.rand(1, 1, 4, 3) + 0.1, (0, 2))
    assert uniform_entropy(padded) == pytest.approx(math.log(3))
    window = causal.triu(-1)
    assert uniform_entropy(window) == pytest.approx(4 * math.log(2) / 5)


def test_the_colours_of_entropy_end_at_uniform_attention(runs: Path) -> None:
    model = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    text = "The interpreter is a program"
    matrix = INSPECTORS["lm"](model).sample("", (text,), FAST).tabs["heads"][0]
    count = len(model.token_ids(text))
    assert isinstance(matrix, Matrix) and matrix.limits is not None
    uniform = math.lgamma(count + 1) / count  # of a causal mask
    assert matrix.limits == pytest.approx((0, uniform), abs=1e-5)
    assert f"{uniform:.3f} " in matrix.note and (matrix.values <= uniform + 1e-5).all()


def test_losses_and_distances_of_pixels(runs: Path) -> None:
    model = tessera.load(runs / "igpt", kind=tessera.ImageGenerator)
    picture(8, "L").save("photo.png")
    sample = INSPECTORS["igpt"](model).sample("", ("photo.png",), FAST)
    (losses,) = sample.tabs["losses"]
    _, distances, *_ = sample.tabs["heads"]
    assert isinstance(losses, Matrix) and isinstance(distances, Matrix)
    grey = torch.tensor(model.metadata["palette"])[:, 0].round()  # (K,)
    seen = model.pixels("photo.png")[0]  # (8, 8)
    logs = model.logits("photo.png").log_softmax(-1).unflatten(0, (8, 8))
    for row, column in ((0, 0), (2, 5), (7, 7)):
        index = int((grey == seen[row, column]).nonzero())
        close(losses.values[row, column], -logs[row, column, index])
    points = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))  # (64, 2)
    read = model.attention("photo.png").weights[..., 1:]  # of pixels, (2, 2, 64, 63)
    read = read / read.sum(-1, keepdim=True).clamp(min=1e-12)
    close(distances.values, (read * torch.cdist(points, points[:-1])).sum(-1).mean(-1))


@pytest.mark.parametrize("task", ["mae", "igpt"])
def test_heads_that_images_do_without(task: str, runs: Path, console: Console) -> None:
    """Of an autoencoder how far the vector of `embed` moves; of pixels their loss."""
    picture(8, "L").save("photo.png")
    ckpt = runs / task / "checkpoints/best.ckpt"
    line = f"look --ckpt_path {ckpt} --image photo.png --ablate 0.1 --figures false --output look"
    out, _ = console.printed(line, task)
    model: Any = tessera.load(ckpt)
    with model.ablate(0, 1):
        ablated = model.logits("photo.png")
    found = model.logits("photo.png")
    table, effects = tab_views(content(Path("look/look.html")))["ablation"]
    name, before, after, _ = table["rows"][0]
    if task == "mae":
        close(found, model.embed("photo.png"))
        expected = [0, float((ablated - found).norm() / found.norm())]
        assert effects["values"][0][1] == pytest.approx(expected[1], rel=1e-4)
    else:
        tokens = model.tokens("photo.png")[0]
        expected = [float(F.cross_entropy(logits, tokens)) for logits in (found, ablated)]
    assert [before, after] == pytest.approx(expected, abs=1e-6) and before != after
    assert printed_change(out, name)[1] == pytest.approx(after, abs=6e-5)
    assert {len(row) for row in effects["values"]} == {3} and "decoder" not in effects["title"]


def test_the_decoder_is_left_as_it_is(runs: Path) -> None:
    picture(8, "L").save("photo.png")
    model = tessera.load(runs / "mae", kind=tessera.MaskedImageModel)
    before = model.reconstruct("photo.png")
    sample = INSPECTORS["mae"](model).sample("", ("photo.png",), FAST)
    assert [view.title for view in sample.tabs["attention"]] == ["self-attention"]
    close(model.reconstruct("photo.png"), before)
    with model.ablate(0, part="decoder"):
        changed = model.reconstruct("photo.png").reconstructed
    assert not torch.equal(changed, before.reconstructed)


def test_a_single_token_of_a_language_model_has_no_loss(runs: Path) -> None:
    model = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    sample = INSPECTORS["lm"](model).sample("", ("",), FAST)
    (losses,) = sample.tabs["losses"]
    assert isinstance(losses, Tokens) and [*losses.values] == [None]


def test_masks_are_filled_as_by_fill_mask(runs: Path) -> None:
    model = tessera.load(runs / "mlm", kind=tessera.MaskedLanguageModel)
    text = "a good [MASK] seen twice"
    (table,) = INSPECTORS["mlm"](model).sample("", (text,), FAST).tabs["fill-mask"]
    assert isinstance(table, Table)
    ((_, token, *cells),) = table.rows
    assert token == "[MASK]"
    for cell, filling in zip(cells, model.fill_mask(text)[0], strict=True):
        assert cell.endswith(f" {filling.probability:.3f}")


def test_an_ablated_translator_is_asked_for_the_same_translation(runs: Path) -> None:
    model = tessera.load(runs / "seq2seq", kind=tessera.Translator)
    ablate = Component(1, 0, "decoder")
    interventions = Interventions(ablate=ablate, effects=False)
    sample = INSPECTORS["seq2seq"](model).sample("", ("two three", None), interventions)
    (table,) = sample.tabs["ablation"]
    assert isinstance(table, Table)
    translation = model.translate("two three")
    name, whole, other, change = table.rows[0]
    assert whole == pytest.approx(model.score("two three", translation).loss, abs=1e-4)
    with model.ablate(1, 0, part="decoder"):
        assert other == pytest.approx(model.score("two three", translation).loss, abs=1e-4)
    assert change == pytest.approx(other - whole)
    attention = [view for view in sample.tabs["attention"] if isinstance(view, Heads)]
    assert [view.title for view in attention] == [
        "cross-attention",
        "encoder self-attention",
        "decoder self-attention",
    ]
    weights, queries, keys = model.attention("two three", translation)
    close(attention[0].weights[0], weights)
    assert (attention[0].queries, attention[0].keys) == (queries, keys)


def printed_change(text: str, name: str) -> tuple[float, float, float]:
    """Before, after and their difference in a line of `look`."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
    before, after, change = re.findall(r"[+-]?\d+\.\d{4}", line.strip().removeprefix(name))
    return float(before), float(after), float(change)


def test_patching_in_python_is_that_of_the_command(runs: Path, console: Console) -> None:
    ckpt = runs / "bert/checkpoints/best.ckpt"
    line = f"look --ckpt_path {ckpt} --text 'a good film' --patch 0.1 --patch_from 'a bad film'"
    line += " --figures false --output look"
    out, _ = console.printed(line, "bert")
    model = tessera.load(ckpt, kind=tessera.TextClassifier)
    other = model.activations("a bad film")["blocks.0.attention.heads"][None]  # (1, N, H, D)
    before = model.predict("a good film").probabilities
    with model.intervene({"blocks.0.attention.heads": patch(other, np.s_[:, :, 1])}):
        after = model.predict("a good film").probabilities
    assert before != after
    for name, value in before.items():
        expected = (value, after[name], after[name] - value)
        assert printed_change(out, name) == pytest.approx(expected, abs=6e-5)
    table, matrix = tab_views(content(Path("look/look.html")))["patching"]
    others = model.predict("a bad film").probabilities
    for name, *numbers in table["rows"][:-1]:
        expected = (before[name], after[name], after[name] - before[name], others[name])
        assert numbers == pytest.approx(expected, abs=1e-6)
    assert matrix["values"][0][1] == pytest.approx(table["rows"][-1][2], rel=1e-4)


def test_patching_an_image(runs: Path, console: Console) -> None:
    for number in range(2):
        picture(20, "L").save(f"{number}.png")
    ckpt = runs / "vit/checkpoints/best.ckpt"
    line = f"look --ckpt_path {ckpt} --image 0.png --patch 0 --patch_from 1.png --figures false"
    console.printed(line)
    page = runs / "vit/look_inputs/look.html"  # the default
    model = tessera.load(ckpt, kind=tessera.ImageClassifier)
    other = model.activations("1.png")
    names = ("blocks.0.attention", "blocks.0.feedforward")
    with model.intervene({name: patch(other[name][None]) for name in names}):
        after = model.predict("0.png").probabilities
    table, _ = tab_views(content(page))["patching"]
    for name, _, patched, *_ in table["rows"][:-1]:
        assert patched == pytest.approx(after[name], abs=1e-6)


def test_cross_attention_of_a_translator(runs: Path, console: Console) -> None:
    """A head is patched from a source of another length, for the same translation."""
    ckpt = runs / "seq2seq/checkpoints/best.ckpt"
    line = (
        f"look --ckpt_path {ckpt} --text 'two three' --target 'TWO THREE' --figures false "
        "--output look --ablate cross.1.0 --patch cross.1.1 --patch_from 'four five six seven'"
    )
    out, _ = console.printed(line, "seq2seq")
    model = tessera.load(ckpt, kind=tessera.Translator)
    pair = ("two three", "TWO THREE")
    with model.ablate(1, 0, part="cross"):
        ablated = model.score(*pair).loss
    name = "decoder.blocks.1.cross_attention.heads"
    other = model.activations("four five six seven", "TWO THREE", names=name)[name][None]
    with model.intervene({name: patch(other, np.s_[:, :, 1])}):
        patched = model.score(*pair).loss
    found = tab_views(content(Path("look/look.html")))
    for (_, whole, after, *_), expected in (
        (found["ablation"][0]["rows"][0], ablated),
        (found["patching"][0]["rows"][0], patched),
    ):
        assert whole == pytest.approx(model.score(*pair).loss, abs=1e-5)
        assert after == pytest.approx(expected, abs=1e-5) and after != whole
    _, encoder, decoder, cross = found["ablation"]
    assert len({str(view["values"]) for view in (encoder, decoder, cross)}) == 3
    assert cross["values"][1][0] == pytest.approx(found["ablation"][0]["rows"][-1][2], rel=1e-4)
    _, decoder, cross = found["patching"]  # the encoder has another length
    assert cross["values"][1][1] == pytest.approx(found["patching"][0]["rows"][-1][2], rel=1e-4)


def test_the_tokens_of_a_text_to_patch_from_that_does_not_fit_are_said(
    runs: Path, console: Console
) -> None:
    line = f"look --ckpt_path {runs}/seq2seq --patch encoder.0.1 --text 'two three'"
    pair = tessera.load(runs / "seq2seq", kind=tessera.Translator).model.tokenizer
    sources = [pair.encode_sources([text], 9)[0][0] for text in ("two", "two three")]
    shown = [" ".join(token_labels(pair.source, tokens)) for tokens in sources]
    assert len(set(shown)) == 2
    console.refused(f"{line} --patch_from two", *(f"({one})" for one in shown), task="seq2seq")


BAD = {
    "another task": ("look --ckpt_path {lm}", "vit"),
    "no such layer": ("look --ckpt_path {vit} --ablate 1.0", "vit"),
    "no such head": ("look --ckpt_path {vit} --ablate 0.2", "vit"),
    "no decoder": ("look --ckpt_path {mae} --ablate decoder.0.1", "mae"),
    "of pixels": ("look --ckpt_path {igpt}", "mae"),
    "not a head": ("look --ckpt_path {vit} --ablate first", "vit"),
    "no encoder": ("look --ckpt_path {vit} --ablate encoder.0.1", "vit"),
    "no such part": ("look --ckpt_path {seq2seq} --text ONE --ablate middle.0.1", "seq2seq"),
    "no cross-attention": ("look --ckpt_path {vit} --ablate cross.0.1", "vit"),
    "no such patch": ("look --ckpt_path {seq2seq} --patch cross.2 --patch_from ONE", "seq2seq"),
    "patch alone": ("look --ckpt_path {lm} --text one --patch 0.1", "lm"),
    "patch_from alone": ("look --ckpt_path {lm} --text one --patch_from two", "lm"),
    "empty patch_from": ("look --ckpt_path {lm} --text one --patch 0 --patch_from ' '", "lm"),
    "another length": (
        "look --ckpt_path {bert} --text 'a good film' --patch 0.1 --patch_from 'good'",
        "bert",
    ),
    "another length of a source": (
        "look --ckpt_path {seq2seq} --text 'two three' --patch encoder.0.1 --patch_from 'two'",
        "seq2seq",
    ),
    "no patch_from": ("look --ckpt_path {vit} --image good.png --patch 0 --patch_from no", "vit"),
    "unreadable": ("look --ckpt_path {vit} --image text.png", "vit"),
    "unreadable by pixels": ("look --ckpt_path {igpt} --image text.png", "igpt"),
    "missing": ("look --ckpt_path {vit} --image none.png", "vit"),
    "empty": ("look --ckpt_path {lm} --text ' '", "lm"),
    "no checkpoint": ("look --ckpt_path nothing", "vit"),
    "no model": ("look --ckpt_path .", "vit"),
    "no samples": ("look --ckpt_path {vit} --samples 0", "vit"),
    "target alone": ("look --ckpt_path {seq2seq} --target ONE", "seq2seq"),
    "a file": ("look --ckpt_path {vit} --image good.png --output text.png", "vit"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_sentence(case: str, runs: Path, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    picture(9).save(tmp_path / "good.png")
    line, task = BAD[case]
    paths = {name: runs / name / "checkpoints/best.ckpt" for name in TASKS}
    assert run(line.format(**paths), task) in (1, 2)
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and error.count("\n") == 0
    assert "Traceback" not in error and "--debug" not in error and "tessera.load" not in error
    assert not Path("look").exists()
