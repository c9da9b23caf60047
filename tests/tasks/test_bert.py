"""Text classification and pretraining through the command line: runs, predictions, refusals."""

import csv
import io
import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from datamodules.embedded.reviews import generate
from datamodules.reviews import ReviewData
from datamodules.tokenizers import SPECIAL_TOKENS, Tokenizer, TokenizerConfig
from datamodules.utils.files import write_text
from modules.models.bert import BERT_PRESETS, BertClassifier
from tasks.bert.task import BertTask, divergence
from tests.tasks.command import (
    DEFAULT_SECONDS,
    SHORT,
    checkpoint,
    metrics,
    process,
    run,
    same,
    write_reviews,
)
from tests.tasks.test_resume import KILL

NET = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2"
SMALL = f"{NET} --data.tokenizer.vocabulary 300"
FEW = "--trainer.limit_train_batches 6 --trainer.limit_val_batches 2 --trainer.max_epochs 2 --trainer.log_every_n_steps 1"
BERT = f"fit {SMALL} {FEW} --data.batch_size 8"
BRIEF = "--trainer.limit_test_batches 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "metric", "bound"), [("bert", "test/acc", 0.97), ("mlm", "test/acc", 0.2)]
)
def test_the_default_run(task: str, metric: str, bound: float, tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", task=task, cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / f"runs/{task}/latest/summary.json").read_text())
    assert summary[metric] >= bound
    assert seconds <= DEFAULT_SECONDS


def rows(path: str) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_need_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    texts, labels = generate()["test"]
    lines = [f'"{text}",{label}\n' for text, label in zip(texts[:40], labels, strict=False)]
    Path("reviews.csv").write_text("".join(["text,label\n", *lines]))
    assert run(f"{BERT} --data.source csv --data.path reviews.csv --run_dir r", "bert") == 0
    Path("reviews.csv").unlink()
    assert run('predict --ckpt_path r/checkpoints/best.ckpt --text "not bad"', "bert") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(("0 (", "1 ("))


def test_a_run_keeps_its_tokenizer_and_measures_as_scikit_learn_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score

    drawn: list[tuple[Tensor, list[str]]] = []

    def draw(counts: Tensor, names: list[str], path: Path) -> None:
        drawn.append((counts, names))
        path.touch()

    monkeypatch.setattr("tasks.classification.draw_confusion", draw)
    assert run(f"{BERT} --run_dir r", "bert") == 0
    kept = checkpoint("r", "best")["tessera"]["metadata"]
    assert Path("r/tokenizer.json").read_text() == kept["tokenizer"]
    assert Tokenizer.from_file("r/tokenizer.json").vocab_size == kept["vocabulary"]
    texts, labels = generate()["test"]
    Path("texts.txt").write_text("\n".join(texts))
    assert (
        run("predict --ckpt_path r/checkpoints/best.ckpt --data.predict_path texts.txt", "bert")
        == 0
    )
    found = rows("predictions.csv")
    assert [
        row["text"] for row in found
    ] == texts  # in the order given, though batches go by length
    positive = [float(row["positive"]) for row in found]
    guesses = [int(row["label"] == "positive") for row in found]
    assert guesses == [int(share > 0.5) for share in positive]
    ((counts, names),) = drawn
    assert counts.tolist() == confusion_matrix(labels, guesses).tolist() and names == [
        "negative",
        "positive",
    ]
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["test/acc"] == pytest.approx(accuracy_score(labels, guesses), abs=1e-6)
    assert summary["test/f1"] == pytest.approx(f1_score(labels, guesses, average="macro"), abs=1e-6)
    assert summary["test/auroc"] == pytest.approx(roc_auc_score(labels, positive), abs=1e-4)
    confidence = torch.tensor([max(share, 1 - share) for share in positive], dtype=torch.float64)
    right = torch.tensor(guesses) == torch.tensor(labels)
    within = [(confidence * 15).long() == number for number in range(15)]  # bins of equal width
    gaps = [(right[some].sum() - confidence[some].sum()).abs() for some in within]
    assert summary["test/ece"] == pytest.approx(float(sum(gaps)) / len(texts), abs=1e-5)
    shares = [float(row["train/padding"]) for row in metrics("r") if "train/padding" in row]
    data = ReviewData(batch_size=8, max_length=64, tokenizer=TokenizerConfig("word", 300, 1))
    assert (
        len(shares) == 2
        and shares[0] == pytest.approx(data.padding_share(), rel=1e-5)
        and shares[0] > 0
    )


def test_texts_from_the_command_line_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(f"{BERT} {BRIEF} --run_dir r", "bert") == 0
    ckpt = "--ckpt_path r/checkpoints/best.ckpt"
    capsys.readouterr()
    assert run(f'predict {ckpt} --text "not bad at all"', "bert") == 0
    said = capsys.readouterr().out
    assert said.startswith(("positive (", "negative (")) and not Path("predictions.csv").exists()
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO("not bad at all\nzwölf\n".encode()))
    )
    assert run(f"predict {ckpt} --data.predict_path - --run_dir p", "bert") == 0
    (first, second) = rows("p/predictions.csv")
    assert first["text"] == "not bad at all" and second["text"] == "zwölf"
    assert f"negative {float(first['negative']):.4f}" in said
    capsys.readouterr()
    assert run(f"predict {ckpt} --text good --data.predict_path lines.txt", "bert") == 2
    assert "--text and --data.predict_path cannot go together" in capsys.readouterr().err


def test_the_tokens_shown_are_those_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(line: str) -> tuple[list[str], str]:
        capsys.readouterr()
        assert run(f"tokenize {line}", "bert") == 0
        *tokens, end = capsys.readouterr().out.splitlines()
        return [token.split()[0] for token in tokens], end

    assert run(f"{BERT} {BRIEF} --data.tokenizer.truncate both --run_dir r", "bert") == 0
    ckpt, size = (
        "--ckpt_path r/checkpoints/best.ckpt",
        checkpoint("r")["tessera"]["metadata"]["vocabulary"],
    )
    words = "not a good film but the acting"
    tokens, end = shown(f"{ckpt} --text '{words}' --max_length 5")
    assert tokens == ["[CLS]", "not", "a", "acting", "[SEP]"]
    assert end == f"5 tokens, cut from 9; vocabulary {size}"
    for option in ("kind word", "kind bpe", "vocabulary 300", "file t.json", "truncate head"):
        assert run(f"tokenize {ckpt} --text good --tokenizer.{option}", "bert") == 2
        assert (
            f"--tokenizer.{option.split()[0]} cannot go with --ckpt_path" in capsys.readouterr().err
        )
    learned = Tokenizer.train(generate()["train"][0], TokenizerConfig("word", 1000, 1))
    tokens, end = shown(f"--text '{words}'")
    assert (
        tokens == ["[CLS]", *words.split(), "[SEP]"]
        and end == f"9 tokens; vocabulary {learned.vocab_size}"
    )
    assert shown(f"--text '{words}' --tokenizer.vocabulary 100")[1] == "9 tokens; vocabulary 100"


@pytest.mark.parametrize("task", ("bert", pytest.param("mlm", marks=pytest.mark.slow)))
def test_killed_in_mid_epoch_and_continued_ends_with_the_same_bits(
    task: str, tmp_path: Path
) -> None:
    write_reviews(Path("hub"))
    line = (
        f"fit {SMALL} --data.source hub --data.path hub --data.max_length 16 --data.batch_size 4 "
    )
    line += "--model.net.stack.dropout 0.1 --checkpoint.every_n_train_steps 3 --trainer.log_every_n_steps 1 "
    line += "--trainer.max_epochs 2"
    assert run(f"{line} --run_dir whole", task) == 0
    done = process(f"{line} --run_dir cut", KILL.format(step=13), task=task, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint("cut")["global_step"] == 12  # the epoch has 9 steps
    assert run("fit --resume cut", task) == 0
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(checkpoint("cut")[part], checkpoint("whole")[part]), part
    assert metrics("cut") == metrics("whole")


def test_r_drop_adds_the_mean_of_both_divergences() -> None:
    config = replace(BERT_PRESETS["tiny"], vocabulary=50, num_classes=3)
    net, labels = BertClassifier(config).train(), torch.tensor([0, 1, 2, 0])
    tokens, keep = torch.randint(1, 50, (4, 9)), torch.ones(4, 9, dtype=torch.bool)

    def loss(weight: float) -> Tensor:
        task = BertTask(r_drop=weight)
        task.net = net
        torch.manual_seed(1)
        return task.step({"tokens": tokens, "padding_mask": keep, "label": labels}, training=True)[
            0
        ]

    torch.manual_seed(1)
    one, two = net(tokens, keep), net(tokens, keep)
    p, q = one.log_softmax(-1), two.log_softmax(-1)
    both = [F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((p, q), (q, p))]
    torch.testing.assert_close(divergence(one, two), sum(both) / 2)
    assert divergence(one, one) == 0 and divergence(one, two) > 1e-4
    first, second = F.cross_entropy(one, labels), F.cross_entropy(two, labels)
    torch.testing.assert_close(loss(0.0), first)
    torch.testing.assert_close(loss(2.0), (first + second) / 2 + divergence(one, two))
    torch.testing.assert_close(loss(6.0) - loss(2.0), 2 * divergence(one, two))
    assert (
        run(f"{BERT} {BRIEF} --model.r_drop 1.0 --model.net.stack.dropout 0.1 --run_dir r", "bert")
        == 0
    )


def test_sentence_pairs_are_asked_for_by_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    write_reviews(Path("hub"))
    line = f"fit --preset tiny --data.tokenizer.vocabulary 300 --trainer.limit_train_batches 2 {BRIEF} "
    line += "--trainer.max_epochs 1 --data.source hub --data.path hub --data.max_length 32 --data.batch_size 4"
    assert run(f"{line} --model.net.next_sentence true", "mlm") == 2
    assert "add --data.next_sentence true" in capsys.readouterr().err
    assert run(f"{line} --data.next_sentence true --run_dir r", "mlm") == 0
    found = [float(row["val/next_acc"]) for row in metrics("r") if "val/next_acc" in row]
    assert len(found) == 1 and 0 <= found[0] <= 1
    assert checkpoint("r")["tessera"]["net"]["next_sentence"] is True
    weights = checkpoint("r", "best")["state_dict"]
    assert run("export --ckpt_path r/checkpoints/best.ckpt --format hf --output theirs", "mlm") == 0
    assert "transformers.BertForPreTraining.from_pretrained('theirs')" in capsys.readouterr().out
    for name in ("BertForPreTraining", "BertForMaskedLM"):
        model, told = getattr(transformers, name).from_pretrained(
            "theirs", output_loading_info=True
        )
        assert not told["missing_keys"] and not told["mismatched_keys"]
        assert bool(told["unexpected_keys"]) == (
            name == "BertForMaskedLM"
        )  # the head for sentences
        assert torch.equal(
            model.bert.embeddings.word_embeddings.weight, weights["net.encoder.embed.weight"]
        )
    model = transformers.BertForPreTraining.from_pretrained("theirs")
    assert torch.equal(model.cls.seq_relationship.weight, weights["net.sentence.linear.weight"])


@pytest.mark.parametrize("task", ("bert", "mlm"))
def test_what_the_default_run_suggests_works(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    brief = f"--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.max_epochs 1 {BRIEF}"
    assert run(f"fit {brief} --run_dir r", task) == 0
    lines = re.findall(rf"python -m tasks\.{task} (.*)", capsys.readouterr().out)
    assert {line.split()[0] for line in lines} == {"fit", "export"} | (
        {"predict"} if task == "bert" else set()
    )
    Path("FILE").write_text("not bad at all\n")
    for line in lines:
        assert run(line.replace("max_epochs N", "max_epochs 2"), task) == 0, capsys.readouterr().err


def test_the_padding_of_a_tokenizer_is_that_of_the_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learned = Tokenizer.train(generate()["train"][0][:500], TokenizerConfig("bpe", 300))
    names = dict(
        zip(
            SPECIAL_TOKENS.values(),
            ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<a>", "<b>"),
            strict=True,
        )
    )
    model = json.loads(learned.to_json())["model"]
    Path("roberta").mkdir()
    Path("roberta/vocab.json").write_text(
        json.dumps({names.get(token, token): i for token, i in model["vocab"].items()})
    )
    Path("roberta/merges.txt").write_text(
        "#version\n" + "\n".join(" ".join(pair) for pair in model["merges"])
    )
    line = f"fit {NET} {FEW} {BRIEF} --data.tokenizer.file roberta"
    assert run(f"{line} --run_dir r", "bert") == 0
    saved = checkpoint("r")
    assert saved["tessera"]["net"]["padding"] == saved["tessera"]["metadata"]["padding"] == 1
    assert not saved["state_dict"]["net.encoder.embed.weight"][1].any()
    assert run(f"{line} --model.net.padding 2", "bert") == 2
    assert "the tokenizer pads with token 1 and the network with token 2" in capsys.readouterr().err


def test_a_run_has_its_tokenizer_whatever_becomes_of_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = generate()["train"][0]
    Path("t.json").write_text(Tokenizer.train(texts, TokenizerConfig("word", 150)).to_json())
    assert run(f"{BERT} {BRIEF} --data.tokenizer.file t.json", "bert") == 2
    assert "vocabulary 300 (vocabulary 300) cannot go with" in (said := capsys.readouterr().err)
    assert "the file t.json (150 tokens)" in said
    assert run(f"fit {NET} {FEW} {BRIEF} --data.tokenizer.file t.json --run_dir r", "bert") == 0
    options = checkpoint("r")["tessera"]["config"]["data"]["tokenizer"]
    assert options == checkpoint("r")["tessera"]["metadata"]["tokenizer_options"]
    assert (options["kind"], options["vocabulary"], options["min_frequency"]) == ("word", 150, None)
    for name in ("t.json", "other.json"):
        Path(name).write_text(Tokenizer.train(texts, TokenizerConfig("word", 100)).to_json())
    line = "predict --ckpt_path r/checkpoints/best.ckpt --text good"
    assert run(line, "bert") == 0
    assert run(f"{line} --data.tokenizer.file other.json", "bert") == 2
    assert "other.json (100 tokens) is not the checkpoint's (150 tokens)" in capsys.readouterr().err
    Path("t.json").unlink()
    assert run(line, "bert") == 0
    assert run(f"{line} --data.tokenizer.file nosuch.json", "bert") == 2
    assert "nosuch.json does not exist" in capsys.readouterr().err
    assert (
        run(f"{line} --data.tokenizer.kind character --data.tokenizer.vocabulary 70", "bert") == 2
    )
    said = capsys.readouterr().err
    assert "kind character (vocabulary 70)" in said and "150 tokens" in said


def test_files_are_utf_8_wherever_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        io, "text_encoding", lambda encoding, level=2: encoding or "ascii"
    )  # of a plain C locale
    write_text(Path("text"), "zwölf")
    assert Path("text").read_bytes() == "zwölf".encode()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("fit --preset tini", 2, "did you mean 'tiny'"),
        ("fit --model.r_drop -1", 2, "r_drop -1.0 must not be negative"),
        ("fit --model.pretrained nowhere", 2, "nowhere: no such folder"),
        ("fit --model.pretrained v/checkpoints/best.ckpt", 2, "is of task 'vit'"),
        (
            "fit --preset tiny --model.net.max_length 32 --data.max_length 64",
            2,
            "32 learned positions",
        ),
        ("fit --preset tiny --model.net.vocabulary 20", 2, "the network 20"),
        ("fit --model.net.num_classes 3", 2, "contradicts the data, which have 2"),
        ("predict --ckpt_path v/checkpoints/best.ckpt --text x", 2, "use python -m tasks.vit"),
        ('tokenize --text " "', 2, "--text is empty"),
        ("tokenize --text x --tokenizer.file nowhere.json", 2, "nowhere.json does not exist"),
        ("tokenize --text x --max_length 0", 2, "--max_length 0 leaves no room"),
        ("fit --preset tiny --model.net.next_sentence true", 2, "needs pairs of sentences"),
    ],
)
def test_bad_input(line: str, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "v/checkpoints" in line:
        assert run(f"fit {SHORT} --run_dir v") == 0
    capsys.readouterr()
    assert run(line, "bert") == code
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1
    assert not Path("runs").exists()
