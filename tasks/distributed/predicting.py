"""`predict` in one or several processes; a killed command can be resumed.

A part file beside the output keeps the batches so far; the same command leaves these out.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from datamodules.utils.errors import DataError
from datamodules.utils.files import errors_naming, open_regular, try_lock
from tasks import __version__
from tasks.checkpoints.reading import KEY, Checkpoint, net_weights
from tasks.errors import UsageError
from tasks.options import Options
from tasks.predictions import PredictionFile
from tasks.tracking.run_folder import make_folder

DEVICE_OPTIONS = ("devices", "num_nodes", "strategy")  # of the Trainer; predictions are the same
Record = tuple[int, np.ndarray, np.ndarray]  # number of a batch, indices (B,) and outputs (B, ...)


def fingerprint(options: Options, checkpoint: Checkpoint) -> str:
    """A digest of all that decides what is predicted for a sample."""
    trainer = {
        name: value for name, value in options["trainer"].items() if name not in DEVICE_OPTIONS
    }
    texts = [json.dumps(part) for part in (options | {"trainer": trainer}, checkpoint[KEY])]
    digest = hashlib.blake2b(hash_texts([__version__, *texts]).encode())
    for name, weight in net_weights(checkpoint).items():
        digest.update(name.encode())
        digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_texts(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b()
    for text in texts:
        digest.update(text.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


class PartFile:
    """Predicted batches in a file to which they are appended, by one process at a time.

    Args:
        path: The file; `append` creates its folder.
        key: What the predictions depend on. A file with another key is removed.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self.file: BinaryIO | None = None  # open and locked

    def read(self) -> list[Record]:
        """The batches in the file; a batch that a kill cut off is removed from it.

        Raises `UsageError` if another process has opened it.
        """
        found: list[Record] = []
        if not self.path.exists():
            return found
        file = self.file or self._open()
        file.seek(0)
        end = 0
        with suppress(ValueError):
            is_ours = read_array(file).item() == self.key
            while is_ours:
                end = file.tell()
                found.append((read_array(file).item(), read_array(file), read_array(file)))
        file.truncate(end)  # the last batch may be cut off
        if not end:
            self.path.unlink()
            self.file = None
        return found

    def append(self, record: Record) -> None:
        """Adds a batch. Raises `UsageError` if another process has opened the file by now."""
        file = self.file
        if file is None:
            make_folder(self.path.parent, "--output")
            file = self._open()
            file.truncate(0)  # a process that was killed meanwhile may have left some
            write_array(file, self.key)
        for array in record:
            write_array(file, array)
        file.flush()

    def _open(self) -> BinaryIO:
        """Opens the file for this process alone."""
        is_current = False
        while not is_current:  # else the process that had locked it has removed it
            file = open_regular(self.path, follow=False, append=True)
            if not try_lock(file):
                raise UsageError(
                    f"another process is writing to {self.path}, and so to the same --output: wait "
                    "for it, or give another name"
                )
            with suppress(FileNotFoundError):
                is_current = os.path.samestat(os.fstat(file.fileno()), self.path.lstat())
        self.file = file
        return file


def read_array(file: Any) -> np.ndarray:
    """The next array of an open file; raises `ValueError` if it is missing or cut off."""
    return np.lib.format.read_array(file, allow_pickle=False)


def write_array(file: Any, array: Any) -> None:
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


class PredictionRecorder(pl.Callback):
    """Gathers predictions of all processes on the first one, which keeps them in a part file.

    A batch has the entry "index", and `predict_step` returns a pair, the second of which are the
    outputs, (B, ...).

    Args:
        part: The file; None: they are kept in memory only.
    """

    def __init__(self, part: PartFile | None) -> None:
        self.part = part
        self.records: dict[int, Record] = {}  # by number of the batch; on the first process

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves out the batches in the part file."""
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self.part is not None and trainer.is_global_zero:
            self.part.key = hash_texts([self.part.key, *datamodule.predict_state()])
            self.records = {record[0]: record for record in self.part.read()}
            if self.records:
                done = sum(len(indices) for _, indices, _ in self.records.values())
                total = len(datamodule.predict_samples)
                print(f"continuing from {self.part.path}: {done:,} of {total:,} are predicted")
        datamodule.predicted = trainer.strategy.broadcast(set(self.records))

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader: Any = trainer.predict_dataloaders
        sampler = loader.sampler
        own: Record | None = None
        if sampler.is_counted(batch_idx):
            arrays = (batch["index"].cpu().numpy(), outputs[1].float().cpu().numpy())
            own = (sampler.batch_number(batch_idx), *arrays)
        for record in gather_records(own, trainer):
            self.records[record[0]] = record
            if self.part is not None:
                self.part.append(record)


def gather_records(own: Record | None, trainer: pl.Trainer) -> list[Record]:
    """What all processes predicted, on the first one; on the others nothing."""
    found: list[Record | None] = [own]
    if trainer.world_size > 1:
        found = [None] * trainer.world_size
        dist.gather_object(own, found if trainer.is_global_zero else None)
    if not trainer.is_global_zero:
        return []
    return [record for record in found if record is not None]


def predicts_all(trainer: pl.Trainer) -> bool:
    """Whether no limit is set: 1.0 is all batches, 1 is one."""
    limit = trainer.limit_predict_batches
    return isinstance(limit, float) and limit == 1.0


def predict_dataset(
    trainer: pl.Trainer, task: pl.LightningModule, datamodule: Any, file: PredictionFile | None
) -> tuple[list[int], list[Tensor]] | None:
    """Predicts all samples; batches in the part file are not computed again.

    Args:
        trainer: Of one process or several.
        task: Its `predict_step` is as `PredictionRecorder` needs it.
        datamodule: Has the samples.
        file: Where predictions are going to be written; None: nowhere.

    Returns:
        On the first process the indices of the samples, sorted, and their outputs; None on others.

    Raises:
        DataError: No input can be read.
    """
    part = None
    errors: AbstractContextManager[None] = nullcontext()
    if file is not None and file.part is not None:
        part = PartFile(file.part, file.key)
        errors = errors_naming(file.path, file.part)
    recorder = PredictionRecorder(part)
    trainer.callbacks.append(recorder)  # type: ignore[attr-defined]
    with errors:
        trainer.predict(task, datamodule=datamodule, return_predictions=False)
    if not trainer.is_global_zero:
        return None
    if not recorder.records:
        raise UsageError("nothing is predicted: raise --trainer.limit_predict_batches")
    _, indices, outputs = zip(*recorder.records.values(), strict=True)
    index = torch.from_numpy(np.concatenate(indices))  # (S,)
    if not len(index):
        if part is not None:
            part.path.unlink(missing_ok=True)
        raise DataError(f"no input can be read, such as {datamodule.predict_samples[0]}.")
    order = index.argsort()
    rows = torch.from_numpy(np.concatenate(outputs))[order]  # (S, ...)
    return index[order].tolist(), list(rows)
