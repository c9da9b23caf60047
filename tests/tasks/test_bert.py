"""Text classification and pretraining through the command line: runs, predictions, pretrained weights, refusals."""

import csv
import io
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tasks.bert.task import divergence
from tests.tasks.command import SHORT, checkpoint, metrics, process, run, same, write_reviews
from tests.tasks.test_resume import KILL

SMALL = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2 --data.tokenizer.vocabulary 300"
FEW = (
    "--trainer.limit_train_batches 6 --trainer.limit_val_batches 2 --trainer.max_epochs 2 --trainer.log_every_n_steps 1"
)
BERT = f"fit {SMALL} {FEW} --data.batch_size 8"
BRIEF = "--trainer.limit_test_batches 1"


@pytest.mark.slow
@pytest.mark.parametrize(("task", "metric", "bound"), [("bert", "test/acc", 0.97), ("mlm", "test/acc", 0.2)])
def test_the_default_run(task: str, metric: str, bound: float, tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", task=task, cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / f"runs/{task}/latest/summary.json").read_text())
    assert summary[metric] >= bound
    assert seconds <= 90


def rows(path: str) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_keeps_its_tokenizer_and_measures_as_scikit_learn_does(capsys: pytest.CaptureFixture[str]) -> None:
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    from datamodules.embedded.reviews import generate
    from datamodules.tokenizers import Tokenizer

    assert run(f"{BERT} --run_dir r", "bert") == 0
    kept = checkpoint("r", "best")["tessera"]["facts"]
    assert Path("r/tokenizer.json").read_text() == kept["tokenizer"]
    assert Tokenizer.from_file("r/tokenizer.json").size == kept["vocabulary"]
    texts, labels = generate()["test"]
    Path("texts.txt").write_text("\n".join(texts))
    assert run("predict --ckpt_path r/checkpoints/best.ckpt --data.predict_path texts.txt", "bert") == 0
    found = rows("predictions.csv")
    assert [row["text"] for row in found] == texts  # in the order given, though batches go by length
    positive = [float(row["positive"]) for row in found]
    guesses = [int(row["label"] == "positive") for row in found]
    assert guesses == [int(share > 0.5) for share in positive]
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["test/acc"] == pytest.approx(accuracy_score(labels, guesses), abs=1e-6)
    assert summary["test/f1"] == pytest.approx(f1_score(labels, guesses, average="macro"), abs=1e-6)
    assert summary["test/auroc"] == pytest.approx(roc_auc_score(labels, positive), abs=1e-4)
    assert all(0 <= float(row["train/padding"]) < 0.5 for row in metrics("r") if "train/padding" in row)


def test_texts_from_the_command_line_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(f"{BERT} {BRIEF} --run_dir r", "bert") == 0
    ckpt = "--ckpt_path r/checkpoints/best.ckpt"
    capsys.readouterr()
    assert run(f'predict {ckpt} --text "not bad at all"', "bert") == 0
    said = capsys.readouterr().out
    assert said.startswith(("positive (", "negative (")) and not Path("predictions.csv").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("not bad at all\nzwölf\n".encode())))
    assert run(f"predict {ckpt} --data.predict_path - --run_dir p", "bert") == 0
    (first, second) = rows("p/predictions.csv")
    assert first["text"] == "not bad at all" and second["text"] == "zwölf"
    assert f"negative {float(first['negative']):.4f}" in said
    capsys.readouterr()
    assert run(f'tokenize {ckpt} --text "not good"', "bert") == 0
    shown = capsys.readouterr().out.split()
    assert shown[0] == "[CLS]" and "not" in shown and "[SEP]" in shown


@pytest.fixture
def pretrained() -> str:
    """A checkpoint of masked-LM pretraining on tiny reviews in the folder `hub`."""
    write_reviews(Path("hub"))
    data = "--data.source hub --data.path hub --data.max_length 16"
    assert run(f"fit {SMALL} {FEW} {data} --data.batch_size 4 --run_dir m", "mlm") == 0
    return "m/checkpoints/best.ckpt"


def test_pretraining_carries_over_with_its_tokenizer(pretrained: str) -> None:
    source = checkpoint("m", "best")
    perplexity = [row for row in metrics("m") if "val/perplexity" in row]
    assert (
        all(
            float(row["val/perplexity"]) == pytest.approx(torch.tensor(float(row["val/loss"])).exp().item(), rel=1e-4)
            for row in perplexity
        )
        and len(perplexity) == 2
    )
    data = "--data.source hub --data.path hub --data.max_length 16 --data.batch_size 4"
    line = f"fit {FEW} {data} --model.pretrained {pretrained} --model.optimizer.freeze 3 --run_dir b"
    assert run(line, "bert") == 0
    ours = checkpoint("b")
    assert ours["tessera"]["facts"]["tokenizer"] == source["tessera"]["facts"]["tokenizer"]
    frozen = [name for name in ours["state_dict"] if name.startswith(("net.encoder.embed", "net.encoder.stack.blocks"))]
    assert frozen and all(torch.equal(ours["state_dict"][name], source["state_dict"][name]) for name in frozen)


def test_another_tokenizer_is_refused_with_both_sizes(pretrained: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = "--data.source hub --data.path hub --data.max_length 16 --data.tokenizer.file other.json"
    assert run(f"{BERT} {BRIEF} --run_dir r --data.tokenizer.kind word", "bert") == 0
    Path("other.json").write_text(Path("r/tokenizer.json").read_text())
    theirs, own = (checkpoint(name)["tessera"]["facts"]["vocabulary"] for name in ("m", "r"))
    capsys.readouterr()
    assert run(f"fit {FEW} {data} --model.pretrained {pretrained}", "bert") == 2
    said = capsys.readouterr().err
    assert str(theirs) in said and str(own) in said and said.count("\n") == 1


def hugging_face(folder: Path, name: str, **options: Any) -> Any:
    """A random model of Hugging Face's with a trained tokenizer, saved in `folder`."""
    import transformers

    from datamodules.embedded.reviews import generate
    from datamodules.tokenizers import Tokenizer, TokenizerConfig

    tokenizer = Tokenizer.train(generate()["train"][0][:500], TokenizerConfig(vocabulary=300))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=tokenizer.size, max_position_embeddings=64, **sizes, **options)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # far from symmetric, so that mistakes show
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return model


@pytest.mark.parametrize(
    ("task", "name", "more"),
    [
        ("bert", "BertForSequenceClassification", "--data.max_length 32 --data.batch_size 8"),
        ("mlm", "BertForMaskedLM", "--data.source hub --data.path hub --data.max_length 32 --data.batch_size 8"),
    ],
)
def test_hugging_face_and_back(task: str, name: str, more: str) -> None:
    import transformers

    write_reviews(Path("hub"))
    theirs = hugging_face(Path("theirs").resolve(), name)
    still = "--model.optimizer.freeze 3 --model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"
    assert run(f"fit {FEW} {more} --model.pretrained theirs {still} --run_dir r", task) == 0
    assert run("export --ckpt_path r/checkpoints/best.ckpt --format hf --output back", task) == 0
    back = getattr(transformers, name).from_pretrained("back").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("back")
    batch = tokenizer(["not bad at all", "a dull film, but I liked it"], return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        torch.testing.assert_close(back(**batch).logits, theirs(**batch).logits, atol=1e-4, rtol=0)
    if task == "bert":
        assert back.config.id2label == {0: "negative", 1: "positive"}


@pytest.mark.parametrize("task", ("bert", "mlm"))
def test_killed_in_mid_epoch_and_continued_ends_with_the_same_bits(task: str, tmp_path: Path) -> None:
    write_reviews(Path("hub"))
    line = f"fit {SMALL} --data.source hub --data.path hub --data.max_length 16 --data.batch_size 4 "
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


def test_r_drop_is_the_mean_of_both_divergences() -> None:
    torch.manual_seed(0)
    one, two = torch.randn(2, 5, 3)
    p, q = one.log_softmax(-1), two.log_softmax(-1)
    both = [F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((p, q), (q, p))]
    torch.testing.assert_close(divergence(one, two), sum(both) / 2)
    assert divergence(one, one) == 0
    assert run(f"{BERT} {BRIEF} --model.r_drop 1.0 --model.net.stack.dropout 0.1 --run_dir r", "bert") == 0


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("fit --preset tini", 2, "did you mean 'tiny'"),
        ("fit --model.r_drop -1", 2, "r_drop -1.0 must not be negative"),
        ("fit --model.pretrained nowhere", 2, "nowhere: no such folder"),
        ("fit --model.pretrained v/checkpoints/best.ckpt", 2, "is of task 'vit'"),
        ("fit --preset tiny --model.net.max_length 32 --data.max_length 64", 2, "32 learned positions"),
        ("fit --preset tiny --model.net.vocabulary 20", 2, "the network 20"),
        ("fit --model.net.num_classes 3", 2, "contradicts the data, which have 2"),
        ("predict --ckpt_path v/checkpoints/best.ckpt --text x", 2, "use python -m tasks.vit"),
        ('tokenize --text " "', 2, "--text is empty"),
        ("tokenize --text x --tokenizer.file nowhere.json", 2, "nowhere.json does not exist"),
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
