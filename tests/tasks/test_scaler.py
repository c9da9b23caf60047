"""Runs in float16 with a gradient scaler: what it needs of a step, and what a step that overflows
leaves as it was.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from tasks.base import Task
from tests.tasks.cases import CASES, assert_same, at, fill, first, scale_gradients
from tests.tasks.command import SHORT, checkpoint, metrics, run
from tests.tasks.forked import Server
from tests.tasks.test_kills import end

SCALED = "from tests.tasks.cases import scale_gradients; scale_gradients(init_scale=2.0**{}, growth_interval={})"
FEW = f"{SHORT} --data.batch_size 16 --trainer.limit_test_batches 0"
CALM = "--model.optimizer.eps 1e-3 --model.optimizer.gradient_clip 0.2 --trainer.accumulate_grad_batches 2"


@pytest.mark.slow
@pytest.mark.parametrize("case, ranks, scale", [("plain", 1, 24), ("length buckets", 2, 30)])
def test_killed_and_resumed(
    case: str, ranks: int, scale: int, server: Server, tmp_path: Path
) -> None:
    """Steps overflow before the kill and after it."""
    whole, folder, task = fill(tmp_path / "whole"), fill(tmp_path / "here"), CASES[case][0]
    line, scaled = (
        first(case, ranks).replace("--trainer.precision bf16-mixed", ""),
        SCALED.format(scale, 2),
    )
    server.run(line, whole, task, before=scaled, ranks=ranks)
    end(server.start(line, folder, task, scaled + at("step"), ranks), 0)
    killed = checkpoint(folder / "r")
    server.run("fit --resume r", folder, task, before=scaled, ranks=ranks)
    assert_same(folder / "r", whole / "r")
    ours, theirs = (checkpoint(place / "r")["MixedPrecision"] for place in (folder, whole))
    assert ours == theirs != killed["MixedPrecision"] and ours["scale"] < 2.0**scale
    norms = [
        float(row["train/grad_norm"]) for row in metrics(whole / "r") if "train/grad_norm" in row
    ]
    left_out = [step for step, norm in enumerate(norms) if not math.isfinite(norm)]
    assert min(left_out) < killed["global_step"] <= max(left_out) and len(left_out) < len(norms)


def test_a_step_that_overflows_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale_gradients(monkeypatch.setattr, init_scale=2.0**24, growth_interval=2)
    clip, seen = Task.configure_gradient_clipping, list[tuple[Tensor, float, bool]]()

    def watched(self: Task, *arguments: Any, **options: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        finite = all(
            one.grad.isfinite().all() for one in self.net.parameters() if one.grad is not None
        )
        seen.append(
            (
                parameters_to_vector(self.net.parameters()).detach().clone(),
                plugin.scaler.get_scale(),
                finite,
            )
        )
        clip(self, *arguments, **options)

    monkeypatch.setattr(Task, "configure_gradient_clipping", watched)
    assert (
        run(f"fit {FEW} --trainer.max_epochs 4 --model.optimizer.optimizer muon --run_dir r") == 0
    )
    assert "warning" not in capsys.readouterr().err
    assert not seen[0][2] and sum(finite for *_, finite in seen) > 4
    for (weights, scale, finite), (after, new, _) in zip(seen, seen[1:], strict=False):
        assert torch.equal(weights, after) != finite
        assert new == scale / 2 if not finite else new in (scale, 2 * scale)
    rows = [row for row in metrics("r") if "train/grad_norm" in row]
    assert [math.isfinite(float(row["train/grad_norm"])) for row in rows] == [
        finite for *_, finite in seen
    ]
    assert (
        all(math.isfinite(float(row["train/loss"])) for row in rows)
        and checkpoint("r")["global_step"] == 16
    )


def test_gradients_are_clipped_and_logged_without_the_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for scale in (1.0, 2.0**10):
        scale_gradients(monkeypatch.setattr, init_scale=scale)
        assert run(f"fit {FEW} {CALM} --model.optimizer.warmup 0 --run_dir {scale}") == 0
        norms = [
            float(row["train/grad_norm"]) for row in metrics(str(scale)) if "train/grad_norm" in row
        ]
        found[scale] = (
            norms,
            torch.cat([one.flatten() for one in checkpoint(str(scale))["state_dict"].values()]),
        )
        assert checkpoint(str(scale))["MixedPrecision"]["scale"] == scale
    (norms, weights), (others, theirs) = found.values()
    assert norms == pytest.approx(others, rel=0.01) and min(norms) > 0.2 and len(norms) == 4
    torch.testing.assert_close(weights, theirs, atol=1e-4, rtol=0)
