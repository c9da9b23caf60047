"""Tasks in Python: `load_from_checkpoint`, and Lightning's Trainer without our command line."""

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.cli.app import load
from tasks.errors import UsageError
from tasks.options import accepted, build_from_options
from tests.helpers.command import run
from tests.helpers.tiny import TINY, write_data, write_images


def classes(task: str) -> tuple[Any, Any]:
    """The LightningModule and the LightningDataModule of a task."""
    app = import_module(f"tasks.{task}.__main__").APP
    return load(app.task), load(app.data)


def test_options_of_a_class_are_those_it_passes_on() -> None:
    class Base:
        def __init__(self, net: int = 1, compile: bool = False) -> None: ...

    class Closed(Base):
        def __init__(self, lr: float = 0.1) -> None: ...

    class Open(Closed, Base):
        def __init__(self, width=3, **kwargs: Any) -> None: ...  # type: ignore[no-untyped-def]

    assert accepted(Base, net=2, lr=0.2) == {"net": 2}
    assert accepted(Closed, net=2, lr=0.2) == {"lr": 0.2}
    assert accepted(Open, net=2, lr=0.2, width=4) == {"lr": 0.2, "width": 4}


@pytest.mark.parametrize("task", TINY)
def test_a_task_trains_in_a_plain_trainer(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data()
    limits = "--trainer.max_steps 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    assert run(f"fit {TINY[task]} {limits} --run_dir run", task) == 0
    ckpt = "run/checkpoints/last.ckpt"
    saved = read_checkpoint(ckpt)
    kind, data_kind = classes(task)
    loaded = kind.load_from_checkpoint(ckpt, optimizer={"lr": 0.01})
    assert loaded.optimizer_config.lr == 0.01
    for name, value in loaded.net.state_dict().items():
        assert torch.equal(value, saved["state_dict"][f"net.{name}"])
    data = build_from_options(data_kind, saved[KEY]["config"]["data"], {})
    assert loaded.run_config["model"]["optimizer"]["lr"] == 0.01
    data.set_metadata(loaded.metadata)
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        limit_test_batches=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(loaded, data)
    assert trainer.test(loaded, data, verbose=False)[0]["test/loss"] > 0
    trainer.save_checkpoint("plain.ckpt")
    again = kind.load_from_checkpoint("plain.ckpt")
    assert again.optimizer_config == loaded.optimizer_config
    first = kind.load_from_checkpoint(ckpt)
    pairs = zip(again.net.parameters(), loaded.net.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not all(map(torch.equal, again.net.parameters(), first.net.parameters()))


def test_a_checkpoint_of_another_task_and_unknown_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = "--trainer.max_steps 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    assert run(f"fit {TINY['vit']} {few} --run_dir run") == 0
    ckpt = "run/checkpoints/last.ckpt"
    with pytest.raises(UsageError, match="vit"):
        classes("bert")[0].load_from_checkpoint(ckpt)
    with pytest.raises(UsageError, match="no_such"):
        classes("vit")[0].load_from_checkpoint(ckpt, no_such=1)
    with pytest.raises(UsageError, match="compile"):
        classes("vit")[0].load_from_checkpoint(ckpt, compile=True)
    with pytest.raises(UsageError, match="missing.ckpt"):
        classes("vit")[0].load_from_checkpoint("missing.ckpt")


def test_other_data_than_those_of_the_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "one", ("cat", "dog"))
    write_images(tmp_path / "two", ("dog", "emu"))
    few = "--trainer.max_steps 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    line = f"fit {TINY['vit']} {few} --run_dir run --data.source folder --data.path one"
    assert (
        run(f"{line} --model.net.image_size 12 --model.net.patch_size 4 --data.batch_size 2") == 0
    )
    kind, data_kind = classes("vit")
    task = kind.load_from_checkpoint("run")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(UsageError, match="class_names"):
        trainer.validate(task, data_kind("folder", "two"), verbose=False)


def test_a_checkpoint_builds_no_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
    for saved in (
        {"net": {"position_options": {"std": options}}},
        {"net": options},
        {"pretrained": options},
    ):
        with suppress(UsageError):
            build_from_options(classes("vit")[0], saved, {})
        assert not Path("pwned").exists()
