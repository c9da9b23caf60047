"""Encoder-decoders through the command line: metrics, decoding, and what a checkpoint holds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu import corpus_bleu, corpus_chrf
from torch.nn import functional as F

from datamodules.tokenizers import PairTokenizerConfig
from datamodules.translation import TranslationData
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from tasks.seq2seq.architectures import TranslationModel, load_model
from tasks.seq2seq.scores import ScoredTranslation, TranslationScores, table
from tests.helpers.command import Console, Patch, run
from tests.helpers.results import metrics, summary
from tests.helpers.tiny import NO_UPDATES, PAIRS, SMALL_S2S, write_pairs

FIT = f"fit {SMALL_S2S} {PAIRS}"


def read_translations(folder: str | Path) -> list[list[str]]:
    lines = Path(folder, "translations.tsv").read_text().splitlines()[1:]
    return [line.split("\t") for line in lines]


@torch.no_grad()
def sum_losses(
    model: TranslationModel, sources: list[str], references: list[str]
) -> tuple[float, int, int]:
    """Sum of the losses, correct predictions, tokens: each pair alone, all logits at once."""
    total = 0.0
    correct = 0
    count = 0
    for source, reference in zip(sources, references, strict=True):
        (read,), _ = model.tokenizer.encode_sources([source], 24)
        (ids,) = model.tokenizer.target.encode_batch([reference])
        written = model.tokenizer.build_target(ids, 24)
        hidden = model.net(torch.tensor([read]), torch.tensor([written[:-1]]))
        logits = model.net.logits(hidden)[0]  # (N, V)
        targets = torch.tensor(written[1:])
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return total, correct, count


def test_metrics_are_those_of_the_texts(translator: Path, console: Console) -> None:
    folder = translator.parent.parent
    found = summary(folder)
    model = load_model(str(translator))
    files = [folder.parent / "pairs" / f"test.{name}" for name in ("en", "up")]
    sources, references = (file.read_text().splitlines() for file in files)
    total, correct, count = sum_losses(model, sources, references)
    rows, _ = model.tokenizer.encode_sources(sources, 24)
    config = GenerationConfig(24, beams=2, early_stopping="likely")
    ranked = translate(model.net, rows, config, **model.tokens)
    texts = [model.tokenizer.decode(best.tokens) for best, *_ in ranked]
    expected = {
        "loss": total / count,
        "perplexity": math.exp(total / count),
        "acc": correct / count,
        "bleu": corpus_bleu(texts, [references]).score,
        "chrf": corpus_chrf(texts, [references]).score,
        "exact": sum(map(str.__eq__, texts, references)) / 12,
    }
    for name, value in expected.items():
        assert found[f"test/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert found["test/chrf"] > 10 and found["tokens_per_s"] > found["samples_per_s"] > 0
    table = read_translations(folder)
    pairs = zip(sources, texts, references, strict=True)
    assert [row[:4] for row in table] == [[str(i), *row] for i, row in enumerate(pairs)]
    assert found.get("unfinished", 0) == sum(row[4] == "no" for row in table)
    assert found["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|")
    assert texts[0] in found["translations"]
    validated = next(row for row in metrics(folder) if "val/bleu" in row)
    assert {"val/chrf", "val/exact", "val/perplexity", "val/loss", "val/acc"} <= validated.keys()
    out, _ = console.printed(f"test --ckpt_path {translator}", "seq2seq")
    assert f"{found['test/bleu']:.4f}" in out and found["chrf_signature"] in out


def test_a_lowercased_translator_is_compared_in_lowercase(console: Console) -> None:
    write_pairs(Path("pairs"))
    console.printed(
        f"{FIT} --data.tokenizer.lowercase true --trainer.max_steps 2 --run_dir r", "seq2seq"
    )
    found = summary("r")
    _, _, texts, references, _ = zip(*read_translations("r"), strict=True)
    assert any(reference.isupper() for reference in references)
    expected = corpus_chrf(texts, [[reference.lower() for reference in references]]).score
    assert 0 < found["test/chrf"] == pytest.approx(expected, rel=1e-4)
    assert "case:lc" in found["chrf_signature"] and "case:lc" in found["bleu_signature"]


def test_long_texts_are_printed_in_part(console: Console) -> None:
    write_pairs(Path("pairs"))
    for name in ("en", "up"):
        Path(f"pairs/test.{name}").write_text("one two three four " * 100 + "\n")
    out, _ = console.printed(f"{FIT} --trainer.max_steps 1 --run_dir r", "seq2seq")
    assert "one two" in out and max(map(len, out.splitlines())) < 200
    assert len(read_translations("r")[0][1]) > 1000


def test_decoding_options(monkeypatch: Patch) -> None:
    seen: set[tuple[int, int, float]] = set()

    def spy(net: Any, sources: Any, config: GenerationConfig, **tokens: Any) -> Any:
        seen.add((config.beams, config.max_new_tokens, config.length_penalty))
        return translate(net, sources, config, **tokens)

    monkeypatch.setattr("tasks.seq2seq.task.translate", spy)
    write_pairs(Path("pairs"))
    line = f"{FIT} {NO_UPDATES} --trainer.limit_train_batches 1"
    line += " --model.decoding.length_penalty 0.5 --model.decoding.val_beams 3"
    line += " --model.decoding.beams 4 --model.decoding.max_new_tokens 5"
    assert run(f"{line} --run_dir r", "seq2seq") == 0
    assert seen == {(3, 5, 0.5), (4, 5, 0.5)}
    unfinished = [row[4] == "no" for row in read_translations("r")]
    found = summary("r")
    assert found["unfinished"] == sum(unfinished) > 0
    assert found["translations"].count("[...]") == sum(unfinished[:3])
    seen.clear()
    line = "test --ckpt_path r/checkpoints/best.ckpt --model.decoding.max_new_tokens null"
    assert run(line, "seq2seq") == 0
    assert seen == {(4, 24, 0.5)}


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(
    ("options", "joint"),
    [
        ("--data.tokenizer.joint false --model.net.tying target", False),
        ("--model.net.tying none --model.net.position rotary --model.net.decoder.order post", True),
        ("--model.net.architecture prefix --model.net.position learned", True),
    ],
)
@torch.no_grad()
def test_a_checkpoint_is_all_that_evaluation_needs(options: str, joint: bool) -> None:
    write_pairs(Path("pairs"))
    with torch.enable_grad():
        assert run(f"{FIT} {options} --trainer.limit_train_batches 2 --run_dir r", "seq2seq") == 0
    files = {path.name for path in Path("r").glob("*tokenizer.json")}
    separate = {"source.tokenizer.json", "target.tokenizer.json"}
    assert files == ({"tokenizer.json"} if joint else separate)
    Path("pairs").rename("moved")
    model = load_model("r/checkpoints/best.ckpt")
    assert model.net.max_length == 24
    tokenizer = PairTokenizerConfig(**model.metadata["tokenizer_options"])
    data = TranslationData("txt", "moved", "en-up", max_length=24, tokenizer=tokenizer)
    data.set_metadata(model.metadata)
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    assert len(batch["index"]) == 12  # all of the test
    hidden = model.net(batch["source"], batch["tokens"], batch["source_padding_mask"])
    loss, _ = model.net.loss(hidden, batch["targets"])
    assert float(loss) == pytest.approx(summary("r")["test/loss"], rel=1e-5)


# Scores -------------------------------------------------------------------------------------------

HOUSE = 'Ein "Haus"\nam See\u2028!'
ROWS = [
    ScoredTranslation(
        0, "A dog.", "Der Hund läuft über die Straße .", "Der Hund rennt über.", True
    ),
    ScoredTranslation(1, "Two", "Zwei Männer\tsitzen da", "Zwei Männer sitzen  da", False),
    ScoredTranslation(2, "A child", "", "Ein Kind spielt im Sand.", True),
    ScoredTranslation(3, 'A\t"house"', HOUSE, 'Ein "Haus" am See!', True),
]


def scored(*batches: Sequence[ScoredTranslation], lowercase: bool = False) -> TranslationScores:
    metric = TranslationScores("de", lowercase)
    for batch in batches:
        numbers, sources, texts, references, finished = (
            [row[i] for row in batch] for i in range(5)
        )
        targets = {"index": numbers, "sources": sources, "references": references}
        metric.update({"texts": texts, "finished": finished}, targets)
    return metric


def test_scores_are_those_of_sacrebleu() -> None:
    metric = scored([ROWS[2], ROWS[0]], [], [ROWS[3], ROWS[1]])
    found = metric.compute()
    assert metric.found == ROWS and metric.unfinished == 1  # in the order of the data
    texts = [row.text for row in ROWS]
    references = [[row.reference for row in ROWS]]
    assert 1 < float(found["bleu"]) == pytest.approx(corpus_bleu(texts, references).score)
    assert 1 < float(found["chrf"]) == pytest.approx(corpus_chrf(texts, references).score)
    assert float(found["exact"]) == 0.25  # equal but for white space
    gathered = TranslationScores("de")  # of three ranks, one of which has nothing
    parts = [torch.cat(scored(rows).texts) for rows in (ROWS[:1], [], ROWS[1:])]
    gathered.texts = torch.cat(parts)  # type: ignore[assignment]
    assert gathered.compute() == found
    metric.reset()
    assert set(map(float, metric.compute().values())) == {0.0}


def test_lowercased_scores() -> None:
    rows = [row._replace(text=row.text.lower(), source=row.source.lower()) for row in ROWS]
    found = scored(rows, lowercase=True).compute()
    lower = [row._replace(reference=row.reference.lower()) for row in rows]
    assert found == scored(lower).compute() != scored(rows).compute()
    assert float(found["exact"]) == 0.25 > float(scored(rows).compute()["exact"])


@pytest.mark.parametrize(("language", "tokenizer"), [
    ("de", "13a"), ("zh", "zh"), ("zh-Hant", "zh"), ("ZH_cn", "zh"), ("zho_Hans", "zh"),
    ("ja", "char"), ("ja_XX", "char"), ("kor", "char"), ("th", "char"),
])  # fmt: skip
def test_signatures(language: str, tokenizer: str) -> None:
    signatures = TranslationScores(language).signatures()
    bleu = f"nrefs:1|case:mixed|eff:no|tok:{tokenizer}|smooth:exp|version:"
    assert signatures["bleu_signature"].startswith(bleu)
    chrf = "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:"
    assert signatures["chrf_signature"].startswith(chrf)


def test_the_table_has_one_line_per_translation() -> None:
    lines = table(ROWS).splitlines()
    assert lines[0] == "index\tsource\ttranslation\treference\tfinished"
    assert len(lines) == 1 + len(ROWS) and lines[2].endswith("\tno")
    assert lines[4] == '3\tA "house"\tEin "Haus" am See !\tEin "Haus" am See!\tyes'
