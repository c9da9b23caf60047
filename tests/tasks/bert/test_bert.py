"""Text classification and pretraining: what a step computes, predictions, tokenizers, refusals."""

import csv
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from datamodules.embedded.reviews import generate
from datamodules.reviews import ReviewData
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.files import write_text
from modules.models.bert import BERT_PRESETS, BertMaskedLM
from tasks.mlm.task import MaskedLMTask
from tests.helpers.command import Console, Patch, run
from tests.helpers.model_folders import ROBERTA_TOKENS, save_merges
from tests.helpers.results import checkpoint, logged, metrics, summary
from tests.helpers.tiny import NET, write_reviews

SMALL = f"{NET} --data.tokenizer.vocabulary 300"
FEW = (
    "--trainer.limit_train_batches 6 --trainer.limit_val_batches 2 --trainer.max_epochs 2 "
    "--trainer.log_every_n_steps 1"
)
BERT = f"fit {SMALL} {FEW} --data.batch_size 8"
BRIEF = "--trainer.limit_test_batches 1"
CKPT = "--ckpt_path r/checkpoints/best.ckpt"


def read_table(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Steps --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_next_sentence_loss() -> None:
    """Class 0 says that the second sentence follows, as in Hugging Face's BERT."""
    task = MaskedLMTask()
    config = replace(BERT_PRESETS["tiny"], vocabulary=60, next_sentence=True)
    net = task.net = BertMaskedLM(config).eval()
    task.masker = lambda tokens, padding_mask, seeds: (tokens, padding_mask)  # type: ignore[assignment]
    tokens = torch.randint(5, 60, (3, 9))
    segments = (torch.arange(9) > 4).long().expand(3, 9)
    label = torch.tensor([0, 1, 0])
    pairs = {"tokens": tokens, "padding_mask": tokens > 0, "segments": segments}
    logits = net.sentence_logits(net.encoder(*pairs.values()))
    pairs |= {"index": torch.arange(3), "is_next": 1 - label}
    loss, _, means, counts, _ = task.step(pairs, training=False)
    torch.testing.assert_close(loss - means["token_loss"], F.cross_entropy(logits, label))
    assert counts["next_acc"] == 3
    assert means["next_acc"] == (logits.argmax(1) == label).float().mean()


@torch.no_grad()
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_of_unknown_tokens_does_not_count_in_evaluation(training: bool) -> None:
    task = MaskedLMTask()
    task.net = BertMaskedLM(replace(BERT_PRESETS["tiny"], vocabulary=60)).eval()
    task.masker = lambda tokens, *_: (tokens, torch.zeros_like(tokens).bool())  # type: ignore
    tokens = torch.ones(2, 5, dtype=torch.int64)
    batch = {"tokens": tokens, "padding_mask": tokens > 0, "index": torch.arange(2)}
    found = task.step(batch, training)
    assert found.num_targets == found.targets["token_loss"] == int(training)
    assert found.loss.isfinite()


# Runs ---------------------------------------------------------------------------------------------


def test_metrics_are_those_of_scikit_learn(monkeypatch: Patch) -> None:
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score

    drawn: list[tuple[Tensor, list[str]]] = []

    def draw(counts: Tensor, names: list[str], file: BinaryIO) -> None:
        drawn.append((counts, names))
        Image.new("RGB", (4, 4)).save(file, "png")

    monkeypatch.setattr("tasks.problems.draw_confusion", draw)
    assert run(f"{BERT} --run_dir r", "bert") == 0
    texts, labels = generate()["test"]
    Path("texts.txt").write_text("\n".join(texts))
    assert run(f"predict {CKPT} --input texts.txt", "bert") == 0
    rows = read_table("predictions.csv")
    assert [row["text"] for row in rows] == texts
    positive = [float(row["positive"]) for row in rows]
    guesses = [int(row["label"] == "positive") for row in rows]
    assert guesses == [int(probability > 0.5) for probability in positive]
    ((counts, names),) = drawn
    assert counts.tolist() == confusion_matrix(labels, guesses).tolist()
    assert names == ["negative", "positive"]
    confidence = torch.tensor([max(p, 1 - p) for p in positive], dtype=torch.float64)
    correct = torch.tensor(guesses) == torch.tensor(labels)
    bins = [(confidence * 15).long() == number for number in range(15)]
    gaps = [(correct[some].sum() - confidence[some].sum()).abs() for some in bins]
    expected = {
        "acc": accuracy_score(labels, guesses),
        "f1": f1_score(labels, guesses, average="macro"),
        "auroc": roc_auc_score(labels, positive),
        "ece": float(sum(gaps)) / len(texts),
    }
    for name, value in expected.items():
        assert summary("r")[f"test/{name}"] == pytest.approx(value, abs=2e-5), name
    padding = logged("r", "train/padding")
    data = ReviewData(batch_size=8, max_length=64, tokenizer=TokenizerConfig("word", 300, 1))
    assert len(padding) == 2
    assert 0 < padding[0] == pytest.approx(data.padding_fraction(), rel=1e-5)


@pytest.mark.parametrize("texts, count", [
    (["the film is not bad", "the film zwölf acht", "zwölf acht film"], 2),
    (["the film is not zwölf"], 0),
])  # fmt: skip
def test_texts_of_unknown_words_are_reported(
    texts: list[str], count: int, recwarn: pytest.WarningsRecorder
) -> None:
    data = ReviewData(tokenizer=TokenizerConfig("word"))
    data.setup("fit")
    data.predict_text = texts
    recwarn.clear()
    data.setup("predict")
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == bool(count)
    assert all(f"{count} of 3" in line and repr(texts[1]) in line for line in said)


def test_predict_needs_no_training_data(console: Console, monkeypatch: Patch) -> None:
    texts, labels = generate()["test"]
    lines = [f'"{text}",{label}\n' for text, label in zip(texts[:40], labels, strict=False)]
    Path("reviews.csv").write_text("".join(["text,label\n", *lines]))
    source = "--data.source csv --data.path reviews.csv --data.tokenizer.truncate both"
    assert run(f"{BERT} {BRIEF} {source} --run_dir r", "bert") == 0
    Path("reviews.csv").unlink()
    out, _ = console.printed(f'predict {CKPT} --text "not bad at all"', "bert")
    assert not Path("predictions.csv").exists()
    stdin = io.TextIOWrapper(io.BytesIO("not bad at all\nzwölf\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(f"predict {CKPT} --input - --output p.csv", "bert") == 0
    first, second = read_table("p.csv")
    assert (first["text"], second["text"]) == ("not bad at all", "zwölf")
    label = first["label"]
    assert out.startswith(f"label {label} (") and f"{label} {float(first[label]):.4f}" in out
    both = f"predict {CKPT} --text good --input lines.txt"
    console.refused(both, "--text and --input", task="bert")

    metadata = checkpoint("r")["tessera"]["metadata"]
    assert Path("r/tokenizer.json").read_text() == metadata["tokenizer"]
    words = "not a good film but the film"
    out, _ = console.printed(f"tokenize {CKPT} --text '{words}' --max_length 5", "bert")
    *tokens, total, end = out.splitlines()
    assert [token.split()[0] for token in tokens] == ["[CLS]", "not", "a", "film", "[SEP]"]
    assert total == f"5 tokens; vocabulary {metadata['vocabulary']}"
    assert end == "9 tokens: truncated to 5 tokens, keeping head and tail"
    for option in ("kind word", "vocabulary 300", "file t.json", "truncate head"):
        line = f"tokenize {CKPT} --text good --tokenizer.{option}"
        console.refused(line, f"--tokenizer.{option.split()[0]} ", task="bert")


def test_tokenize_without_a_checkpoint(console: Console) -> None:
    learned = Tokenizer.train(generate()["train"][0], TokenizerConfig("word", 1000, 1))
    words = "not a good film but the acting"
    out, _ = console.printed(f"tokenize --text '{words}'", "bert")
    *tokens, end = out.splitlines()
    assert [token.split()[0] for token in tokens] == ["[CLS]", *words.split(), "[SEP]"]
    assert end == f"9 tokens; vocabulary {learned.vocab_size}"
    out, _ = console.printed(f"tokenize --text '{words}' --tokenizer.vocabulary 100", "bert")
    assert out.endswith("9 tokens; vocabulary 100\n")


def test_next_sentence_head_is_exported(console: Console) -> None:
    import transformers

    write_reviews(Path("hub"))
    line = "fit --preset tiny --data.source hub --data.path hub --data.max_length 32"
    line += " --data.batch_size 4 --data.tokenizer.vocabulary 300 --trainer.max_epochs 1"
    line += f" --trainer.limit_train_batches 2 {BRIEF}"
    alone = f"{line} --model.net.next_sentence true"
    console.refused(alone, "--data.next_sentence true", task="mlm")
    out, _ = console.printed(f"{line} --data.next_sentence true --run_dir r", "mlm")
    assert re.search(r"tasks\.bert fit --model\.pretrained \S+/r/checkpoints/best\.ckpt", out)
    (row,) = (row for row in metrics("r") if "val/next_acc" in row)
    assert 0 <= float(row["val/next_acc"]) <= 1
    weights = checkpoint("r", "best")["state_dict"]
    out, _ = console.printed(f"export {CKPT} --format hf --output theirs", "mlm")
    assert "transformers.BertForPreTraining.from_pretrained('theirs')" in out
    for name in ("BertForPreTraining", "BertForMaskedLM"):
        family = getattr(transformers, name)
        model, report = family.from_pretrained("theirs", output_loading_info=True)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        embedding = model.bert.embeddings.word_embeddings.weight
        assert torch.equal(embedding, weights["net.encoder.embed.weight"])
        if name == "BertForPreTraining":
            head = model.cls.seq_relationship.weight
            assert torch.equal(head, weights["net.sentence.linear.weight"])
            assert not report["unexpected_keys"]


def test_a_pretraining_counts_chunks(console: Console) -> None:
    document = " ".join(["a", "good", "film"] * 40)
    Path("films.txt").write_text("\n\n".join([document] * 10))
    line = f"fit --preset tiny {NET} --data.path films.txt --data.max_length 32 {BRIEF}"
    out, _ = console.printed(f"{line} --trainer.max_steps 1 --run_dir r", "mlm")
    chunks = [int(n) for n in re.findall(r"(\d+) (?:training|validation)", out.splitlines()[0])]
    assert "chunks" in out.splitlines()[0]
    assert sum(chunks) == 10 * 4  # of 30 words, with [CLS] and [SEP]


def test_padding_token_of_a_tokenizer_file(console: Console) -> None:
    Path("roberta").mkdir()
    save_merges(Path("roberta"), generate()["train"][0][:500], ROBERTA_TOKENS)
    line = f"fit {NET} {FEW} {BRIEF} --data.tokenizer.file roberta"
    assert run(f"{line} --run_dir r", "bert") == 0
    saved = checkpoint("r")
    assert saved["tessera"]["net"]["pad_id"] == saved["tessera"]["metadata"]["pad_id"] == 1
    assert not saved["state_dict"]["net.encoder.embed.weight"][1].any()
    console.refused(f"{line} --model.net.pad_id 2", "--model.net.pad_id", task="bert")


def test_a_checkpoint_does_not_need_its_tokenizer_file(console: Console) -> None:
    texts = generate()["train"][0]
    for name, size in (("t.json", 150), ("other.json", 100)):
        Path(name).write_text(Tokenizer.train(texts, TokenizerConfig("word", size)).to_json())
    line = f"{BERT} {BRIEF} --data.tokenizer.file t.json"
    console.refused(line, "--data.tokenizer.vocabulary", "t.json", task="bert")
    assert run(f"fit {NET} {FEW} {BRIEF} --data.tokenizer.file t.json --run_dir r", "bert") == 0
    options = checkpoint("r")["tessera"]["config"]["data"]["tokenizer"]
    assert options == checkpoint("r")["tessera"]["metadata"]["tokenizer_options"]
    assert (options["kind"], options["vocabulary"], options["min_frequency"]) == ("word", 150, None)
    Path("t.json").unlink()
    line = f"predict {CKPT} --text good"
    assert run(line, "bert") == 0
    for option, named in {
        "file other.json": "other.json",
        "file nosuch.json": "nosuch.json",
        "kind character --data.tokenizer.vocabulary 70": "character",
    }.items():
        console.refused(f"{line} --data.tokenizer.{option}", named, task="bert")


def test_files_are_utf_8_in_any_locale(monkeypatch: Patch) -> None:
    monkeypatch.setattr(io, "text_encoding", lambda encoding, level=2: encoding or "ascii")
    write_text(Path("text"), "zwölf")
    assert Path("text").read_bytes() == "zwölf".encode()


def test_the_loss_of_pairs_does_not_depend_on_the_batches(console: Console) -> None:
    write_reviews(Path("hub"))
    line = f"fit --preset tiny --data.source hub --data.path hub --data.max_length 32 {BRIEF}"
    line += " --data.batch_size 4 --data.tokenizer.vocabulary 300 --data.next_sentence true"
    console.printed(f"{line} --trainer.max_steps 3 --run_dir r", "mlm")
    losses = []
    for size in (1, 7, 64):
        folder = f"t{size}"
        line = f"test {CKPT} --data.loading.eval_batch_size {size} --output {folder}"
        console.printed(line, "mlm")
        found = json.loads(Path(folder, "test.json").read_text())
        losses.append(found["test/loss"])
        parts = found["test/token_loss"] + found["test/next_loss"]
        assert found["test/loss"] == pytest.approx(parts, abs=2e-5)
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-5)
