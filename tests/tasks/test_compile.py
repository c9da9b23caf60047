"""A compiled run: the same keys in its checkpoints, used without compiling."""

import pytest

from tests.tasks.command import SHORT, checkpoint, run


@pytest.mark.slow
def test_compiled_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(f"fit {SHORT} --run_dir plain") == 0
    assert run(f"fit {SHORT} --compile --run_dir compiled") == 0
    plain, compiled = checkpoint("plain")["state_dict"], checkpoint("compiled")["state_dict"]
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        assert (value - compiled[name]).abs().max() < 1e-3, name  # the same run, up to rounding

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("torch.nn.Module.compile", refuse)
    assert run("test --ckpt_path compiled/checkpoints/best.ckpt --trainer.limit_test_batches 1") == 0
