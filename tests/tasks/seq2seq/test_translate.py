"""`translate` and `attend`: input, order and form of translations, and their attention."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.models.seq2seq import Seq2Seq
from tasks.cli.text_io import UNFINISHED, single_line
from tasks.seq2seq.architectures import TranslationModel, load_model
from tasks.seq2seq.attend import cross_attention_weights, draw, token_labels, translate_text
from tests.helpers.command import Console, Patch, run
from tests.helpers.tiny import PAIRS, SMALL_S2S, write_pairs

LINES = ["two three", "six five four three two one's", "", "four", "five five", "  ", "one's six"]
TASK = "seq2seq"


@pytest.fixture(scope="session")
def model(translator: Path) -> TranslationModel:
    return load_model(str(translator))


@pytest.fixture
def command(translator: Path) -> str:
    return f"translate --ckpt_path {translator}"


def translations(line: str, console: Console) -> list[str]:
    return console.printed(line, TASK)[0].split("\n")[:-1]


def by_library(model: TranslationModel, text: str, **options: Any) -> list[tuple[str, float]]:
    """Translations and scores of one sentence alone."""
    (row,), _ = model.tokenizer.encode_sources([text], model.net.max_length)
    config = GenerationConfig(model.net.max_length, **{"early_stopping": "likely", **options})
    (found,) = translate(model.net, [row], config, **model.tokens)
    return [(model.tokenizer.decode(one.tokens), one.score) for one in found]


def test_a_file_in_its_order(command: str, model: TranslationModel, console: Console) -> None:
    Path("in.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8-sig")
    out, err = console.printed(f"{command} --input in.txt --batch_size 2 --beams 3", TASK)
    expected = [by_library(model, text, beams=3)[0][0] if text.strip() else "" for text in LINES]
    assert [line.removesuffix(UNFINISHED) for line in out.split("\n")[:-1]] == expected
    assert len(set(expected)) > 4 and "7 sentences in" in err


def test_a_compressed_file(command: str, console: Console) -> None:
    Path("in.txt").write_text("two\nthree\n")
    Path("in.txt.gz").write_bytes(gzip.compress(b"two\nthree\n"))
    expected = translations(f"{command} --input in.txt", console)
    assert translations(f"{command} --input in.txt.gz", console) == expected
    Path("in.txt.gz").write_bytes(gzip.compress(b"two\nthree\n")[:-4])
    console.refused(f"{command} --input in.txt.gz", "in.txt.gz cannot be read", task=TASK)


def test_only_tabs_and_line_breaks_become_spaces() -> None:
    assert single_line(" a\t\r\nb\N{LINE SEPARATOR}c  d\N{NO-BREAK SPACE}!\n") == (
        "a b c  d\N{NO-BREAK SPACE}!"
    )


def test_a_column_of_a_table(command: str, console: Console) -> None:
    texts = ["two, three", "", "four"]
    expected = translations(f'{command} --text "two, three" --text "" --text four', console)
    rows = [{"id": number, "en": text} for number, text in enumerate(texts)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    cells = "".join(f'{row["id"]},"{row["en"]}"\n' for row in rows)
    Path("in.csv").write_text(f"id,en\n{cells}")
    Path("other.csv").write_text(f"id,text\n{cells}")
    Path("bare.csv").write_text(cells)
    Path("marks.csv").write_text(cells.replace(",", ";").replace("two;", "two,"))
    for options in (
        "in.csv",
        "in.jsonl",
        "in.parquet",
        "other.csv --source_column text",
        "bare.csv --header false --source_column 2",
        "marks.csv --header false --source_column 2",
    ):
        assert translations(f"{command} --input {options}", console) == expected, options
    console.refused(f"{command} --input other.csv", "--source_column", "text", task=TASK)
    for more in ("", " --source_column en"):
        console.refused(f"{command} --input nosuch.csv{more}", "nosuch.csv does not", task=TASK)
    Path("plain.txt").write_text("two")
    for options in ("--text two --header false", "--input plain.txt --source_column en"):
        console.refused(f"{command} {options}", "for tables only", task=TASK)
    Path("bad.csv").write_bytes(b"en\ntwo\n\xff\n")
    console.refused(f"{command} --input bad.csv", "line 3 of bad.csv", task=TASK, code=None)


def test_batches_are_sorted_by_length(command: str, console: Console, monkeypatch: Patch) -> None:
    """So that no sentence is padded where there are others of its length."""
    whole: list[bool] = []
    encode = Seq2Seq.encode

    def watched(self: Seq2Seq, source: torch.Tensor, padding_mask: torch.Tensor) -> Any:
        whole.append(bool(padding_mask.all()))
        return encode(self, source, padding_mask)

    monkeypatch.setattr(Seq2Seq, "encode", watched)
    lines = ["six five four three", "two"] * 4
    Path("in.txt").write_text("\n".join(lines))
    found = translations(f"{command} --input in.txt --batch_size 2", console)
    assert whole == [True] * 4
    assert found == found[:2] * 4 and found[0] != found[1]


def test_a_translation_is_one_line(command: str, console: Console, monkeypatch: Patch) -> None:
    decode = "datamodules.tokenizers.PairTokenizer.decode"
    monkeypatch.setattr(decode, lambda self, ids: "one\n two\tthree")
    (line,) = translations(f"{command} --text two", console)
    assert line.removesuffix(UNFINISHED) == "one two three"
    (row,) = console.objects(f"{command} --text two", TASK)
    assert row["translation"] == "one\n two\tthree"


def test_texts_and_standard_input(command: str, console: Console, monkeypatch: Patch) -> None:
    texts = LINES[:2]
    expected = [translations(f'{command} --text "{text}"', console)[0] for text in texts]
    for option in ("", " --input -"):
        stdin = io.TextIOWrapper(io.BytesIO("\r\n".join(texts).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert translations(f"{command}{option}", console) == expected
    both = " ".join(f'--text "{text}"' for text in texts)
    assert translations(f"{command} {both}", console) == expected
    Path("empty.txt").touch()
    out, err = console.printed(f"{command} --input empty.txt", TASK)
    assert out == "" and "nothing to translate" in err


def test_the_best_of_a_beam(command: str, model: TranslationModel, console: Console) -> None:
    line = f'{command} --text "two three" --text "" --beams 4 --nbest 3 --length_penalty 0.6'
    expected = by_library(model, "two three", beams=4, length_penalty=0.6)[:3]
    numbered = [f"1\t{score:.4f}\t{text}" for text, score in expected]
    assert translations(line, console) == [*numbered, "2\t0.0000\t"]
    rows = console.objects(line, TASK)
    assert [(row["line"], row["rank"]) for row in rows] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [row["score"] for row in rows[:3]] == pytest.approx([score for _, score in expected])
    for row in rows[:3]:
        assert row["finished"] and row["source"] == "two three" and row["tokens"]


def test_greedy_and_sampled(command: str, model: TranslationModel, console: Console) -> None:
    greedy = translations(f'{command} --text "six two" --beams 1', console)
    assert greedy == [by_library(model, "six two", temperature=0)[0][0]]
    assert translations(f'{command} --text "six two" --quantize int8', console)[0]
    Path("in.txt").write_text("\n".join(LINES))
    line = f"{command} --beams 1 --temperature 3 --top_k 8 --seed"
    sampled = translations(f"{line} 5 --input in.txt --batch_size 3", console)
    for number in (0, 1, 4):  # each has its own seed, whatever else is in the batch
        alone = translations(f'{line} {5 + number} --text "{LINES[number]}"', console)
        assert alone == [sampled[number]]
    assert sampled != translations(f"{line} 6 --input in.txt", console)


def test_an_ensemble(
    translator: Path, command: str, model: TranslationModel, console: Console
) -> None:
    write_pairs(Path("pairs"))
    line = f"fit {SMALL_S2S} {PAIRS} --trainer.limit_train_batches 2"
    assert run(f"{line} --seed_everything 1 --run_dir other", TASK) == 0
    both = model._replace(others=(load_model("other").net,))
    rows = console.objects(f'{command} --ensemble other --text "six two" --beams 3', TASK)
    (source,), _ = model.tokenizer.encode_sources(["six two"], both.max_length)
    config = GenerationConfig(both.max_length, beams=3, early_stopping="likely")
    best = translate(both.nets, [source], config, **model.tokens)[0][0]
    assert rows[0]["translation"] == model.tokenizer.decode(best.tokens)
    assert rows[0]["score"] == pytest.approx(best.score, rel=1e-5)
    assert rows[0]["score"] != pytest.approx(by_library(model, "six two", beams=3)[0][1], rel=1e-3)
    twice = f'{command} --ensemble {translator} --text "six two"'
    assert translations(twice, console) == translations(f'{command} --text "six two"', console)
    for options in ("--quantize int8", "--nbest 2 --beams 2"):
        lines = translations(
            f'{command} --ensemble other --text "six two" --text "" {options}', console
        )
        assert lines[0] and not lines[-1].rpartition("\t")[2]


def test_what_does_not_fit_into_an_ensemble(command: str, console: Console) -> None:
    write_pairs(Path("pairs"))
    line = f"fit {SMALL_S2S} {PAIRS} --trainer.limit_train_batches 2 --trainer.limit_val_batches 1"
    wide = "--model.net.source_vocabulary 300 --model.net.target_vocabulary 300"
    for name, options, words in (
        ("small", "--data.tokenizer.vocabulary 12", "source tokens, target tokens"),
        ("prompted", "--data.tokenizer.prompt 'two: '", "prompt"),
        ("begun", "--data.tokenizer.begin true", "tokens that begin a text"),
        ("wide", wide, "size of the target vocabulary"),
        ("back", "--data.languages up-en", "direction"),
    ):
        assert run(f"{line} --trainer.limit_test_batches 0 {options} --run_dir {name}", TASK) == 0
        asked = f"{command} --ensemble {name} --text two"
        console.refused(asked, f"--ensemble {name}", words, task=TASK)
    console.refused(f"{command} --ensemble nosuch --text two", "--ensemble nosuch", task=TASK)
    asked = f"{command} --ensemble small --beams 1 --repetition_penalty 2 --text two"
    console.refused(asked, "repetition_penalty", task=TASK)


def test_length_limits(command: str, console: Console) -> None:
    words = ["two"] * 40
    out, err = console.printed(f'{command} --text "{" ".join(words)}" --text two', TASK)
    assert "1 of 2 sentences: truncated to 24 tokens, keeping the head" in err
    cut = translations(f'{command} --text "{" ".join(words[:23])}"', console)
    assert out.splitlines()[0] == cut[0]
    line = f'{command} --text "six five four three two" --max_new_tokens'
    out, err = console.printed(f"{line} 2", TASK)
    assert out.endswith(f"{UNFINISHED}\n")
    assert "1 translation was not finished: raise --max_new_tokens" in err
    (row,) = console.objects(f"{line} 2", TASK)
    assert not row["finished"] and row["tokens"] == 2
    assert f"{row['translation']}{UNFINISHED}\n" == out
    assert not translations(f"{line} 20", console)[0].endswith(UNFINISHED)


# Attention ----------------------------------------------------------------------------------------


def test_attention_weights_of_a_prefix_are_the_same(model: TranslationModel) -> None:
    (source,), _ = model.tokenizer.encode_sources(["six five four"], model.net.max_length)
    tokens = translate_text(model, source, 2).tokens
    weights = cross_attention_weights(model, source, tokens)
    assert weights.shape == (2, 2, len(tokens), len(source))  # layers, heads, target, source
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, len(tokens)))
    for size in range(1, len(tokens)):
        prefix = cross_attention_weights(model, source, tokens[:size])
        torch.testing.assert_close(prefix, weights[:, :, :size])
    assert token_labels(model.tokenizer.source, source) == ["six", "five", "four", "[EOS]"]


def test_labels_of_bytes() -> None:
    tokenizer = Tokenizer.train(["a é\n\t"], TokenizerConfig("bpe", 265, lowercase=False))
    (ids,) = tokenizer.encode_batch(["a é\n\t"])
    labels = token_labels(tokenizer, [*ids, tokenizer.special_id("eos")])
    assert labels == ["a", "\u2423", "Ã", "©", "\u21b5", "\u21e5", "[EOS]"]


def test_pictures(translator: Path, console: Console) -> None:
    asked = f'--ckpt_path {translator} --text "six $five$ four"'
    line = f"attend {asked} --output"
    out, _ = console.printed(f"{line} new/a.png", TASK)
    assert out.splitlines()[0] == translations(f"translate {asked}", console)[0]
    assert Path("new/a.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote new/a.png: 2 layers by 2 heads" in out
    out, _ = console.printed(f'{line} b.svg --target "SIX FIVE"', TASK)
    assert out.startswith("SIX FIVE\n") and "<svg" in Path("b.svg").read_text()
    out, _ = console.printed(f'{line} c.png --target "{"SIX " * 30}"', TASK)
    assert "--target: truncated to 24 tokens" in out
    console.refused(f"{line} d.png --beams 20000", "--beams", "10000", task=TASK)
    line = f'attend --ckpt_path {translator} --text "{"six " * 30}" --target SIX --output d.png'
    out, _ = console.printed(line, TASK)
    assert "--text: truncated to 24 tokens" in out


def test_panels(tmp_path: Path, monkeypatch: Patch) -> None:
    from matplotlib.figure import Figure

    made: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **options: made.append(self))
    weights = torch.rand(2, 3, 4, 5)  # layers, heads, target, source
    target = ["v", "w", "x", "y"]
    draw(weights, ["a", "b", "$c", "d", "e"], target, tmp_path / "a.png", "png")
    *panels, bar = made[0].axes
    assert bar.get_ylim() == (0, 1)
    assert made[0].get_supxlabel() == "source tokens (keys)"
    assert made[0].get_supylabel() == "target tokens (queries)"
    titles = [f"layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1, 2)]
    assert [panel.get_title() for panel in panels] == titles
    for panel, expected in zip(panels, weights.flatten(0, 1), strict=True):
        pixels = panel.images[0].get_array()
        assert pixels is not None and torch.equal(torch.as_tensor(pixels.data), expected)
        columns = [label.get_text() for label in panel.get_xticklabels()]
        assert columns == ["a", "b", r"\$c", "d", "e"]
        assert [label.get_text() for label in panel.get_yticklabels()] == target
        assert panel.get_ylim()[0] > panel.get_ylim()[1]  # the first on top


def test_decoder_only(console: Console) -> None:
    write_pairs(Path("pairs"))
    line = f"fit {SMALL_S2S} {PAIRS} --model.net.architecture prefix --run_dir r"
    assert run(f"{line} --trainer.limit_train_batches 2", TASK) == 0
    best = "r/checkpoints/best.ckpt"
    model = load_model(best)
    (source,), _ = model.tokenizer.encode_sources(["six five four"], model.net.max_length)
    weights = cross_attention_weights(model, source, [7, 8, 9])
    assert weights.shape == (2, 2, 3, 4)
    assert (weights.sum(-1) < 1).all()  # the rest is for the target itself
    assert run(f"translate --ckpt_path {best} --text two", TASK) == 0
    assert run(f"attend --ckpt_path {best} --text two", TASK) == 0
    assert Path("attention.png").exists()
