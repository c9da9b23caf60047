"""Encoder-decoders through the command line: runs, their figures, what goes in and comes out."""

import json
import math
import re
import signal
import time
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
from tasks.checkpoints.reading import KEY
from tasks.seq2seq.decoding import decoding_tokens
from tasks.seq2seq.translator import TranslationModel, load_model
from tests.tasks.command import (
    DEFAULT_SECONDS,
    PAIRS,
    SMALL_S2S,
    checkpoint,
    metrics,
    process,
    run,
    same,
    write_pairs,
)
from tests.tasks.forked import python
from tests.tasks.test_resume import KILL

FIT = f"fit {SMALL_S2S} {PAIRS}"


def summary(folder: str | Path) -> dict[str, Any]:
    """What a run's `summary.json` holds."""
    return json.loads(Path(folder, "summary.json").read_text())


@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", task="seq2seq", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "runs/seq2seq/latest")["test/exact"] >= 0.98
    assert seconds <= DEFAULT_SECONDS


# Figures ------------------------------------------------------------------------------------------------------------


def by_hand(model: TranslationModel, folder: Path) -> tuple[float, int, int]:
    """Sum of the test losses, right guesses, tokens: each pair alone, from the text, all its logits at once."""
    total, right, count, tokenizer = 0.0, 0, 0, model.tokenizer
    sides = [(folder / f"test.{name}").read_text().splitlines() for name in ("en", "up")]
    for source, target in zip(*sides, strict=True):
        (read,), _ = tokenizer.encode_sources([source], 24)
        written = tokenizer.build_target(tokenizer.target.encode_batch([target])[0], 24)
        with torch.no_grad():
            hidden = model.net(torch.tensor([read]), torch.tensor([written[:-1]]))
            logits = model.net.logits(hidden)[0]  # (N, V)
        targets = torch.tensor(written[1:])
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        right, count = right + int((logits.argmax(-1) == targets).sum()), count + len(targets)
    return total, right, count


def test_figures_are_those_of_the_texts(
    translator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = translator.parent.parent
    found, model, pairs = summary(folder), load_model(str(translator)), folder.parent / "pairs"
    total, right, count = by_hand(model, pairs)
    assert found["test/loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["test/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found["test/acc"] == pytest.approx(right / count, abs=1e-6)
    sources, references = (
        (pairs / f"test.{name}").read_text().splitlines() for name in ("en", "up")
    )
    rows, _ = model.tokenizer.encode_sources(sources, 24)
    config = GenerationConfig(24, beams=2, early_stopping="likely")
    texts = [
        model.tokenizer.decode(best.tokens)
        for best, *_ in translate(model.net, rows, config, **decoding_tokens(model.tokenizer))
    ]
    assert found["test/bleu"] == pytest.approx(corpus_bleu(texts, [references]).score, abs=1e-3)
    assert (
        found["test/chrf"] == pytest.approx(corpus_chrf(texts, [references]).score, abs=1e-3)
        and found["test/chrf"] > 10
    )
    assert found["test/exact"] == pytest.approx(
        sum(map(str.__eq__, texts, references)) / 12, abs=1e-6
    )
    table = [
        line.split("\t") for line in (folder / "translations.tsv").read_text().splitlines()[1:]
    ]
    assert [row[:4] for row in table] == [
        [str(i), *row] for i, row in enumerate(zip(sources, texts, references, strict=True))
    ]
    assert found.get("unfinished", 0) == sum(row[4] == "no" for row in table)
    assert found["bleu_signature"].startswith(
        "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
    )
    assert texts[0] in found["translations"] and found["tokens_per_s"] > 0
    logged = metrics(folder)
    assert {"train/loss", "train/grad_norm", "train/lr"} <= logged[0].keys()
    validated = next(row for row in logged if "val/bleu" in row)
    assert {"val/chrf", "val/exact", "val/perplexity", "val/loss", "val/acc"} <= validated.keys()
    assert run(f"test --ckpt_path {translator}", "seq2seq") == 0
    assert (
        f"{found['test/bleu']:.4f}" in (said := capsys.readouterr().out)
        and found["chrf_signature"] in said
    )


def test_validation_and_test_decode_as_they_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, float]] = []

    def spy(net: Any, sources: Any, config: GenerationConfig, **ends: Any) -> Any:
        seen.append((config.beams, config.max_new_tokens, config.length_penalty))
        return translate(net, sources, config, **ends)

    monkeypatch.setattr("tasks.seq2seq.task.translate", spy)
    write_pairs(Path("pairs"))
    line = f"{FIT} --trainer.limit_train_batches 1 --model.optimizer.lr 1e-12 --model.decoding.length_penalty 0.5"
    line += " --model.decoding.val_beams 3 --model.decoding.beams 4 --model.decoding.max_new_tokens"
    assert run(f"{line} 5 --run_dir r", "seq2seq") == 0
    assert set(seen) == {(3, 5, 0.5), (4, 5, 0.5)}
    kept = summary(
        "r"
    )  # hardly a text ends within five tokens of a network that has learned nothing
    table = Path("r/translations.tsv").read_text().splitlines()[1:]
    cut = [line.endswith("\tno") for line in table]
    assert kept["unfinished"] == sum(cut) > 0 and kept["translations"].count("[...]") == sum(
        cut[:3]
    )
    seen.clear()
    assert (
        run(
            "test --ckpt_path r/checkpoints/best.ckpt --model.decoding.max_new_tokens null",
            "seq2seq",
        )
        == 0
    )
    assert set(seen) == {(4, 24, 0.5)}


def test_smoothing_is_of_training_alone() -> None:
    write_pairs(Path("pairs"))
    line = f"{FIT} --trainer.limit_train_batches 1 --model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"
    for rate in (0.0, 0.5):
        assert run(f"{line} --model.label_smoothing {rate} --run_dir r{rate}", "seq2seq") == 0
    plain, smooth = metrics("r0.0"), metrics("r0.5")
    assert plain[0]["train/loss"] != smooth[0]["train/loss"]
    assert plain[-1]["test/loss"] == smooth[-1]["test/loss"]


# Runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_in_mid_epoch_and_continued_ends_with_the_same_bits(tmp_path: Path) -> None:
    write_pairs(Path("pairs"), 64)
    line = f"{FIT} --model.average 2 --data.loading.batch_tokens 96 --model.net.decoder.dropout 0.1"
    line += " --checkpoint.every_n_train_steps 3 --trainer.max_epochs 3"
    assert run(f"{line} --run_dir whole", "seq2seq") == 0
    steps = checkpoint("whole")["global_step"]
    cut = steps * 2 // 3 + 1  # after a validation or two
    done = process(f"{line} --run_dir cut", KILL.format(step=cut), task="seq2seq", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint("cut")["callbacks"]["LastWeights"]["last"]  # after the first validation
    assert steps // 3 < checkpoint("cut")["global_step"] <= cut < steps
    assert run("fit --resume cut", "seq2seq") == 0
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(checkpoint("cut")[part], checkpoint("whole")[part]), part
    assert metrics("cut") == metrics("whole")
    assert Path("cut/translations.tsv").read_text() == Path("whole/translations.tsv").read_text()


def test_the_average_is_what_is_saved_and_tested() -> None:
    write_pairs(Path("pairs"), 64)
    line = (
        f"{FIT} --trainer.max_epochs 3 --checkpoint.save_top_k -1 --checkpoint.filename {{epoch}}"
    )
    line += " --checkpoint.every_n_epochs 1"
    assert run(f"{line} --run_dir plain", "seq2seq") == 0
    assert run(f"{line} --model.average 2 --run_dir mean", "seq2seq") == 0
    single = [checkpoint("plain", f"epoch={epoch}")["state_dict"] for epoch in range(3)]
    for name, value in checkpoint("mean", "last")["state_dict"].items():
        torch.testing.assert_close(
            value, (single[1][name] + single[2][name]) / 2, atol=1e-6, rtol=1e-5
        )
    first, second = (
        [row["val/loss"] for row in metrics(name) if "val/loss" in row]
        for name in ("plain", "mean")
    )
    assert first[0] == second[0] and first[1] != second[1] and first[2] != second[2]


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path) -> None:
    write_pairs(Path("pairs"))
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --data.batch_size 8"
    line = f"{FIT} --trainer.limit_train_batches 6 --data.loading.eval_batch_size 5"
    done = python(f"tasks.seq2seq {line} {two} --run_dir two", tmp_path)
    assert done.returncode == 0, done.stderr
    assert run(f"{line} --run_dir one", "seq2seq") == 0
    one, pair = summary("one"), summary("two")
    assert one["steps"] == pair["steps"]
    for name in ("loss", "acc"):
        assert pair[f"test/{name}"] == pytest.approx(one[f"test/{name}"], rel=1e-3), name
    rows = [
        [line.split("\t") for line in Path(name, "translations.tsv").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert len(rows[0]) == 13 and [row[::3] for row in rows[0]] == [row[::3] for row in rows[1]]
    made, references = [row[2] for row in rows[1][1:]], [[row[3] for row in rows[1][1:]]]
    assert pair["test/bleu"] == pytest.approx(
        corpus_bleu(made, references).score
    )  # of what both ranks made
    assert pair["test/chrf"] == pytest.approx(corpus_chrf(made, references).score)


# Networks and tokenizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, joint",
    [
        ("--data.tokenizer.joint false --model.net.tying target", False),
        ("--model.net.tying none --model.net.position rotary --model.net.decoder.order post", True),
        ("--model.net.architecture prefix --model.net.position learned", True),
    ],
)
def test_what_is_saved_is_enough(options: str, joint: bool) -> None:
    write_pairs(Path("pairs"))
    assert run(f"{FIT} {options} --trainer.limit_train_batches 2 --run_dir r", "seq2seq") == 0
    files = {path.name for path in Path("r").glob("*.json")} - {"summary.json"}
    assert files == (
        {"tokenizer.json"} if joint else {"source.tokenizer.json", "target.tokenizer.json"}
    )
    saved = checkpoint("r")
    assert saved[KEY]["net"]["max_length"] == 24
    Path("pairs").rename("gone")
    model = load_model("r/checkpoints/best.ckpt")
    data = TranslationData(
        "files",
        "gone",
        "en-up",
        max_length=24,
        tokenizer=PairTokenizerConfig(**model.metadata["tokenizer_options"]),
    )
    data.set_metadata(model.metadata)
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    with torch.no_grad():
        hidden = model.net(batch["source"], batch["tokens"], batch["source_padding_mask"])
        loss, _ = model.net.loss(hidden, batch["targets"])
    assert len(batch["index"]) == 12  # all of the test
    assert float(loss) == pytest.approx(summary("r")["test/loss"], rel=1e-5)


def test_a_run_goes_on_from_a_checkpoint_with_its_tokenizer(translator: Path) -> None:
    write_pairs(Path("pairs"), 32)
    line = f"fit {PAIRS} --data.max_length 24 --trainer.max_epochs 1 --model.optimizer.lr 1e-12"
    assert (
        run(
            f"{line} --model.optimizer.weight_decay 0 --model.pretrained {translator} --run_dir r",
            "seq2seq",
        )
        == 0
    )
    theirs, ours = torch.load(translator, weights_only=True), checkpoint("r")
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, atol=1e-6, rtol=0)
    assert ours[KEY]["metadata"]["source_tokenizer"] == theirs[KEY]["metadata"]["source_tokenizer"]


def test_what_the_default_run_suggests_works(capsys: pytest.CaptureFixture[str]) -> None:
    brief = "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
    brief += " --data.loading.eval_batch_size 4 --model.decoding.max_new_tokens 8"
    assert run(f"fit {brief} --trainer.max_epochs 1 --run_dir r", "seq2seq") == 0
    lines = re.findall(r"python -m tasks\.seq2seq (.*)", capsys.readouterr().out)
    assert {line.split()[0] for line in lines} == {"fit", "translate", "attend", "export"}
    for line in lines:
        line = line.replace("epochs N", "epochs 2").replace("...", "the fifth of March")
        assert run(line, "seq2seq") == 0, capsys.readouterr().err
