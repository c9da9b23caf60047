"""Scores of texts: every token counts once, seen from as much text as its window gives."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from modules.kernels.cross_entropy import IGNORE_INDEX
from tasks.lm.architectures import LanguageModel, load_model
from tasks.lm.score import total_loss, windows
from tests.tasks.command import run, write_corpus


def one_by_one(model: LanguageModel, ids: list[int], stride: int) -> float:
    """The sum of the losses, each token from a forward pass of its own over what its window has before it."""
    length, sums = model.net.max_length, 0.0
    for place in range(1, len(ids)):
        start = (
            max(0, -(-(place - length) // stride)) * stride
        )  # the first window that has the token as a target
        with torch.no_grad():
            logits = model.net.logits(model.net(torch.tensor([ids[start:place]]))[:, -1])  # (1, V)
        sums -= float(logits.log_softmax(-1)[0, ids[place]])
    return sums


@pytest.mark.parametrize("size", (2, 32, 33, 34, 100))
@pytest.mark.parametrize("stride", (1, 7, 16, 32))
def test_sums_are_those_of_single_tokens(lm_letters: Path, stride: int, size: int) -> None:
    model = load_model(str(lm_letters))
    torch.manual_seed(size)
    ids = torch.randint(7, model.net.vocabulary, (size,)).tolist()
    loss, right, count = total_loss(model.net, np.array(ids, np.uint16), stride, batch_size=3)
    assert count == size - 1 and 0 <= right <= count
    assert loss == pytest.approx(one_by_one(model, ids, stride), rel=1e-5)


@pytest.mark.parametrize(("text", "bytes_"), (("Th", 1), ("The lazy dog", 11)))
def test_bytes_are_those_that_were_foreseen(
    text: str, bytes_: int, lm_letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text(text)
    assert run(f"score --ckpt_path {lm_letters} --data.path text.txt --json", "lm") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == found["tokens"] == bytes_  # all but the first
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.parametrize("stride", (1, 3, 8))
def test_every_target_counts_once(stride: int) -> None:
    for size in range(2, 40):
        tokens, seen = np.arange(size), []
        for inputs, targets in windows(tokens, 8, stride, 2):
            assert inputs.shape == targets.shape and len(inputs) <= 2
            assert ((targets == inputs + 1) | (targets == IGNORE_INDEX)).all()
            seen += targets[targets != IGNORE_INDEX].tolist()
        assert seen == list(range(1, size))


def test_a_file_from_the_command_line(lm_bytes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = sorted(write_corpus(Path("texts")).iterdir())[-1].read_text()[:700] + "\nzwölf\n"
    Path("text.txt.gz").write_bytes(gzip.compress(text.encode()))
    model = load_model(str(lm_bytes))
    (ids,) = model.tokenizer.encode_batch([text])
    ids = [
        model.tokenizer.special_id("bos"),
        *ids,
        model.tokenizer.special_id("eos"),
    ]  # as a document in training
    assert run(f"score --ckpt_path {lm_bytes} --data.path text.txt.gz --json", "lm") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["bytes"]) == (len(ids) - 1, len(text.encode()))
    assert (found["context"], found["stride"]) == (32, 16)
    expected = one_by_one(model, ids, 16)
    assert found["loss"] == pytest.approx(expected / found["tokens"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected / found["tokens"]), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(
        expected / math.log(2) / found["bytes"], rel=1e-5
    )
    assert (
        run(f"score --ckpt_path {lm_bytes} --data.path text.txt.gz --stride 4 --batch_size 3", "lm")
        == 0
    )
    assert "bits_per_byte" in (shown := capsys.readouterr().out) and "text.txt.gz" in shown
    assert run(f"score --ckpt_path {lm_bytes} --data.path texts --json --stride 32", "lm") == 0
    sizes = [len(path.read_bytes()) for path in Path("texts").iterdir()]
    assert json.loads(capsys.readouterr().out)["bytes"] == sum(
        sizes
    )  # all of it, though there is no test split
