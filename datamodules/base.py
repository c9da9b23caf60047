"""What every datamodule of the suite shares: loaders in a fixed order, and the state to continue in mid-epoch."""

import signal
import warnings
from dataclasses import fields
from typing import Any, Protocol

import pytorch_lightning as pl
from torch import Generator
from torch.utils.data import DataLoader

from datamodules.utils.batching import DealtBatches, ResumableBatchSampler
from datamodules.utils.errors import UsageError

# Both are wrong here: data in memory need no workers, and the order of batches does survive a resume.
for _message in (".*does not have many workers.*", ".*your dataloader is not resumable.*"):
    warnings.filterwarnings("ignore", _message)

PATIENCE = 30  # seconds that a worker goes on after a SIGTERM


class BatchedDataset(Protocol):
    """A data set that is asked for whole batches: `dataset[[3, 1, 4]]` is a dict of tensors, batch first."""

    in_memory: bool

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> dict[str, Any]: ...


def leave_signals(worker: int) -> None:
    """Leave it to a worker's parent to stop at a signal that all processes get: it still needs batches for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(PATIENCE))


def position(trainer: pl.Trainer) -> tuple[int, int]:
    """Where a run goes on that ends now: its epoch, and how many batches of it went into complete optimizer steps.

    Gradients are not saved: those of an optimizer step that lacks batches are computed again.
    """
    loop = trainer.fit_loop
    done: int = loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
    if done < trainer.num_training_batches:
        done -= done % trainer.accumulate_grad_batches
    return max(0, loop.epoch_progress.current.ready - 1), done


class ResumableDataModule(pl.LightningDataModule):
    """Builds loaders whose batches follow from (seed, epoch, batch number), whatever the number of workers.

    Subclasses return `train_loader(dataset)` and `eval_loader(dataset)` from Lightning's hooks. The Trainer must be
    built with `use_distributed_sampler=False`: the sampler here shards by rank itself, and evaluates each sample once.

    Args:
        batch_size: Training samples per batch and device.
        eval_batch_size: Samples per batch in validation, test and prediction.
        num_workers: Processes that prepare batches of a data set that is not in memory.
        seed: Of the order of the samples.

    Raises:
        UsageError: A size below 1, or fewer workers than 0.
    """

    source: Any = (
        None  # where the samples come from, and what to know of them; see `datamodules.sources`
    )

    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise UsageError(f"{name} is {value}, but must be at least {least}.")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers, self.seed = num_workers, seed
        self._resume: dict[str, int] | None = None
        self._samples = 0

    def train_sampler(self, dataset: BatchedDataset) -> ResumableBatchSampler:
        """The order of training; its length is the number of batches of an epoch on this rank."""
        world_size, rank = self.train_ranks(dataset)
        whole = len(dataset) >= self.batch_size * world_size
        return ResumableBatchSampler(
            len(dataset),
            self.batch_size,
            self.seed,
            shuffle=True,
            drop_last=whole,
            rank=rank,
            world_size=world_size,
        )

    def train_loader(self, dataset: BatchedDataset) -> DataLoader:
        """Shuffled batches, from the place in the epoch that a loaded checkpoint names."""
        self._samples = len(dataset)
        sampler = self.train_sampler(dataset)
        sampler.start(*self._place(sampler.world_size))
        sampler.overfit = bool(getattr(self.trainer, "overfit_batches", 0))
        return self._loader(dataset, sampler)

    def eval_loader(self, dataset: BatchedDataset) -> DataLoader:
        """Each sample once over all ranks, in the batches that one process has."""
        world_size, rank = self._ranks()
        return self._loader(dataset, DealtBatches(self.eval_sampler(dataset), rank, world_size))

    def eval_sampler(self, dataset: BatchedDataset) -> ResumableBatchSampler:
        """The order of evaluation, over all ranks: that of the data set."""
        return ResumableBatchSampler(len(dataset), self.eval_batch_size)

    def state_dict(self) -> dict[str, int]:
        """Where training stands: `epoch` and `batch` come next; the rest says what they were counted with."""
        if self.trainer is None or self.trainer.fit_loop._combined_loader is None:
            return {}
        epoch, batch = position(self.trainer)
        if batch >= self.trainer.num_training_batches:
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch, **self.counted(self.trainer.world_size)}

    def counted(self, world_size: int) -> dict[str, int]:
        """What the number of a batch was counted with; a run that resumes must agree with all of it."""
        return {"batch_size": self.batch_size, "world_size": world_size, "samples": self._samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue there when training asks for its loader; validation and test ignore it."""
        self._resume = state_dict

    def _place(self, world_size: int) -> tuple[int, int]:
        """(epoch, batch) to start from; a checkpoint counts once.

        Raises:
            UsageError: The checkpoint counted in other batches than this run.
        """
        state, self._resume = self._resume, None
        if not state:
            return (self.trainer.current_epoch if self.trainer else 0), 0
        words = {
            "batch_size": "batch size",
            "world_size": "number of devices",
            "samples": "number of training samples",
        }
        for name, value in self.counted(world_size).items():
            if value == state.get(name, value):
                continue
            if name == "content":
                raise UsageError(
                    "the training text is not the one that the checkpoint was written with, though it is as long: "
                    "resume with that one, or start a new run."
                )
            raise UsageError(
                f"the checkpoint was written with {words.get(name, name)} {state[name]}, this run has {value}: "
                f"set it to {state[name]} to resume, or start a new run."
            )
        return state["epoch"], state["batch"]

    def unused(self) -> dict[str, Any]:
        """Options that differ from their defaults and mean nothing to the source, such as {"dataset.subset": "en"}."""
        if self.source is None:
            return {}
        options = self.source.options
        plain = type(options)()
        names = [field.name for field in fields(plain) if field.name in self.source.unused_options]
        given = {name: getattr(options, name) for name in names}
        return {
            f"dataset.{name}": value
            for name, value in given.items()
            if value != getattr(plain, name)
        }

    def train_ranks(self, dataset: BatchedDataset) -> tuple[int, int]:
        """Number of processes that share the samples of training, and which this one is.

        Raises:
            UsageError: There are fewer samples: some processes would wait for batches of the others in vain.
        """
        world_size, rank = self._ranks()
        if len(dataset) < world_size:
            raise UsageError(
                f"the training split has {len(dataset)} samples, too few for {world_size} processes: train in fewer, "
                f"as with --trainer.devices {max(1, len(dataset))}, or give more data."
            )
        return world_size, rank

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)

    def _loader(
        self, dataset: BatchedDataset, sampler: ResumableBatchSampler | DealtBatches
    ) -> DataLoader:
        workers = 0 if dataset.in_memory else self.num_workers
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,  # type: ignore[arg-type]
            sampler=sampler,
            batch_size=None,  # the sampler yields whole batches
            num_workers=workers,
            worker_init_fn=leave_signals if workers else None,
            persistent_workers=workers > 0,
            pin_memory=on_gpu,
            generator=Generator().manual_seed(
                self.seed
            ),  # an iterator then draws nothing from the global generator
        )
