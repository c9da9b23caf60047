"""Every task trains in every precision, and what is made of it then works; loss curves hardly
depend on it.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.attention import attention
from modules.kernels.cross_entropy import chunked_cross_entropy
from modules.masks import causal
from modules.norm import NORMS
from tasks.base import Task
from tests.tasks.command import (
    PAIRS,
    SMALL_LM,
    SMALL_S2S,
    checkpoint,
    metrics,
    run,
    write_corpus,
    write_images,
    write_pairs,
)

BERT = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --data.tokenizer.vocabulary 300"
LM = f"{SMALL_LM} --data.source files --data.path texts --data.tokenizer.kind character --data.tokenizer.vocabulary 99"
RUNS = {
    "vit": "--model.net.stack.depth 1",
    "bert": f"{BERT} --data.batch_size 4",
    "mlm": f"{BERT} --data.batch_size 4",
    "lm": LM,
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}
AFTER = {  # the run's checkpoint is 0
    "vit": ["predict --ckpt_path {0} --data.predict_path images"],
    "bert": ["predict --ckpt_path {0} --text good"],
    "mlm": ["test --ckpt_path {0} --trainer.limit_test_batches 1"],
    "lm": ["generate --ckpt_path {0} --prompt a", "score --ckpt_path {0} --data.path text.txt"],
    "seq2seq": [
        "translate --ckpt_path {0} --text two",
        "attend --ckpt_path {0} --text two --out a.png",
    ],
}
TWO_STEPS = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)


def write_data() -> None:
    """What the runs read."""
    write_corpus(Path("texts"))
    write_pairs(Path("pairs"))
    write_images(Path("images"), side=8)
    Path("text.txt").write_text("def f(x): return x\n" * 4)


# Runs ---------------------------------------------------------------------------------------------

SCALED = (  # what 16-mixed is on a GPU; on a CPU Lightning makes it bf16-mixed
    "--trainer.plugins pytorch_lightning.plugins.MixedPrecision --trainer.plugins.precision "
    "16-mixed "
    "--trainer.plugins.device cpu"
)
PRECISIONS = {  # what most often goes wrong is tried for all tasks, the rest for one
    (task, precision): () if precision == "bf16-true" or task == "vit" else pytest.mark.slow
    for precision in ("bf16-true", "bf16-mixed", "16-mixed", "32")
    for task in RUNS
}


@pytest.mark.parametrize(
    ("task", "precision"), [pytest.param(*pair, marks=marks) for pair, marks in PRECISIONS.items()]
)
def test_two_steps(
    task: str, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: set[torch.dtype] = set()
    watch, log = Task._record_bad_loss, Task._log_evaluation

    def watched(self: Task, loss: Tensor) -> None:
        seen.add(loss.dtype)
        watch(self, loss)

    def logged(self: Task, split: str) -> None:
        assert self.metrics[f"{split}_loss"].compute().dtype == torch.float64
        log(self, split)

    monkeypatch.setattr(Task, "_record_bad_loss", watched)
    monkeypatch.setattr(Task, "_log_evaluation", logged)
    write_data()
    chosen = SCALED if precision == "16-mixed" else f"--trainer.precision {precision}"
    assert run(f"fit {RUNS[task]} {TWO_STEPS} --run_dir r {chosen}", task) == 0
    losses = [float(row["train/loss"]) for row in metrics("r") if "train/loss" in row]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert seen == {torch.float32}
    weights = checkpoint("r")["state_dict"].values()
    assert ("MixedPrecision" in checkpoint("r")) == (
        precision == "16-mixed"
    )  # the state of a scaler
    kept = {torch.bfloat16} if precision == "bf16-true" else {torch.float32}
    assert {value.dtype for value in weights if value.is_floating_point()} == kept
    for command in AFTER[task]:
        assert run(command.format("r/checkpoints/best.ckpt"), task) == 0, capsys.readouterr().err


def test_averages_need_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit --model.ema 0.9 --trainer.precision bf16-true", "vit") == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "--model.ema needs more digits" in said and "bf16-mixed" in said
    )


LONG = {
    "vit": "--model.net.stack.depth 2 --model.optimizer.lr 2e-4 --data.batch_size 64",
    "bert": f"{BERT} --data.batch_size 32 --model.optimizer.optimizer muon --model.optimizer.lr "
    f"3e-3",
    "lm": f"{LM} --model.optimizer.lr 1e-3",
    "seq2seq": f"{SMALL_S2S} {PAIRS} --model.optimizer.lr 1e-3",
}


@pytest.mark.parametrize(
    "task",
    ["lm", *(pytest.param(task, marks=pytest.mark.slow) for task in ("vit", "bert", "seq2seq"))],
)
def test_loss_curves(task: str) -> None:
    write_data()
    curves = {}
    for precision in ("32", "bf16-mixed"):
        line = f"fit {LONG[task]} --trainer.max_epochs 500 --trainer.max_steps 200 --trainer.log_every_n_steps 1"
        line += " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0 --seed_everything 3"
        assert run(f"{line} --trainer.precision {precision} --run_dir {precision}", task) == 0
        losses = [float(row["train/loss"]) for row in metrics(precision) if "train/loss" in row]
        curves[precision] = torch.tensor(losses, dtype=torch.float64)
    one, two = curves.values()
    assert len(one) == 200 and one[-20:].mean() < 0.96 * one[0]  # it learns, sentiment slowly
    assert not torch.equal(one, two)
    assert ((two - one).abs() / one).max() < 0.02, ((two - one).abs() / one).max()


# What needs float32 has it ------------------------------------------------------------------------

ROUNDED = 2.0**-8  # relative error of a number in bfloat16
EXACT: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "bf16-true": lambda part: part.bfloat16(),
    "bf16-mixed": lambda part: part,
}


def low(precision: str) -> torch.autocast:
    """What is on while a network computes in a precision."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_sum_in_float32(norm: str, precision: str) -> None:
    part = EXACT[precision](NORMS[norm](4096))
    x = (3 + torch.randn(8, 4096)).bfloat16()  # in bfloat16, sums of so many would stand still
    with low(precision):
        found = part(x)
    expected = NORMS[norm](4096).double()(x.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=ROUNDED)


@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("recorded", [False, True], ids=["fused", "weights"])
def test_softmax_sums_in_float32(recorded: bool, precision: str) -> None:
    weights: list[Tensor] = []
    q, k, v = (torch.randn(1, 2, 2048, 32).bfloat16() for _ in range(3))
    v = v + 1  # a mean of many, where sums in bfloat16 would stand still
    with low(precision):
        found = attention(q, k, v, causal(2048), on_weights=weights.append if recorded else None)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=2 * ROUNDED)
    for one in weights:
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.sum(-1), torch.ones(1, 2, 2048), atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", EXACT)
def test_losses_sum_in_float32(precision: str) -> None:
    x, table = torch.randn(512, 64), torch.randn(50_257, 64) / 4
    targets = torch.randint(50_257, (512,))
    exact = F.cross_entropy(x.bfloat16().double() @ table.bfloat16().double().T, targets)
    with low(precision):
        given = (x.bfloat16(), table.bfloat16()) if precision == "bf16-true" else (x, table)
        loss, _ = chunked_cross_entropy(*given, None, targets)
    assert loss.dtype == torch.float32
    assert abs(loss.double() - exact) / exact < 2e-4, (loss, exact)


def test_norms_of_gradients_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that clip, and that are logged, of gradients in bfloat16."""
    seen: list[tuple[float, float]] = []
    scale = torch.nn.utils.clip_grads_with_norm_

    def spy(parameters: list[Tensor], limit: float, norm: Tensor) -> None:
        exact = torch.cat(
            [one.grad.double().flatten() for one in parameters if one.grad is not None]
        ).norm()
        assert {one.grad.dtype for one in parameters if one.grad is not None} == {torch.bfloat16}
        seen.append((float(norm), float(exact)))
        scale(parameters, limit, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", spy)
    assert (
        run(f"fit {TWO_STEPS} --model.net.stack.depth 1 --trainer.precision bf16-true --run_dir r")
        == 0
    )
    logged = [float(row["train/grad_norm"]) for row in metrics("r") if "train/grad_norm" in row]
    assert len(seen) == len(logged) == 2
    for (norm, exact), value in zip(seen, logged, strict=True):
        assert norm == pytest.approx(exact, rel=1e-5) and value == pytest.approx(exact, rel=1e-5)
