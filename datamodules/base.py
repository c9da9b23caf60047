"""Base of the datamodules: splits loaded once, batches in a fixed order, resuming in an epoch."""

import signal
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from typing import Any, Protocol

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from datamodules.sources import Source
from datamodules.sources.base import OwnSource
from datamodules.utils.batching import EvalBatchSampler, ResumableBatchSampler
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import natural_key

# Neither applies: data in memory need no workers, and the samplers here are resumable.
for _message in (".*does not have many workers.*", ".*your dataloader is not resumable.*"):
    warnings.filterwarnings("ignore", _message)

WORKER_GRACE_SECONDS = 30  # that a worker lives on after a SIGTERM
SPLITS_OF_STAGE = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


class BatchedDataset(Protocol):
    """A data set indexed by batches: `dataset[[3, 1, 4]]` is a dict of tensors, batch first.

    `torch.utils.data.StackDataset(x=tensor, y=tensor)` is one. The processes of `num_workers` read
    it if it has an attribute `in_memory` that is False.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> dict[str, Any]: ...


def outlive_signals(worker: int) -> None:
    """Lets a worker outlive SIGINT, and SIGTERM for a while: its parent still needs batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_GRACE_SECONDS))


def training_position(trainer: pl.Trainer) -> tuple[int, int]:
    """The epoch, and its batches up to the last optimizer step: where a run resumes.

    Accumulated gradients are not saved: they are computed again.
    """
    loop = trainer.fit_loop
    batches: int = loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
    if batches < trainer.num_training_batches:
        batches -= batches % trainer.accumulate_grad_batches
    return max(0, loop.epoch_progress.current.ready - 1), batches


class ResumableDataModule(pl.LightningDataModule):
    """Builds loaders whose batches depend on (seed, epoch, batch number) only.

    Subclasses define `load`, and `measure_metadata` if the model must know something of the data.
    Those that read files set `sources` and `source`, too. For `predict`, `load("predict")` reads
    `predict_path`; `predict_samples` and `predict_state` are for `tasks.distributed.predicting`.
    The Trainer must be built with `use_distributed_sampler=False`: the samplers here shard by rank.
    Datamodules raise `UsageError` if an option is out of range or there are no such data,
    `DataError` if data cannot be used.

    Args:
        batch_size: Training samples per batch and device.
        eval_batch_size: Samples per batch in validation, test and prediction.
        num_workers: Processes that prepare batches of a data set that is not in memory.
        seed: Seed of the order of the samples.
    """

    sources: Mapping[str, type[Source]] = {}  # to choose from, by name
    source: Source
    noun = "samples"  # what samples are called in messages
    splits_samples = False  # whether what the source reads is cut into samples of another number
    other_digests: Collection[int] = ()  # `training_digest` of models to compare with
    balanced = False  # whether training draws each class equally often
    loading_section = ""  # "loading." if the sizes of evaluation batches are in `--data.loading`
    predict_path: str | None = None  # what `predict --input` names

    def __init__(
        self, batch_size: int = 32, eval_batch_size: int = 256, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        self.source = OwnSource(type(self).__name__)
        for name, value, minimum in (
            ("batch_size", batch_size, 1),
            (f"{self.loading_section}eval_batch_size", eval_batch_size, 1),
            (f"{self.loading_section}num_workers", num_workers, 0),
        ):
            if value < minimum:
                raise UsageError(f"--data.{name} is {value}, but must be at least {minimum}.")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = int(seed)  # the command line gives a subclass, which checkpoints cannot hold
        self.drop_last = True  # the last training batches of an epoch, unless full on every rank
        self._metadata: dict[str, Any] = {}
        self._datasets: dict[str, Any] = {}
        self.predicted: Collection[int] = ()  # numbers of the batches that `predict` leaves out
        self._resume_state: dict[str, Any] | None = None
        self._samples = 0

    # Splits: loaded when first needed, so that the test samples stay untouched until the test.

    def load(self, split: str) -> Any:
        """Reads a split, "train", "val", "test" or "predict", as a `BatchedDataset`."""
        raise UsageError(f"{type(self).__name__} has no {split} split: return one from `load`.")

    def dataset(self, split: str) -> Any:
        """A split, loaded once."""
        if split not in self._datasets:
            self._datasets[split] = self.load(split)
        return self._datasets[split]

    def test_size(self) -> int | None:
        """Samples of the data's own test split, loaded if they must be cut; None: there is none."""
        source: Any = self.source
        if not self.sources or not source.has("test"):
            return None
        return len(self.dataset("test") if self.splits_samples else source.split("test"))

    def metadata(self) -> dict[str, Any]:
        """What a model must know of its data, such as class names: a checkpoint's, or measured."""
        if not self._metadata:
            self._metadata = self.measure_metadata()
            if self.sources:
                digest = self.training_digest if self.source.is_held_out("val") else 0
                self._metadata["training_digest"] = digest
        return self._metadata

    def measure_metadata(self) -> dict[str, Any]:
        """Primitives that a checkpoint keeps, from the training split; by default none."""
        return {}

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Uses the metadata of a checkpoint. Raises `UsageError` if the options name others."""
        self._metadata = dict(metadata)
        self._datasets = {}

    def setup(self, stage: str) -> None:
        """Reads the splits of a stage: "fit", "validate", "test" or "predict"."""
        if stage != "predict":
            self.metadata()
        for split in SPLITS_OF_STAGE[stage]:
            self.recognise_training_data(split)
            self.dataset(split)

    @property
    def origin(self) -> str:
        """Where the samples were read from: a path, a hub id, or the embedded data's name."""
        return self.source.origin

    @property
    def skipped(self) -> list[str]:
        """Samples skipped because of `skip_bad`, so far."""
        return sorted(set(self.source.skipped), key=natural_key)

    def unused_options(self) -> dict[str, Any]:
        """Options that were set but that the source ignores, such as {"dataset.subset": "en"}."""
        options = self.source.options
        found = {}
        for field in fields(options):
            value = getattr(options, field.name)
            if field.name in self.source.unused_options and value != field.default:
                found[f"dataset.{field.name}"] = value
        return found

    def training_key(self) -> str:
        """A hash of the training samples, hexadecimal; by default "", of which nothing is known."""
        return ""

    @cached_property
    def training_digest(self) -> int:
        """`training_key` as a number, which a checkpoint can hold."""
        return int(self.training_key()[:12] or "0", 16)

    def recognise_training_data(self, split: str) -> None:
        """Evaluates only what was held out, if these are the training samples at another place."""
        digests = {self._metadata.get("training_digest"), *self.other_digests} - {0, None}
        if not (digests and self.source.is_evaluated_whole(split)):
            return
        with suppress(UsageError, DataError):  # such as too few to hold samples out
            self.source.unseen = self.training_digest not in digests
        if not self.source.unseen:
            self.source.warn_once(
                f"{self.origin} has the samples of the training, by their names or texts: only "
                "those that were held out are evaluated. To evaluate all, make them a test split."
            )

    def check_held_out(self, split: str) -> None:
        """Warns if a split was held out of other training samples than those of the checkpoint."""
        before = self._metadata.get("training_digest")
        if before and self.source.is_held_out(split) and before != self.training_digest:
            rank_zero_warn(
                f"the training split of {self.origin} has changed since the training, by its data "
                "or by options, and the model may have been trained with samples that are held "
                "out now: evaluate it on other data."
            )

    # Loaders.

    def train_batches(self) -> int:
        """Batches of every training epoch on this rank, without making a loader."""
        return len(self.train_sampler(self.dataset("train")))

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.dataset("train"))

    def val_dataloader(self) -> DataLoader:
        self.check_held_out("val")
        return self.eval_loader(self.dataset("val"), limit=self._limit("val"))

    def test_dataloader(self) -> DataLoader:
        self.check_held_out("test")
        return self.eval_loader(self.dataset("test"), limit=self._limit("test"))

    def predict_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("predict"), self.predicted)

    def other_columns(self, split: str, indices: list[int]) -> dict[str, list[Any]]:
        """Other columns of the table that some samples of a split were read from, by name."""
        return {}

    @property
    def predict_samples(self) -> list[str]:
        """Names or texts of the samples to predict; "index" in a batch counts them."""
        raise UsageError(
            f"{type(self).__name__} must define `predict_samples` to be used with `predict`."
        )

    def predict_state(self) -> Iterable[str]:
        """What tells whether the samples to predict are still the same."""
        raise UsageError(
            f"{type(self).__name__} must define `predict_state` to be used with `predict`."
        )

    def train_sampler(self, dataset: BatchedDataset) -> ResumableBatchSampler:
        """The order of training; its length is the number of batches of an epoch on this rank."""
        world_size, rank = self.train_ranks(dataset)
        has_full_step = len(dataset) >= self.batch_size * world_size
        drop_last = self.drop_last and has_full_step
        return ResumableBatchSampler(
            len(dataset),
            self.batch_size,
            self.seed,
            True,
            drop_last,
            rank,
            world_size,
            self.balanced_classes(dataset),
        )

    def balanced_classes(self, dataset: Any) -> Tensor | None:
        """(S,) the class of each training sample if all are to be drawn equally often.

        Raises `UsageError` if the samples do not have one class each.
        """
        if not self.balanced:
            return None
        labels: Tensor = dataset.labels
        if labels.ndim != 1:
            raise UsageError(
                "--data.balanced true needs samples with one class each: leave it out."
            )
        return labels

    def eval_sampler(self, dataset: BatchedDataset) -> ResumableBatchSampler:
        """The order of evaluation, over all ranks: that of the data set."""
        return ResumableBatchSampler(len(dataset), self.eval_batch_size)

    def train_loader(self, dataset: BatchedDataset) -> DataLoader:
        """Shuffled batches, from the position of a loaded checkpoint on."""
        self._samples = len(dataset)
        sampler = self.train_sampler(dataset)
        sampler.overfit = bool(getattr(self.trainer, "overfit_batches", 0))
        sampler.start(*self._start(sampler.world_size))
        if hasattr(dataset, "sampler"):  # its samples differ from epoch to epoch
            dataset.sampler = sampler
        return self._loader(dataset, sampler)

    def eval_loader(
        self, dataset: BatchedDataset, done: Collection[int] = (), limit: int | float = 1.0
    ) -> DataLoader:
        """Each sample once over all ranks, in the batches that one process has.

        `done` and `limit` as in `EvalBatchSampler`.
        """
        world_size, rank = self._ranks()
        sampler = EvalBatchSampler(self.eval_sampler(dataset), rank, world_size, done, limit)
        return self._loader(dataset, sampler)

    def _limit(self, split: str) -> int | float:
        """The Trainer's limit of batches of "val" or "test"."""
        return getattr(self.trainer, f"limit_{split}_batches") if self.trainer else 1.0

    def train_ranks(self, dataset: BatchedDataset) -> tuple[int, int]:
        """World size and rank; `UsageError` if some ranks had no sample, and would wait forever."""
        world_size, rank = self._ranks()
        if len(dataset) < world_size:
            raise UsageError(
                f"the training split has {len(dataset)} samples, too few for {world_size} "
                f"processes: train in fewer, as with --trainer.devices {max(1, len(dataset))}, or "
                "give more data."
            )
        return world_size, rank

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)

    def _loader(
        self, dataset: BatchedDataset, sampler: ResumableBatchSampler | EvalBatchSampler
    ) -> DataLoader:
        workers = 0 if getattr(dataset, "in_memory", True) else self.num_workers
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,  # type: ignore[arg-type]
            sampler=sampler,
            batch_size=None,  # the sampler yields whole batches
            num_workers=workers,
            worker_init_fn=outlive_signals if workers else None,
            persistent_workers=workers > 0,
            pin_memory=on_gpu,
            generator=Generator().manual_seed(self.seed),  # leaves the global generator alone
        )

    # Resuming.

    def state_dict(self) -> dict[str, Any]:
        """The `epoch` and `batch` that come next, and what decides which samples are in it."""
        if self.trainer is None or self.trainer.train_dataloader is None:  # not in `fit`
            return {}
        epoch, batch = training_position(self.trainer)
        if batch >= self.trainer.num_training_batches:
            epoch += 1
            batch = 0
        return {"epoch": epoch, "batch": batch, **self.batch_layout(self.trainer.world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Training continues there; validation and test ignore it."""
        self._resume_state = state_dict

    def batch_layout(self, world_size: int) -> dict[str, Any]:
        """What decides which samples are in a batch; a run that resumes must have the same.

        If epochs end the run, also how many batches a step and an epoch use: the schedule counts
        steps.
        """
        trainer = self.trainer
        layout: dict[str, Any] = {}
        if trainer is not None and (trainer.max_epochs or -1) > 0:
            layout["accumulate_grad_batches"] = trainer.accumulate_grad_batches
            layout["limit_train_batches"] = str(trainer.limit_train_batches)  # 1.0 is all, 1 one
        return {
            **layout,
            "batch_size": self.batch_size,
            "world_size": world_size,
            "samples": self._samples,
            "content": self.training_digest,
            "seed": self.seed,
            "balanced": self.balanced,
        }

    def _start(self, world_size: int) -> tuple[int, int]:
        """(epoch, batch) to start from, those of a loaded checkpoint once.

        Raises `UsageError` if it was written with other batches.
        """
        state = self._resume_state
        self._resume_state = None
        if not state:
            return (self.trainer.current_epoch if self.trainer else 0), 0
        titles = {
            "batch_size": "batch size",
            "world_size": "number of devices",
            "samples": "number of training samples",
        }
        for name, value in self.batch_layout(world_size).items():
            if value == state.get(name, value):
                continue
            if name == "content":
                raise UsageError(
                    "the training data are not those that the checkpoint was written with, though "
                    "they are as many: resume with those, or start a new run."
                )
            raise UsageError(
                f"the checkpoint was written with {titles.get(name, name)} {state[name]}, this run "
                f"has {value}: resume with the former, or start a new run."
            )
        return state["epoch"], state["batch"]
