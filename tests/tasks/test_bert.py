"""Text classification and pretraining: what a step computes, predictions, tokenizers, refusals."""

import csv
import io
import json
import sys
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
from modules.models.bert import BERT_PRESETS, BertClassifier, BertMaskedLM
from modules.pretrained.bert import FAMILIES, HEADS
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.weights import load_weights
from tasks.bert.task import BertTask, divergence
from tasks.mlm.task import MaskedLMTask
from tests.helpers.task_runs import printed, refused, summary
from tests.tasks.command import checkpoint, metrics, run, write_reviews

NET = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2"
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


def test_r_drop_adds_the_mean_of_both_divergences() -> None:
    config = replace(BERT_PRESETS["tiny"], vocabulary=60, num_classes=3)
    net = BertClassifier(config).train()
    labels = torch.tensor([0, 1, 2, 0])
    tokens = torch.randint(1, 50, (4, 9))
    padding_mask = torch.ones(4, 9, dtype=torch.bool)

    def loss(weight: float) -> Tensor:
        task = BertTask(r_drop=weight)
        task.net = net
        torch.manual_seed(1)
        texts = {"tokens": tokens, "padding_mask": padding_mask, "label": labels}
        return task.step(texts, training=True).loss

    torch.manual_seed(1)
    one = net(tokens, padding_mask)
    two = net(tokens, padding_mask)
    p = one.log_softmax(-1)
    q = two.log_softmax(-1)
    both = [F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((p, q), (q, p))]
    torch.testing.assert_close(divergence(one, two), sum(both) / 2)
    mean = (F.cross_entropy(one, labels) + F.cross_entropy(two, labels)) / 2
    torch.testing.assert_close(loss(0.0), F.cross_entropy(one, labels))
    torch.testing.assert_close(loss(2.0), mean + divergence(one, two))


@torch.no_grad()
def test_next_sentence_loss_is_that_of_hugging_face() -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = transformers.BertConfig(vocab_size=60, intermediate_size=48, **sizes)
    theirs = transformers.BertForPreTraining(settings).eval()
    config = config_from_huggingface(settings.to_dict(), FAMILIES)[1]
    task = MaskedLMTask()
    task.net = BertMaskedLM(replace(config, next_sentence=True)).eval()
    state = FAMILIES["bert"].weights_from_external(theirs.state_dict(), task.net.config)
    assert load_weights(task.net, state, HEADS) == []
    task.masker = lambda tokens, padding_mask, seeds: (tokens, padding_mask)  # type: ignore[assignment]
    tokens = torch.randint(5, 60, (3, 9))
    segments = (torch.arange(9) > 4).long().expand(3, 9)
    label = torch.tensor([0, 1, 0])  # 0: the second sentence follows
    logits = theirs(input_ids=tokens, token_type_ids=segments).seq_relationship_logits
    pairs = {"tokens": tokens, "padding_mask": tokens > 0, "segments": segments}
    pairs |= {"index": torch.arange(3), "is_next": 1 - label}
    loss, _, means, counts, _ = task.step(pairs, training=False)
    expected = F.cross_entropy(logits, label)
    torch.testing.assert_close(loss - means["token_loss"], expected, atol=1e-5, rtol=0)
    assert counts["next_acc"] == 3
    assert means["next_acc"] == (logits.argmax(1) == label).float().mean()


# Runs ---------------------------------------------------------------------------------------------


def test_metrics_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score

    drawn: list[tuple[Tensor, list[str]]] = []

    def draw(counts: Tensor, names: list[str], path: Path) -> None:
        drawn.append((counts, names))
        path.touch()

    monkeypatch.setattr("tasks.classification.draw_confusion", draw)
    assert run(f"{BERT} --run_dir r", "bert") == 0
    texts, labels = generate()["test"]
    Path("texts.txt").write_text("\n".join(texts))
    assert run(f"predict {CKPT} --data.predict_path texts.txt", "bert") == 0
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
    padding = [float(row["train/padding"]) for row in metrics("r") if "train/padding" in row]
    data = ReviewData(batch_size=8, max_length=64, tokenizer=TokenizerConfig("word", 300, 1))
    assert len(padding) == 2
    assert 0 < padding[0] == pytest.approx(data.padding_share(), rel=1e-5)


def test_predict_needs_no_training_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, labels = generate()["test"]
    lines = [f'"{text}",{label}\n' for text, label in zip(texts[:40], labels, strict=False)]
    Path("reviews.csv").write_text("".join(["text,label\n", *lines]))
    source = "--data.source csv --data.path reviews.csv --data.tokenizer.truncate both"
    assert run(f"{BERT} {BRIEF} {source} --run_dir r", "bert") == 0
    Path("reviews.csv").unlink()
    out, _ = printed(f'predict {CKPT} --text "not bad at all"', "bert", capsys)
    assert not Path("predictions.csv").exists()
    stdin = io.TextIOWrapper(io.BytesIO("not bad at all\nzwölf\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(f"predict {CKPT} --data.predict_path - --run_dir p", "bert") == 0
    first, second = read_table("p/predictions.csv")
    assert (first["text"], second["text"]) == ("not bad at all", "zwölf")
    label = first["label"]
    assert out.startswith(f"{label} (") and f"{label} {float(first[label]):.4f}" in out
    err = refused(f"predict {CKPT} --text good --data.predict_path lines.txt", "bert", capsys)
    assert "--text and --data.predict_path" in err

    metadata = checkpoint("r")["tessera"]["metadata"]
    assert Path("r/tokenizer.json").read_text() == metadata["tokenizer"]
    words = "not a good film but the film"
    out, _ = printed(f"tokenize {CKPT} --text '{words}' --max_length 5", "bert", capsys)
    *tokens, end = out.splitlines()
    assert [token.split()[0] for token in tokens] == ["[CLS]", "not", "a", "film", "[SEP]"]
    assert end == f"5 tokens, cut from 9; vocabulary {metadata['vocabulary']}"
    for option in ("kind word", "vocabulary 300", "file t.json", "truncate head"):
        err = refused(f"tokenize {CKPT} --text good --tokenizer.{option}", "bert", capsys)
        assert f"--tokenizer.{option.split()[0]} " in err


def test_tokenize_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    learned = Tokenizer.train(generate()["train"][0], TokenizerConfig("word", 1000, 1))
    words = "not a good film but the acting"
    out, _ = printed(f"tokenize --text '{words}'", "bert", capsys)
    *tokens, end = out.splitlines()
    assert [token.split()[0] for token in tokens] == ["[CLS]", *words.split(), "[SEP]"]
    assert end == f"9 tokens; vocabulary {learned.vocab_size}"
    out, _ = printed(f"tokenize --text '{words}' --tokenizer.vocabulary 100", "bert", capsys)
    assert out.endswith("9 tokens; vocabulary 100\n")


def test_next_sentence_head_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    write_reviews(Path("hub"))
    line = "fit --preset tiny --data.source hub --data.path hub --data.max_length 32"
    line += " --data.batch_size 4 --data.tokenizer.vocabulary 300 --trainer.max_epochs 1"
    line += f" --trainer.limit_train_batches 2 {BRIEF}"
    err = refused(f"{line} --model.net.next_sentence true", "mlm", capsys)
    assert "--data.next_sentence true" in err
    assert run(f"{line} --data.next_sentence true --run_dir r", "mlm") == 0
    (row,) = (row for row in metrics("r") if "val/next_acc" in row)
    assert 0 <= float(row["val/next_acc"]) <= 1
    weights = checkpoint("r", "best")["state_dict"]
    out, _ = printed(f"export {CKPT} --format hf --output theirs", "mlm", capsys)
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


def test_padding_token_of_a_tokenizer_file(capsys: pytest.CaptureFixture[str]) -> None:
    learned = Tokenizer.train(generate()["train"][0][:500], TokenizerConfig("bpe", 300))
    roberta = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<a>", "<b>")
    names = dict(zip(SPECIAL_TOKENS.values(), roberta, strict=True))
    model = json.loads(learned.to_json())["model"]
    Path("roberta").mkdir()
    vocab = {names.get(token, token): number for token, number in model["vocab"].items()}
    Path("roberta/vocab.json").write_text(json.dumps(vocab))
    merges = ["#version", *(" ".join(pair) for pair in model["merges"])]
    Path("roberta/merges.txt").write_text("\n".join(merges))
    line = f"fit {NET} {FEW} {BRIEF} --data.tokenizer.file roberta"
    assert run(f"{line} --run_dir r", "bert") == 0
    saved = checkpoint("r")
    assert saved["tessera"]["net"]["padding"] == saved["tessera"]["metadata"]["padding"] == 1
    assert not saved["state_dict"]["net.encoder.embed.weight"][1].any()
    assert "--model.net.padding" in refused(f"{line} --model.net.padding 2", "bert", capsys)


def test_a_checkpoint_does_not_need_its_tokenizer_file(capsys: pytest.CaptureFixture[str]) -> None:
    texts = generate()["train"][0]
    for name, size in (("t.json", 150), ("other.json", 100)):
        Path(name).write_text(Tokenizer.train(texts, TokenizerConfig("word", size)).to_json())
    err = refused(f"{BERT} {BRIEF} --data.tokenizer.file t.json", "bert", capsys)
    assert "--data.tokenizer.vocabulary" in err and "t.json" in err
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
        assert named in refused(f"{line} --data.tokenizer.{option}", "bert", capsys)


def test_files_are_utf_8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "text_encoding", lambda encoding, level=2: encoding or "ascii")
    write_text(Path("text"), "zwölf")
    assert Path("text").read_bytes() == "zwölf".encode()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("fit --preset tini", "'tiny'"),
        ("fit --model.r_drop -1", "r_drop -1"),
        ("fit --model.pretrained nowhere", "nowhere"),
        ("fit --model.pretrained {vit}", "task 'vit'"),
        (
            "fit --preset tiny --model.net.max_length 32 --data.max_length 64",
            "--data.max_length 64",
        ),
        ("fit --preset tiny --model.net.vocabulary 20", "--model.net.vocabulary"),
        ("fit --model.net.num_classes 3", "num_classes"),
        ("predict --ckpt_path {vit} --text x", "tasks.vit"),
        ('tokenize --text " "', "--text"),
        ("tokenize --text x --tokenizer.file nowhere.json", "nowhere.json"),
        ("tokenize --text x --max_length 0", "--max_length 0"),
        ("fit --preset tiny --model.net.next_sentence true", "--model.net.next_sentence"),
    ],
)
def test_refusals(line: str, named: str, best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refused(line.format(vit=best), "bert", capsys)
    assert not Path("runs").exists()
