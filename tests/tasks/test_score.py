"""`score`: every token counts once, predicted from what its window has before it."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from modules.kernels.cross_entropy import IGNORE_INDEX
from tasks.lm.architectures import LanguageModel, load_model
from tasks.lm.score import total_loss, windows
from tests.helpers.task_runs import printed, printed_objects
from tests.tasks.command import write_corpus


@torch.no_grad()
def sum_of_losses(model: LanguageModel, ids: list[int], stride: int) -> float:
    """The sum of the losses, each token from a forward pass of its own."""
    length = model.net.max_length
    total = 0.0
    for position in range(1, len(ids)):
        first = max(0, -(-(position - length) // stride)) * stride  # window with it as a target
        logits = model.net.logits(model.net(torch.tensor([ids[first:position]]))[:, -1])  # (1, V)
        total -= float(logits.log_softmax(-1)[0, ids[position]])
    return total


@pytest.mark.parametrize("size", (2, 33, 34, 70))
@pytest.mark.parametrize("stride", (1, 7, 32))
def test_losses_are_those_of_single_tokens(lm_letters: Path, stride: int, size: int) -> None:
    model = load_model(str(lm_letters))
    ids = torch.randint(7, model.net.vocabulary, (size,)).tolist()
    loss, correct, count = total_loss(model.net, np.array(ids, np.uint16), stride, batch_size=3)
    assert count == size - 1 and 0 <= correct <= count
    assert loss == pytest.approx(sum_of_losses(model, ids, stride), rel=1e-5)


@pytest.mark.parametrize("stride", (1, 3, 8))
def test_every_target_counts_once(stride: int) -> None:
    for size in range(2, 40):
        seen = []
        for inputs, targets in windows(np.arange(size), 8, stride, 2):
            assert inputs.shape == targets.shape and len(inputs) <= 2
            assert ((targets == inputs + 1) | (targets == IGNORE_INDEX)).all()
            seen += targets[targets != IGNORE_INDEX].tolist()
        assert seen == list(range(1, size))


@pytest.mark.parametrize(("text", "size"), (("Th", 1), ("The lazy dog", 11)))
def test_the_first_token_does_not_count(
    text: str, size: int, lm_letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text(text)
    line = f"score --ckpt_path {lm_letters} --data.path text.txt"
    (found,) = printed_objects(line, "lm", capsys)
    assert found["bytes"] == found["tokens"] == size
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


def test_score_of_files(lm_bytes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = sorted(write_corpus(Path("texts")).iterdir())[-1].read_text()[:300] + "\nzwölf\n"
    Path("text.txt.gz").write_bytes(gzip.compress(text.encode()))
    model = load_model(str(lm_bytes))
    (ids,) = model.tokenizer.encode_batch([text])
    ids = [model.tokenizer.special_id("bos"), *ids, model.tokenizer.special_id("eos")]
    line = f"score --ckpt_path {lm_bytes} --data.path"
    (found,) = printed_objects(f"{line} text.txt.gz", "lm", capsys)
    loss = sum_of_losses(model, ids, 16) / (len(ids) - 1)
    size = len(text.encode())
    assert (found["tokens"], found["bytes"]) == (len(ids) - 1, size)
    assert (found["context"], found["stride"]) == (32, 16)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
    out, _ = printed(f"{line} text.txt.gz --stride 4 --batch_size 3", "lm", capsys)
    assert "bits_per_byte" in out and "text.txt.gz" in out
    (found,) = printed_objects(f"{line} texts --stride 32", "lm", capsys)
    assert found["bytes"] == sum(path.stat().st_size for path in Path("texts").iterdir())
