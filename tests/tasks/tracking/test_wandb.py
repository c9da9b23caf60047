"""A run is one run of W&B: resumed, online or not, and of two processes."""

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
import yaml
from jsonargparse import Namespace

from tasks.base import Task
from tasks.errors import UsageError
from tasks.tracking.loggers import STEP
from tasks.tracking.metrics_csv import LoggedRows
from tasks.training.trainer_options import place_loggers
from tests.helpers.command import ROOT, Patch, process, python, run
from tests.helpers.results import checkpoint, metrics
from tests.helpers.tiny import SHORT
from tests.helpers.wandb_files import (
    BOTH,
    LOGGED,
    WANDB,
    counts_of,
    counts_of_csv,
    end_run,
    history,
    lightning_step,
    records,
    run_ids,
    scalars,
)

KILL_AFTER_SENDING = """
import os, signal, sys
from tasks.cli.lazy_imports import import_lightning
import_lightning()
from tests.helpers import faults
def end(*_):
    sys.modules["wandb"].finish()
    os.kill(os.getpid(), signal.SIGKILL)
faults.call_at("step", end)
"""
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123",
    "DATABASE_PASSWORD": "correct horse battery staple",
}


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    """Also without network: W&B's run keeps its id, and no logger shows a value twice."""
    pytest.importorskip("tensorboard")
    line = f"{SHORT} --checkpoint.every_n_train_steps 3 --trainer.max_epochs 3 {BOTH} --run_dir r"
    done = process(f"fit {line}", KILL_AFTER_SENDING, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert run("fit --resume r") == 0
    end_run()
    found = records(Path("r"))
    assert run_ids(found) == {Path("r/wandb_id").read_text()}
    rows = history(found)
    assert all(row["_step"] == row[STEP] for row in rows if STEP in row)  # W&B keeps a step once
    assert set(counts_of_csv("r").values()) == {1} and set(counts_of_csv("r")) <= set(
        counts_of(rows)
    )
    values = {(name, row[STEP]): value for row in rows for name, value in row.items()}
    for row in metrics("r"):
        for name in row.keys() - {"step", "epoch"}:
            assert np.float32(values[name, lightning_step(row)]) == np.float32(row[name])
    shown = scalars("r")[1]
    assert {n: c for n, c in shown.items() if n[0] != "train/samples_per_s"} == dict(
        counts_of_csv("r")
    )


@pytest.mark.slow
@pytest.mark.parametrize("key", [True, False], ids=["no network", "no account"])
def test_training_continues_without_w_and_b(key: bool, tmp_path: Path) -> None:
    """And nothing that a run writes has a secret of the environment in it."""
    secrets = dict(SECRETS)
    if not key:
        del secrets["WANDB_API_KEY"]
    more = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    more |= {"WANDB_INIT_TIMEOUT": "2", "WANDB_SILENT": "false", "HOME": str(tmp_path), **secrets}
    code = f"import os; os.environ.update({more!r})"
    done = process(f"fit {SHORT} {BOTH} --run_dir r", code, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("warning: W&B"))
    assert ("refused" in line or "deadline" in line) if key else "API key" in line
    assert "wandb sync" in line
    rows = history(records(Path("r")))
    assert {name for row in rows for name in row} >= LOGGED
    texts = [done.stdout.encode(), done.stderr.encode()]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 15
    for text in texts:
        assert not [name for name, secret in SECRETS.items() if secret.encode() in text]


@pytest.mark.parametrize(
    "name, value, found",
    [
        ("WANDB_MODE", "banana", "mode"),
        ("WANDB_PROJECT", "a/b", "project name 'a/b'"),
        ("WANDB__SKIP_TRANSACTION_LOG", "true", "the settings"),
    ],
)
def test_settings_that_w_and_b_refuses(name: str, value: str, found: str, tmp_path: Path) -> None:
    code = f"import os; os.environ.update(WANDB_MODE='offline'); os.environ[{name!r}] = {value!r}"
    done = process(f"fit {SHORT} {BOTH} --run_dir r", code, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: W&B") and found in line, done.stderr
    assert "WANDB_" in line and "--debug" not in line and not Path(tmp_path, "r").exists()


class Online:
    """W&B's run as `wandb.init` gives it where there is a server, which keeps what was logged."""

    asked: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def __init__(self, **options: Any) -> None:
        self.id = options["id"]
        self.config = SimpleNamespace(update=lambda *_, **__: 0)
        self.starting_step = max((row[STEP] for row in self.rows), default=-1) + 1
        self.asked.append(options)

    def log(self, values: dict[str, Any], **_: Any) -> None:
        self.rows.append(dict(values))

    def finish(self) -> None:
        pass


def test_a_run_resumed_online_is_the_same_run(monkeypatch: Patch) -> None:
    """Its first process failed, with steps logged that come after the checkpoint."""
    step = Task.training_step

    def failing(self: Task, batch: Any, number: int) -> Any:
        if self.global_step == 7:
            raise ValueError("a bad sample")
        return step(self, batch, number)

    monkeypatch.setattr(Online, "asked", [])
    monkeypatch.setattr(Online, "rows", [])
    monkeypatch.setattr(wandb, "init", Online)
    monkeypatch.setattr(Task, "training_step", failing)
    line = f"{SHORT} --checkpoint.every_n_train_steps 3 --trainer.max_epochs 3"
    assert run(f"fit {line} {WANDB} --run_dir r") == 1
    assert max(row[STEP] for row in Online.rows) == 6 and checkpoint("r")["global_step"] == 6
    monkeypatch.setattr(Task, "training_step", step)
    assert run("fit --resume r") == 0
    for options in Online.asked:
        assert options["id"] == Path("r/wandb_id").read_text()
        assert (options["resume"], options["project"]) == ("allow", "tessera")
    counts = counts_of(Online.rows)
    assert set(counts_of_csv("r")) <= set(counts) and set(counts.values()) == {1}


@pytest.mark.slow
def test_two_processes_are_one_run_of_w_and_b(tmp_path: Path) -> None:
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp"
    done = python(f"tasks.vit fit {SHORT} {two} {WANDB} --run_dir r", tmp_path)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*.wandb") if not path.parent.is_symlink()]
    assert len(files) == 1 and len(list(Path("r/wandb").glob("*run-*-*"))) == 1
    counts = counts_of(history(records(Path("r"))))
    assert set(counts) >= set(counts_of_csv("r")) and set(counts.values()) == {1}


@pytest.mark.slow
def test_runs_of_one_process_are_runs_of_w_and_b(tmp_path: Path) -> None:
    """One that the caller has begun before is used, and left open."""
    for folder in ("a", "b"):
        assert run(f"fit {SHORT} {WANDB} --run_dir {folder}") == 0
        assert wandb.run is None
        (written,) = run_ids(records(Path(folder)))
        assert written == Path(folder, "wandb_id").read_text()
        assert set(counts_of(history(records(Path(folder))))) >= set(counts_of_csv(folder))
    assert Path("a/wandb_id").read_text() != Path("b/wandb_id").read_text()
    with wandb.init(mode="offline", dir=str(tmp_path)) as own:
        assert run(f"fit {SHORT} {WANDB} --run_dir c") == 0
        assert wandb.run is own and Path("c/wandb_id").read_text() == own.id


@pytest.mark.slow
def test_a_logger_that_is_configured_again_logs_once(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs/logger/wandb.yaml").read_text())
    config["trainer"]["logger+"][0]["init_args"]["id"] = "chosen"
    Path("wandb.yaml").write_text(yaml.safe_dump(config))
    again = "--config wandb.yaml --config configs/logger/tensorboard.yaml"
    again += " --trainer.limit_test_batches 0"
    assert run(f"fit {SHORT} {again} --run_dir r") == 0
    end_run()
    assert run(f"fit --resume r --trainer.max_epochs 3 {again}") == 0
    end_run()
    assert len(yaml.safe_load(Path("r/config.yaml").read_text())["trainer"]["logger"]) == 2
    assert Path("r/wandb_id").read_text() == "chosen"
    assert run_ids(records(Path("r"))) == {"chosen"}
    for counts in (counts_of(history(records(Path("r")))), scalars("r")[1]):
        losses = {step: count for (name, step), count in counts.items() if name == "train/loss"}
        assert losses == dict.fromkeys(range(12), 1)


@pytest.mark.parametrize("kept, given, agent, found", [
    (None, {}, None, 8),
    (None, {"id": "chosen"}, "agent", "chosen"),
    (None, {"version": "chosen"}, None, "chosen"),
    ("kept", {}, "agent", "kept"),
    ("kept", {"id": "kept"}, None, "kept"),
    ("kept", {"id": "other"}, None, UsageError),
    (None, {"save_dir": "other"}, None, UsageError),
])  # fmt: skip
def test_id_and_folder_of_w_and_b(
    kept: str | None, given: Any, agent: str | None, found: Any, monkeypatch: Patch
) -> None:
    """A run keeps its id; else one is as chosen, as W&B's agent says, or new."""
    if kept:
        Path("wandb_id").write_text(kept)
    if agent:
        monkeypatch.setenv("WANDB_RUN_ID", agent)
    values = Namespace(**{"save_dir": ".", "version": None, "id": None, **given})
    options = Namespace(class_path="pytorch_lightning.loggers.WandbLogger", init_args=values)
    if found is UsageError:
        with pytest.raises(UsageError):
            place_loggers([options], Path.cwd(), LoggedRows(None))
        return
    place_loggers([options], Path.cwd(), LoggedRows(None))
    assert options.class_path == "tasks.tracking.loggers.WandbLogger"
    assert values.version is None and values.save_dir == str(Path.cwd())
    assert found in (values.id, len(values.id))


@pytest.mark.slow
def test_an_old_configuration_makes_a_new_run_of_w_and_b() -> None:
    few = "--trainer.limit_train_batches 1 --trainer.max_epochs 1 --trainer.limit_test_batches 0"
    assert run(f"fit {SHORT} {few} {WANDB} --run_dir a") == 0
    end_run("a")
    assert run("fit --config a/config.yaml --run_dir b") == 0
    end_run("b")
    assert Path("a/wandb_id").read_text() != Path("b/wandb_id").read_text()
