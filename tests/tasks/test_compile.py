"""A compiled run: what its steps call is compiled; the same keys in its checkpoints, used without
compiling.
"""

from typing import Any

import pytest
from torch import nn
from torch._dynamo.utils import counters

from tests.tasks.command import SHORT, checkpoint, metrics, run


@pytest.mark.parametrize("task", ["vit", "lm"])
def test_steps_call_what_is_compiled(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def compile(module: nn.Module) -> None:
        def counted(*arguments: Any, **named: Any) -> Any:
            called.append(type(module).__name__)
            return module._call_impl(*arguments, **named)  # type: ignore[operator]

        module._compiled_call_impl = counted  # where `nn.Module.compile` puts it

    monkeypatch.setattr("torch.nn.Module.compile", compile)
    assert run(f"fit {SHORT} --compile --run_dir r", task) == 0
    assert len(called) >= 8  # steps


@pytest.mark.slow
@pytest.mark.parametrize("task", ["vit", "bert", "mlm", "lm"])
def test_compiled_run(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # compiled code draws other numbers for dropout; the optimizer makes no large steps of rounding
    line = f"fit {SHORT} --model.net.stack.dropout 0 --model.optimizer.optimizer adamw"
    line += " --model.optimizer.eps 1e-3"
    counters.clear()
    for name in ("plain", "compiled"):
        assert (
            run(f"{line} --compile {str(name == 'compiled').lower()} --run_dir {name}", task) == 0
        )
    assert counters["stats"]["unique_graphs"] > 0
    plain, compiled = checkpoint("plain")["state_dict"], checkpoint("compiled")["state_dict"]
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        assert (value - compiled[name]).abs().max() < 1e-4, name  # the same run, up to rounding
    losses, others = (
        [float(row["train/loss"]) for row in metrics(name) if "train/loss" in row]
        for name in ("plain", "compiled")
    )
    assert losses == pytest.approx(others, rel=1e-4) and len(losses) == 8

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("torch.nn.Module.compile", refuse)
    best = "compiled/checkpoints/best.ckpt"
    assert run(f"test --ckpt_path {best} --trainer.limit_test_batches 1", task) == 0
