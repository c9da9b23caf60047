"""Reading what W&B and TensorBoard keep in a run folder."""

import json
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from tests.helpers.results import metrics

LOGGED = {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_s"}
LOGGED |= {"val/loss", "val/acc", "test/acc"}
WANDB = "--config configs/logger/wandb.yaml"
BOTH = f"{WANDB} --config configs/logger/tensorboard.yaml"


def entries(data: bytes) -> Iterator[bytes]:
    """Of a W&B file: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    assert data[:4] == b":W&B"
    offset = 7
    entry = b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # too short for a header: the rest of the block is empty
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        if offset + 7 + length > len(data):  # as it is being written
            return
        entry += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def records(folder: Path) -> list[Any]:
    """All records of the W&B files in a run folder, by W&B's own description of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(path for path in folder.rglob("*.wandb") if not path.parent.is_symlink())
    return [Record.FromString(entry) for path in files for entry in entries(path.read_bytes())]


def end_run(folder: str = "r") -> None:
    """End the W&B run as a process does, and wait until W&B's own process has written its file."""
    wandb.finish()
    for _ in range(200):
        found = [(path.stat().st_mtime, path) for path in Path(folder).rglob("*.wandb")]
        if found and any(record.HasField("exit") for record in records(max(found)[1].parent)):
            return
        time.sleep(0.05)
    raise AssertionError(f"the newest of {found} is not complete")


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The rows that were logged, values by name."""
    rows = []
    for record in found:
        items = record.history.item
        names = ["/".join(item.nested_key) or item.key for item in items]
        rows.append(dict(zip(names, [json.loads(item.value_json) for item in items], strict=True)))
    return [row for row in rows if row]


def run_ids(found: list[Any]) -> set[str]:
    """The ids of W&B's runs, which may all be continued."""
    runs = [record.run for record in found if record.run.run_id]
    assert all(run.resume for run in runs)
    return {run.run_id for run in runs}


def tables(folder: str | Path) -> list[Any]:
    """The tables of W&B in a run folder."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("*.table.json"))]


def counts_of(rows: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often each name was logged at each step."""
    inner = ("_", "trainer/", "epoch")
    return Counter(
        (n, row["trainer/global_step"]) for row in rows for n in row if not n.startswith(inner)
    )


def lightning_step(row: dict[str, str]) -> int:
    """The step of a row of `metrics.csv` as loggers have it: from 0 in training."""
    return int(row["step"]) - ("test/loss" not in row)


def counts_of_csv(folder: str) -> Counter[tuple[str, int]]:
    """The same of `metrics.csv`."""
    return Counter(
        (n, lightning_step(row))
        for row in metrics(folder)
        for n in row
        if n not in ("step", "epoch")
    )


def scalars(folder: str) -> tuple[Any, Counter[tuple[str, int]]]:
    """What TensorBoard shows of a run folder, and how often each scalar was logged at each step."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(f"{folder}/tensorboard")
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name not in ("epoch", "hp_metric")]
    return events, Counter((name, event.step) for name in names for event in events.Scalars(name))


def config_of(found: list[Any]) -> dict[str, Any]:
    """The options that W&B shows of a run."""
    items = [item for record in found for item in record.config.update]
    return {item.key: json.loads(item.value_json) for item in items}
