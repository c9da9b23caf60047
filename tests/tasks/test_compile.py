"""A compiled run: what its steps call is compiled; the same keys in its checkpoints, used without compiling."""

from typing import Any

import pytest
from torch import nn

from tests.tasks.command import SHORT, checkpoint, metrics, run

TASKS = ("vit", "bert", "mlm", "lm")


@pytest.mark.parametrize(
    "task", ["vit", "lm", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bert", "mlm"))]
)
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
@pytest.mark.parametrize("task", TASKS)
def test_compiled_run(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    # Compiled code draws other numbers for dropout; and this optimizer makes no large steps of rounding.
    line = f"fit {SHORT} --model.net.stack.dropout 0 --model.optimizer.optimizer adamw --model.optimizer.eps 1e-3"
    assert run(f"{line} --run_dir plain", task) == 0
    counters.clear()
    assert run(f"{line} --compile --run_dir compiled", task) == 0
    assert counters["stats"]["unique_graphs"] > 0
    plain, compiled = checkpoint("plain")["state_dict"], checkpoint("compiled")["state_dict"]
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        assert (value - compiled[name]).abs().max() < 1e-4, name  # the same run, up to rounding
    losses = [
        [float(row["train/loss"]) for row in metrics(name) if "train/loss" in row]
        for name in ("plain", "compiled")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 8

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("torch.nn.Module.compile", refuse)
    assert (
        run("test --ckpt_path compiled/checkpoints/best.ckpt --trainer.limit_test_batches 1", task)
        == 0
    )
