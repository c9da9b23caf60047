"""What the loggers hold, read back with their own readers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from tasks.callbacks.mistakes import Mistakes
from tasks.callbacks.samples import to_tensorboard
from tests.tasks.command import SHORT, SMALL_LM, run, write_corpus

LOGGED = {"train/loss", "val/loss", "val/acc", "test/acc", "train/lr", "train/grad_norm", "train/samples_per_s"}


def entries(data: bytes) -> Iterator[bytes]:
    """The entries of a W&B file: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    assert data[:4] == b":W&B"
    place, entry = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too short for another header: the rest of the block is empty
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        entry += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def records(folder: Path) -> list[Any]:
    """All records of the W&B files in a run folder, by W&B's own description of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(entry) for path in folder.rglob("*.wandb") for entry in entries(path.read_bytes())]


def test_wandb() -> None:
    assert run(f"fit {SHORT} --config configs/logger/wandb.yaml --run_dir r") == 0
    wandb.finish()  # as the end of the process does
    found = records(Path("r"))
    history = [item for record in found for item in record.history.item]
    keys = {item.key or "/".join(item.nested_key) for item in history}
    assert keys >= LOGGED
    values = {"/".join(item.nested_key): json.loads(item.value_json) for item in history if item.nested_key}
    for split in ("val", "test"):
        assert values[f"{split}/misclassified/_type"] == "table-file" and values[f"{split}/misclassified/nrows"] > 0
    files = [json.loads(path.read_text()) for path in Path("r").rglob("*.table.json")]
    assert files and files[0]["columns"] == ["image", "label", "prediction", "probability"]
    assert all(row[1] != row[2] for file in files for row in file["data"])
    identity = Path("r/wandb_id").read_text()
    assert {record.run.run_id for record in found if record.run.run_id} == {identity}
    assert (Path("r") / "metrics.csv").exists()

    assert run("fit --resume r --trainer.max_epochs 3") == 0
    wandb.finish()
    assert {record.run.run_id for record in records(Path("r")) if record.run.run_id} == {identity}


def test_texts_of_a_language_model() -> None:
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.source files --data.path texts --trainer.limit_train_batches 4"
    assert run(f"{line} --model.samples.every 2 --config configs/logger/wandb.yaml --run_dir r", "lm") == 0
    wandb.finish()
    keys = {"/".join(item.nested_key) or item.key for record in records(Path("r")) for item in record.history.item}
    assert keys >= {"train/loss", "train/tokens_per_s", "train/mfu", "val/perplexity", "val/bits_per_byte"}
    tables = [json.loads(path.read_text()) for path in sorted(Path("r").rglob("*.table.json"))]
    assert {tuple(table["columns"]) for table in tables} == {("step", "prompt", "text")}
    rows = sorted(row for table in tables for row in table["data"])
    assert [row[0] for row in rows] == [2, 4]
    for step, _, text in rows:
        assert Path(f"r/samples/step_{step:07}.txt").read_text() == text + "\n"

    shown: list[tuple[str, str, int]] = []
    logger = SimpleNamespace(experiment=SimpleNamespace(add_text=lambda *entry: shown.append(entry)))
    to_tensorboard(logger, [("The", " end\nof")], 3)
    assert shown == [("sample 1", "    The end\n    of", 3)]


def test_tensorboard() -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run(f"fit {SHORT} --config configs/logger/tensorboard.yaml --run_dir r") == 0
    (folder,) = {path.parent for path in Path("r").rglob("events.out.tfevents.*")}
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= LOGGED
    assert any("misclassified" in name for name in events.Tags()["images"])
    assert len(events.Scalars("val/acc")) == 2


def test_refused_runs_leave_no_logger_behind() -> None:
    line = f"fit {SHORT} --config configs/logger/wandb.yaml --model.net.num_classes 3"
    assert run(line) == 2
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "kinds, first, kept", [([CSVLogger], True, []), ([CSVLogger, TensorBoardLogger], True, [(1, 0), (2, 0)]),
                           ([TensorBoardLogger], False, []), ([], True, [])]
)  # fmt: skip
def test_mistakes_are_kept_for_who_can_show_them(
    kinds: list[type[Logger]], first: bool, kept: list[tuple[int, int]]
) -> None:
    if TensorBoardLogger in kinds:
        pytest.importorskip("tensorboard")
    trainer: Any = SimpleNamespace(loggers=[kind("r") for kind in kinds], is_global_zero=first)
    batch = {"image": torch.zeros(4, 1, 2, 2, dtype=torch.uint8), "label": torch.tensor([0, 1, 2, 3])}
    mistakes = Mistakes(most=2)
    mistakes.on_validation_batch_end(trainer, None, torch.eye(4)[[0, 0, 0, 0]], batch, 0)  # type: ignore[arg-type]
    assert [(label, guess) for _, label, guess, _ in mistakes.found] == kept
