"""Every task trains in every precision, and what is made of it then works; what overflows or is no
number stops a run, or leaves a step out.
"""

import csv
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from modules.attention import attention
from modules.masks import causal
from modules.norm import NORMS
from tasks.base import Task
from tasks.vit.task import ViTTask
from tests.helpers.cases import CASES, assert_same, fill, first, signal_at
from tests.helpers.command import Capture, Console, Patch, run
from tests.helpers.faults import scale_gradients
from tests.helpers.forked import Server
from tests.helpers.results import checkpoint, logged
from tests.helpers.tiny import FEW_STEPS, SHORT, TINY, write_data, write_images
from tests.tasks.checkpoints.test_kills import end

SWIN = (
    "--preset swin_cifar --model.net.image_size 8 --model.net.patch_size 1 --data.batch_size 16 "
    "--model.net.window_size 3 --model.net.depths [1,2] --model.net.stack.depth 3 "
    "--model.net.stack.width 8"
)
SECOND = (
    "--model.net.relative_bias mlp --model.net.stack.attention cosine "
    "--model.net.stack.order res_post"
)
RUNS = {**TINY, "vit swin": SWIN, "vit swinv2": f"{SWIN} {SECOND}"}  # the task is the first word
AFTER = {
    "vit": ["predict --input images"],
    "vit swin": ["predict --input images"],
    "vit swinv2": ["predict --input images"],
    "mae": ["test --trainer.limit_test_batches 1"],
    "bert": ["predict --text good"],
    "mlm": ["test --trainer.limit_test_batches 1"],
    "lm": ["generate --prompt a", "score --input text.txt"],
    "igpt": ["generate --samples 2 --output a.png", "probe --limit 20"],
    "seq2seq": ["translate --text two", "attend --text two --output a.png"],
}
SCALED = (  # what 16-mixed is on a GPU; on a CPU Lightning makes it bf16-mixed
    "--trainer.plugins pytorch_lightning.plugins.MixedPrecision --trainer.plugins.device cpu "
    "--trainer.plugins.precision 16-mixed"
)


@pytest.fixture
def data() -> None:
    """What the runs read."""
    write_data()
    write_images(Path("images"), side=8)
    Path("text.txt").write_text("def f(x): return x\n" * 4)


# Runs ---------------------------------------------------------------------------------------------


# What most often goes wrong is tried for all tasks, the rest for one.
PRECISIONS = [("vit", precision) for precision in ("bf16-mixed", "16-mixed", "32")]
PRECISIONS_OF_ALL = ("bf16-mixed", "16-mixed", "32", "bf16-true")
EVERY = [(case, precision) for precision in PRECISIONS_OF_ALL for case in AFTER]
PLAIN = [("lm", "bf16-true"), *PRECISIONS]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in PLAIN]


@pytest.mark.plain_every(2)
@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("case, precision", [*PLAIN, *SLOW])
def test_few_steps(case: str, precision: str, monkeypatch: Patch) -> None:
    """Losses and norms of gradients are in 32 bits, metrics in 64; weights have those chosen."""
    task = case.split()[0]
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    norms: list[float] = []
    step = Task.log_step
    scale = torch.nn.utils.clip_grads_with_norm_
    evaluate = Task.on_validation_epoch_end

    def watched(self: Task, means: Any) -> None:
        seen.append((means["loss"].dtype, torch.float32))
        step(self, means)

    def evaluated(self: Task) -> None:
        seen.append((self.metrics["val_loss"].compute().dtype, torch.float64))
        evaluate(self)

    def spy(parameters: list[Tensor], limit: float, norm: Tensor) -> None:
        parameters = list(parameters)
        gradients = [one.grad.double().flatten() for one in parameters if one.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        scale(parameters, limit, norm)

    monkeypatch.setattr(Task, "log_step", watched)
    monkeypatch.setattr(Task, "on_validation_epoch_end", evaluated)
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", spy)
    chosen = SCALED if precision == "16-mixed" else f"--trainer.precision {precision}"
    assert run(f"fit {RUNS[case]} {FEW_STEPS} --run_dir r {chosen}", task) == 0
    assert len(logged("r")) == 3 and all(map(math.isfinite, logged("r")))
    assert len(seen) == 4 and all(found == expected for found, expected in seen)
    assert logged("r", "train/grad_norm") == pytest.approx(norms, rel=1e-5)
    assert ("MixedPrecision" in checkpoint("r")) == (precision == "16-mixed")  # a scaler's state
    kept = torch.bfloat16 if precision == "bf16-true" else torch.float32
    weights = checkpoint("r")["state_dict"].values()
    assert {value.dtype for value in weights if value.is_floating_point()} == {kept}
    for command in AFTER[case]:
        assert run(f"{command} --ckpt_path r/checkpoints/best.ckpt", task) == 0


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("task", ["mae", "mlm"])
def test_evaluations_in_64_bits_hide_the_same(task: str, console: Console) -> None:
    assert run(f"fit {RUNS[task]} {FEW_STEPS} --run_dir r", task) == 0
    line = "test --ckpt_path r --trainer.limit_test_batches 1 --trainer.precision"
    printed = [console.printed(f"{line} {precision}", task)[0] for precision in (32, "64-true")]
    losses = [float(re.findall(r"test/loss\W+([\d.]+)", out)[0]) for out in printed]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_numbers_to_predict_are_not_rounded(precision: str) -> None:
    """They are beyond float16, and bfloat16 would have one of their values only."""
    numbers = [f"{number}.5" for number in range(70000, 70060)]
    rows = [f"film {number},{number}" for number in numbers]
    Path("numbers.csv").write_text("\n".join(["text,label", *rows]))
    line = f"fit {TINY['bert']} {FEW_STEPS} --data.path numbers.csv --model.problem_type regression"
    assert run(f"{line} --trainer.precision {precision} --run_dir r", "bert") == 0
    assert all(map(math.isfinite, logged("r")))
    with open("r/predictions.csv", newline="") as file:
        tested = [row["label"] for row in csv.DictReader(file)]
    assert tested and set(tested) <= set(numbers)
    assert Path("r/predicted.png").exists()


LONG = {
    "vit": "--model.net.stack.depth 2 --model.optimizer.lr 2e-4 --data.batch_size 64",
    "bert": f"{TINY['bert']} --data.batch_size 32 --model.optimizer.lr 3e-3 "
    "--model.optimizer.optimizer muon",
    "lm": f"{TINY['lm']} --model.optimizer.lr 1e-3",
    "seq2seq": f"{TINY['seq2seq']} --model.optimizer.lr 1e-3",
}


@pytest.mark.slow
@pytest.mark.usefixtures("data")
@pytest.mark.exhaustive_except("vit")
@pytest.mark.parametrize("task", LONG)
def test_loss_curves_hardly_depend_on_it(task: str) -> None:
    line = f"fit {LONG[task]} --trainer.max_epochs 500 --trainer.max_steps 200 --seed_everything 3"
    line += " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0"
    line += " --trainer.log_every_n_steps 1"
    for precision in ("32", "bf16-mixed"):
        assert run(f"{line} --trainer.precision {precision} --run_dir {precision}", task) == 0
    one, two = (torch.tensor(logged(name), dtype=torch.float64) for name in ("32", "bf16-mixed"))
    assert len(one) == 200 and one[-20:].mean() < 0.96 * one[0]  # it learns, sentiment slowly
    assert 0 < ((two - one).abs() / one).max() < 0.02


# What needs float32 has it ------------------------------------------------------------------------

ROUNDED = 2.0**-8  # relative error of a number in bfloat16
in_16_bits = pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])


def low(precision: str) -> torch.autocast:
    """What is on while a network computes in a precision."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


@in_16_bits
@pytest.mark.parametrize("norm", NORMS)
def test_norms_sum_in_float32(norm: str, precision: str) -> None:
    part = NORMS[norm](4096)
    if precision == "bf16-true":
        part.bfloat16()
    x = (3 + torch.randn(8, 4096)).bfloat16()  # in bfloat16, sums of so many would stand still
    torch.set_warn_always(True)
    try:
        with low(precision), warnings.catch_warnings():
            warnings.simplefilter("error")  # of types that no fast kernel takes
            found = part(x)
    finally:
        torch.set_warn_always(False)
    expected = NORMS[norm](4096).double()(x.double())
    has_rounded_mean = norm == "batchnorm" and precision == "bf16-true"
    atol = 0.05 if has_rounded_mean else 1e-3
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=ROUNDED)


@in_16_bits
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


# A gradient scaler --------------------------------------------------------------------------------

FEW = f"{SHORT} --data.batch_size 16 --trainer.limit_test_batches 0"
OPTIMIZER = (
    "--model.optimizer.eps 1e-3 --model.optimizer.gradient_clip 0.2 --model.optimizer.warmup 0 "
    "--trainer.accumulate_grad_batches 2"
)


@pytest.mark.slow
@pytest.mark.parametrize("case, ranks, scale", [("plain", 1, 24), ("length buckets", 2, 30)])
def test_scaled_run_is_killed_and_resumed(
    case: str, ranks: int, scale: int, server: Server, tmp_path: Path
) -> None:
    """Steps overflow before the kill and after it."""
    uninterrupted = fill(tmp_path / "uninterrupted")
    folder = fill(tmp_path / "here")
    task = CASES[case][0]
    line = first(case, ranks).replace("--trainer.precision bf16-mixed", "")
    scaled = f"scale_gradients(init_scale=2.0**{scale}, growth_interval=2)\n"
    server.run(line, uninterrupted, task, before=scaled, ranks=ranks)
    end(server.start(line, folder, task, scaled + signal_at("step"), ranks), 0)
    killed = checkpoint(folder / "r")
    server.run("fit --resume r", folder, task, before=scaled, ranks=ranks)
    assert_same(folder / "r", uninterrupted / "r")
    ours, theirs = (checkpoint(path / "r")["MixedPrecision"] for path in (folder, uninterrupted))
    assert ours == theirs != killed["MixedPrecision"] and ours["scale"] < 2.0**scale
    norms = logged(uninterrupted / "r", "train/grad_norm")
    left_out = [step for step, norm in enumerate(norms) if not math.isfinite(norm)]
    assert min(left_out) < killed["global_step"] <= max(left_out) and len(left_out) < len(norms)


def test_a_step_that_overflows_is_left_out(monkeypatch: Patch, capsys: Capture) -> None:
    scale_gradients(monkeypatch.setattr, init_scale=2.0**24, growth_interval=2)
    clip = Task.configure_gradient_clipping
    seen: list[tuple[Tensor, float, bool]] = []

    def watched(self: Task, *arguments: Any, **options: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        gradients = [one.grad for one in self.net.parameters() if one.grad is not None]
        finite = all(gradient.isfinite().all() for gradient in gradients)
        weights = parameters_to_vector(self.net.parameters()).detach().clone()
        seen.append((weights, plugin.scaler.get_scale(), finite))
        clip(self, *arguments, **options)

    monkeypatch.setattr(Task, "configure_gradient_clipping", watched)
    line = f"fit {FEW} --trainer.max_epochs 4 --model.optimizer.optimizer muon --run_dir r"
    assert run(line) == 0
    assert "warning" not in capsys.readouterr().err
    assert not seen[0][2] and sum(finite for *_, finite in seen) > 4
    for (weights, scale, finite), (after, new, _) in zip(seen, seen[1:], strict=False):
        assert torch.equal(weights, after) != finite
        assert new in ((scale, 2 * scale) if finite else (scale / 2,))
    norms = logged("r", "train/grad_norm")
    assert [math.isfinite(norm) for norm in norms] == [finite for *_, finite in seen]
    assert all(map(math.isfinite, logged("r", "train/loss")))
    assert checkpoint("r")["global_step"] == 16


def test_gradients_are_clipped_and_logged_without_the_scale(
    monkeypatch: Patch,
) -> None:
    found = []
    for scale in (1.0, 2.0**10):
        scale_gradients(monkeypatch.setattr, init_scale=scale)
        assert run(f"fit {FEW} {OPTIMIZER} --run_dir {scale}") == 0
        saved = checkpoint(str(scale))
        weights = torch.cat([one.flatten() for one in saved["state_dict"].values()])
        found.append((logged(str(scale), "train/grad_norm"), weights))
        assert saved["MixedPrecision"]["scale"] == scale
    (norms, weights), (others, theirs) = found
    assert norms == pytest.approx(others, rel=0.01) and min(norms) > 0.2 and len(norms) == 4
    torch.testing.assert_close(weights, theirs, atol=1e-4, rtol=0)


# What is not a number ---------------------------------------------------------------------------


def assert_finite(folder: str = "r") -> None:
    """All weights of all checkpoints of a run."""
    paths = list(Path(folder).rglob("*.ckpt"))
    for path in paths:
        values = torch.load(path, weights_only=True)["state_dict"].values()
        assert all(torch.isfinite(value).all() for value in values)


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("ema", ["", "--model.ema 0.9"])
def test_a_loss_that_is_nan_stops_the_run(ema: str, monkeypatch: Patch, capsys: Capture) -> None:
    step = ViTTask.step

    def poisoned(self: ViTTask, batch: dict[str, Tensor], training: bool) -> Any:
        output = step(self, batch, training)
        if training and self.global_step == 6:
            output = output._replace(loss=output.loss * float("nan"))
        return output

    monkeypatch.setattr(ViTTask, "step", poisoned)
    line = f"fit {SHORT} {ema} --checkpoint.every_n_train_steps 2 --run_dir r"
    assert run(line) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step 7" in error and "NaN" in error
    assert checkpoint("r")["global_step"] == 6
    assert_finite()
    assert not list(Path("r").rglob("*.tmp"))
    monkeypatch.setattr(ViTTask, "step", step)
    assert run("fit --resume r") == 0
    assert checkpoint("r")["global_step"] == 8


def test_weights_that_are_no_numbers_are_not_saved(monkeypatch: Patch, capsys: Capture) -> None:
    """A finite loss whose update spoils the weights: the checkpoint before it stays."""
    clip = ViTTask.configure_gradient_clipping

    def poisoned(self: ViTTask, *arguments: Any, **options: Any) -> None:
        clip(self, *arguments, **options)
        if self.global_step == 5:
            next(self.net.parameters()).grad.fill_(float("nan"))

    monkeypatch.setattr(ViTTask, "configure_gradient_clipping", poisoned)
    assert run(f"fit {SHORT} --checkpoint.every_n_train_steps 1 --run_dir r") == 1
    assert "NaN" in capsys.readouterr().err
    assert checkpoint("r")["global_step"] == 5
    assert_finite()


@pytest.mark.parametrize("task", ["lm", "seq2seq"])
def test_texts_of_a_diverged_network_do_not_hide_it(task: str, capsys: Capture) -> None:
    write_data()
    often = "--model.samples.every 1" if task == "lm" else "--trainer.val_check_interval 1"
    diverges = "--model.optimizer.lr 1e30 --model.optimizer.warmup 0 --trainer.max_steps 6"
    assert run(f"fit {TINY[task]} {often} {diverges} --run_dir r", task) == 1
    assert "the loss became NaN or infinite at step 2:" in capsys.readouterr().err
