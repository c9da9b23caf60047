"""Translations from the command line: what is read, in which order they come, and how they are made."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from tasks.cli.text_io import UNFINISHED
from tasks.seq2seq.attend import cross_attention_weights, draw, token_labels, translate_text
from tasks.seq2seq.decoding import decoding_tokens
from tasks.seq2seq.translator import TranslationModel, load_model
from tests.tasks.command import PAIRS, SMALL_S2S, run, write_pairs

LINES = [
    "two three",
    "six five four three two one's",
    "",
    "four",
    "five five five",
    "  ",
    "one's six",
]


@pytest.fixture(scope="session")
def model(translator: Path) -> TranslationModel:
    return load_model(str(translator))


def said(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """The lines that `translate` prints, and what it says beside them."""
    capsys.readouterr()
    assert run(f"translate {line}", "seq2seq") == 0
    out, err = capsys.readouterr()
    return out.split("\n")[:-1], err


def objects(line: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `translate --json` prints."""
    return [json.loads(text) for text in said(f"{line} --json", capsys)[0]]


def by_library(model: TranslationModel, text: str, **options: Any) -> list[tuple[str, float]]:
    """Translations and scores of one sentence alone."""
    (row,), _ = model.tokenizer.encode_sources([text], model.net.max_length)
    config = GenerationConfig(model.net.max_length, **{"early_stopping": "likely", **options})
    (found,) = translate(model.net, [row], config, **decoding_tokens(model.tokenizer))
    return [(model.tokenizer.decode(one.tokens), one.score) for one in found]


def test_a_file_in_its_order(
    translator: Path, model: TranslationModel, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8-sig")
    lines, err = said(f"--ckpt_path {translator} --file in.txt --batch_size 2 --beams 3", capsys)
    expected = [by_library(model, text, beams=3)[0][0] if text.strip() else "" for text in LINES]
    assert [line.removesuffix(UNFINISHED) for line in lines] == expected
    assert len(set(lines)) > 4 and "7 sentences in" in err


def test_batches_are_of_like_lengths(
    translator: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def spy(net: Any, sources: Any, *rest: Any, **ends: Any) -> Any:
        seen.append([len(row) for row in sources])
        return translate(net, sources, *rest, **ends)

    monkeypatch.setattr("tasks.seq2seq.translate.search", spy)
    Path("in.txt").write_text("\n".join(["two", "two two two", "two two"] * 3))
    lines, _ = said(f"--ckpt_path {translator} --file in.txt --batch_size 3", capsys)
    assert seen == [[4] * 3, [3] * 3, [2] * 3]
    assert lines == lines[:3] * 3


def test_a_translation_is_a_line(
    translator: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "datamodules.tokenizers.PairTokenizer.decode", lambda self, ids: "one\n two\tthree"
    )
    assert (
        said(f"--ckpt_path {translator} --text two", capsys)[0][0].removesuffix(UNFINISHED)
        == "one two three"
    )
    assert (
        objects(f"--ckpt_path {translator} --text two", capsys)[0]["translation"]
        == "one\n two\tthree"
    )


def test_text_and_standard_input(
    translator: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (said(f'--ckpt_path {translator} --text "{text}"', capsys)[0] for text in LINES[:2])
    for option in ("", " --file -"):
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO("\r\n".join(LINES[:2]).encode()))
        )
        assert said(f"--ckpt_path {translator}{option}", capsys)[0] == one + two
    assert (
        said(f'--ckpt_path {translator} --text "{LINES[0]}" --text "{LINES[1]}"', capsys)[0]
        == one + two
    )


def test_the_best_of_a_beam_with_their_scores(
    translator: Path, model: TranslationModel, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f'--ckpt_path {translator} --text "two three" --text "" --beams 4 --nbest 3 --length_penalty 0.6'
    expected = by_library(model, "two three", beams=4, length_penalty=0.6)[:3]
    lines, _ = said(line, capsys)
    assert lines == [*(f"1\t{score:.4f}\t{text}" for text, score in expected), "2\t0.0000\t"]
    rows = objects(line, capsys)
    assert [(row["line"], row["rank"]) for row in rows] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [row["score"] for row in rows[:3]] == pytest.approx([score for _, score in expected])
    assert all(
        row["finished"] and row["source"] == "two three" and row["tokens"] for row in rows[:3]
    )


def test_the_likeliest_and_drawn_ones(
    translator: Path, model: TranslationModel, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy, _ = said(f'--ckpt_path {translator} --text "six two" --beams 1', capsys)
    assert greedy == [by_library(model, "six two", temperature=0)[0][0]]
    assert said(f'--ckpt_path {translator} --text "six two" --quantize int8', capsys)[0][0]
    Path("in.txt").write_text("\n".join(LINES))
    line = f"--ckpt_path {translator} --beams 1 --temperature 3 --top_k 8 --seed 5"
    drawn, _ = said(f"{line} --file in.txt --batch_size 3", capsys)
    for number in (0, 1, 4):  # each has a seed of its own, whatever is translated beside it
        alone, _ = said(
            f'{line.replace("seed 5", f"seed {5 + number}")} --text "{LINES[number]}"', capsys
        )
        assert alone == [drawn[number]]
    assert drawn != said(f"{line} --seed 6 --file in.txt", capsys)[0]


def test_what_is_too_long_is_cut_and_counted(
    translator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["two"] * 40
    lines, err = said(f'--ckpt_path {translator} --text "{" ".join(words)}" --text two', capsys)
    assert "1 of 2 sentences are longer than the 24 tokens that the model reads" in err
    assert (
        lines[0] == said(f'--ckpt_path {translator} --text "{" ".join(words[:23])}"', capsys)[0][0]
    )


def test_what_is_not_finished_is_marked(
    translator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f'--ckpt_path {translator} --text "six five four three two" --max_new_tokens 2'
    lines, err = said(line, capsys)
    assert (
        lines[0].endswith(" [...]")
        and "1 translations were not finished at the length limit" in err
    )
    (row,) = objects(line, capsys)
    assert not row["finished"] and row["translation"] + " [...]" == lines[0] and row["tokens"] == 2
    assert "[...]" not in "".join(said(line.replace("_tokens 2", "_tokens 20"), capsys)[0])


# Attention ----------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_steps(model: TranslationModel) -> None:
    (source,), _ = model.tokenizer.encode_sources(["six five four"], model.net.max_length)
    tokens = translate_text(model, source, 2).tokens
    weights = cross_attention_weights(model, source, tokens)
    assert weights.shape == (2, 2, len(tokens), len(source))  # layers, heads, target, source
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, len(tokens)))
    for size in range(1, len(tokens)):  # what a token looks at does not depend on those after it
        torch.testing.assert_close(
            cross_attention_weights(model, source, tokens[:size]), weights[:, :, :size]
        )
    assert token_labels(model.tokenizer.source, source) == ["six", "five", "four", "[EOS]"]


def test_labels_are_what_tokens_say() -> None:
    tokenizer = Tokenizer.train(
        ["a é"], TokenizerConfig("bpe", 263, lowercase=False)
    )  # single bytes
    (ids,) = tokenizer.encode_batch(["a é"])
    assert token_labels(tokenizer, [*ids, tokenizer.special_id("eos")]) == [
        "a",
        "\u2423",
        "Ã",
        "©",
        "[EOS]",
    ]


def test_a_picture_of_them(translator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f'attend --ckpt_path {translator} --text "six $five$ four" --out'
    assert run(f"{line} new/a.png", "seq2seq") == 0
    assert Path("new/a.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote new/a.png: 2 layers by 2 heads" in capsys.readouterr().out
    assert run(f'{line} b.svg --target "SIX FIVE"', "seq2seq") == 0
    assert capsys.readouterr().out.startswith("SIX FIVE\n") and "<svg" in Path("b.svg").read_text()
    assert run(f'{line} c.png --target "{"SIX " * 30}"', "seq2seq") == 0
    assert "--target is longer than the 24 tokens that the model writes" in capsys.readouterr().out


def test_a_text_that_did_not_end_is_marked(
    translator: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerationConfig] = []

    def cut(net: Any, sources: Any, config: GenerationConfig, **ends: Any) -> Any:
        asked.append(config)
        return translate(net, sources, GenerationConfig(2, temperature=0.0, beams=5), **ends)

    monkeypatch.setattr("tasks.seq2seq.attend.translate", cut)
    assert run(f'attend --ckpt_path {translator} --text "six five four three two"', "seq2seq") == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(UNFINISHED)
    assert asked[0].early_stopping == "likely"  # as `translate`


def test_what_is_drawn_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    made: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **options: made.append(self))
    weights = torch.rand(2, 3, 4, 5)  # layers, heads, target, source
    source, target = ["a", "b", "$c", "d", "e"], ["v", "w", "x", "y"]
    draw(weights, source, target, tmp_path / "a.png", "png")
    panels = made[0].axes
    titles = [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3)]
    assert [panel.get_title() for panel in panels] == titles
    for panel, expected in zip(panels, weights.flatten(0, 1), strict=True):
        shown = panel.images[0].get_array()
        assert shown is not None and torch.equal(
            torch.as_tensor(shown.data), expected
        )  # a row for each token of the target
        assert [label.get_text() for label in panel.get_xticklabels()] == [
            "a",
            "b",
            r"\$c",
            "d",
            "e",
        ]
        assert [label.get_text() for label in panel.get_yticklabels()] == target
        assert panel.get_ylim()[0] > panel.get_ylim()[1]  # the first on top


def test_one_stack_that_reads_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    line = f"fit {SMALL_S2S} {PAIRS} --model.net.architecture prefix --trainer.limit_train_batches 2 --run_dir r"
    assert run(line, "seq2seq") == 0
    best = "r/checkpoints/best.ckpt"
    model = load_model(best)
    (source,), _ = model.tokenizer.encode_sources(["six five four"], model.net.max_length)
    weights = cross_attention_weights(model, source, [7, 8, 9])
    assert (
        weights.shape == (2, 2, 3, 4) and (weights.sum(-1) < 1).all()
    )  # the rest is for the target itself
    assert run(f"translate --ckpt_path {best} --text two", "seq2seq") == 0
    assert run(f"attend --ckpt_path {best} --text two", "seq2seq") == 0
    assert Path("attention.png").exists()


def test_nothing_to_translate_is_said(translator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").touch()
    lines, err = said(f"--ckpt_path {translator} --file empty.txt", capsys)
    assert lines == [] and "nothing to translate" in err
