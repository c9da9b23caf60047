"""What all tasks share: building, training steps, evaluation and checkpoints."""

import math
import os
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from typing_extensions import Self

from datamodules.base import ResumableDataModule
from datamodules.utils.batching import EvalBatchSampler
from tasks.checkpoints.reading import KEY, VERSION, Checkpoint, net_weights, read_checkpoint
from tasks.checkpoints.weights import load_checkpoint_weights
from tasks.errors import UsageError, missing_entries, usage_errors
from tasks.options import accepted_options, build_from_options, merge_options
from tasks.tracking.media import Picture, Table
from tasks.training import optim
from tasks.training.averaging import EMA
from tasks.training.evaluation import update_metric
from tasks.training.gradient_norms import logged_norms
from tasks.training.loss_check import LossCheck, check_weights
from tasks.training.loss_weighting import LossWeighting
from tasks.training.precision import float32_by_default, sum_in_float32, total_norm
from tasks.training.seeds import position_seed, run_seed
from tasks.training.trainer_options import epoch_batches

Batch = dict[str, Any]


class StepOutput(NamedTuple):
    """The loss and the outputs of a batch.

    Args:
        loss: Mean over the targets, ().
        num_targets: Number of targets.
        outputs: Predictions, for metrics and callbacks.
        targets: For the metrics.
        extra_metrics: Other means over the targets to log in training, by name, () each.
    """

    loss: Tensor
    num_targets: Tensor | int
    outputs: Any
    targets: Any
    extra_metrics: Mapping[str, Tensor] = {}


class Task(pl.LightningModule):
    """A network, its loss and its optimizer; subclasses build the network and define a step.

    The network is built in `configure_model`, from the metadata of the data (class names, channels,
    normalisation) in a new run, and from those of the checkpoint otherwise.

    Args:
        optimizer: Optimizer, learning-rate schedule and gradient clipping.
        ema: Decay of a moving average of the weights; such as 0.999 per optimizer step; the average
            is evaluated and saved; null: none.
        compile: Compile the network with torch.compile, in place.
    """

    name: str  # of the task, as in `python -m tasks.NAME`
    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    monitor_mode: str = "min"
    needed_metadata: Sequence[str] = ()  # of the data, besides those of base classes
    pretrained: str | None = None  # where `build` takes weights from
    refused_commands: Collection[str] = ()  # that its network cannot be used with
    # The network, with a `config`: a dataclass of primitives in which nothing is left open. None
    # until it is built; tasks with an option `net` keep that as `net_config` until then.
    net: Any
    metrics: Any  # nn.ModuleDict: "val" and "test", "val_loss" and "test_loss"

    def __init__(
        self,
        optimizer: optim.OptimConfig = optim.OptimConfig(),
        ema: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema {ema} must lie between 0 and 1, as in 0.999")
        self.optimizer_config = optimizer
        self.ema = ema
        self.compile_net = compile
        self.net = None
        self.metadata: dict[str, Any] = {}  # of the data; with a plain loader, set it before `fit`
        self.given_options: dict[str, Any] = {}  # of the command line, kept in checkpoints
        self.restored: Checkpoint | None = None  # until the network has its weights
        self.untimed_seconds = 0.0  # spent on samples and the like, not on training
        self.metrics = nn.ModuleDict()
        self.loss_weighting = LossWeighting()
        self.loss_check = LossCheck()

    # Every task defines `name` and these ----------------------------------------------------------

    @abstractmethod
    def build(self, metadata: Mapping[str, Any]) -> nn.Module:
        """Builds the network for these metadata; its `config` is a dataclass of primitives."""

    @abstractmethod
    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns the loss of one batch, and the inputs of the metrics."""

    @abstractmethod
    def make_metrics(self) -> dict[str, Metric]:
        """Returns the metrics of evaluation by short names, such as {"acc": ...}."""

    # A task may override these --------------------------------------------------------------------

    @classmethod
    def for_network(cls, net: Mapping[str, Any]) -> type[Self]:
        """Returns the class of the task for a network with these options."""
        return cls

    @staticmethod
    def check_options(
        options: Any, on_command_line: Collection[str], given: Collection[str]
    ) -> None:
        """Refuses options of a run that contradict each other.

        `given` are names of those on the command line or in config files, such as "--data.path".
        """

    def train_metrics(self) -> list[str]:
        """Returns the names of what training logs, without `train/`."""
        return ["loss", "grad_norm", "lr", "samples_per_s"]

    def modules_to_compile(self) -> list[nn.Module]:
        """Returns the parts of the network that a step calls, to be compiled in place."""
        return [self.net]

    def log_step(self, means: Mapping[str, Tensor]) -> None:
        """Logs an optimizer step's means over all its targets, as `train/loss`."""
        # A bar copies the value to the CPU at each step, and so waits for a GPU.
        has_bar = self.trainer.progress_bar_callback is not None
        self.log("train/loss", means["loss"], prog_bar=has_bar)

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Returns metrics computed from other metrics, such as perplexity from the loss."""
        return {}

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Returns metrics computed from samples/s over all devices, such as tokens/s."""
        return {}

    def describe_targets(self, room: int) -> str:
        """Returns the end of the first line on the data, as ", 2 classes", in `room` columns."""
        return ""

    def notes(self) -> dict[str, str]:
        """Returns notes on the metrics of an evaluation, such as how a score was computed."""
        return {}

    def reset_media(self) -> None:
        """Forgets what `collect_media` has kept of the last evaluation."""

    def collect_media(self, batch: Batch, outputs: Any) -> None:
        """Keeps what `media` and `save_results` need of an evaluated batch, if they are called."""

    def media(self, split: str) -> dict[str, Table | Picture]:
        """Returns tables and pictures of an evaluation by name; `split` is "val" or "test"."""
        return {}

    def save_files(self, folder: Path) -> None:
        """Writes files into a new run folder, such as the tokenizer."""

    def save_results(self, folder: Path, split: str) -> None:
        """Writes the results of evaluating a split, "val" or "test", into a folder."""

    def closing_texts(self, folder: Path) -> dict[str, str]:
        """Returns texts to print at the end of the run, by name, such as a sample."""
        return {}

    @staticmethod
    def num_samples(batch: Batch) -> int:
        """Returns the number of samples in a batch."""
        return len(next(iter(batch.values())))

    # Building -------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | os.PathLike, map_location: Any = "cpu", **options: Any
    ) -> Self:
        """Builds the task of a checkpoint that `fit` wrote, with its options and weights.

        Before a Trainer uses it with other data, call `datamodule.set_metadata(task.metadata)`.

        Args:
            checkpoint_path: The checkpoint, or a run folder.
            map_location: Device of the weights.
            options: Of the task, instead of the saved ones, such as `optimizer={"lr": 1e-4}`.

        Raises `UsageError` if it is missing or an option is wrong; `RunError` if it is damaged.
        """
        checkpoint = read_checkpoint(checkpoint_path, cls.name)
        cls = cls.for_network(checkpoint[KEY]["net"])
        config = checkpoint[KEY]["config"]
        own = accepted_options(cls, net=checkpoint[KEY]["net"], compile=False)
        saved = merge_options(config["model"], own)
        if options.pop("compile", False):
            raise UsageError("compile is an option of `fit`: call task.net.compile()")
        task = build_from_options(cls, saved, options)
        task.given_options = {"model": merge_options(saved, options), "data": config["data"]}
        task.restore(checkpoint)
        with torch.random.fork_rng(devices=[]):  # initial weights, which are replaced
            task.configure_model()
        return task.to(map_location)

    def setup(self, stage: str) -> None:
        """Refuses data whose classes, tokenizer or normalisation are not those of the weights."""
        if self.metadata and self.datamodule is not None and stage != "predict":
            different = [
                name
                for name, value in self.datamodule.metadata().items()
                if self.metadata.get(name, value) != value
            ]
            if different:
                raise UsageError(
                    f"the data differ from those of the weights in {', '.join(different)}: call "
                    "datamodule.set_metadata(task.metadata) before the Trainer runs"
                )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes metadata and weights from a checkpoint when the network is built."""
        self.restored = checkpoint
        self.metadata = checkpoint[KEY]["metadata"]
        self.pretrained = None

    @float32_by_default()
    def configure_model(self) -> None:
        if self.net is not None:
            return
        if not self.metadata and self.datamodule is not None:
            self.metadata = self.datamodule.metadata()
        torch.manual_seed(run_seed())  # initial weights follow from the seed alone
        with usage_errors(), missing_entries(self.metadata, type(self)):
            self.net = self.build(self.metadata)
            optim.freeze(self.net, self.optimizer_config.freeze)
        if self.restored is not None:
            load_checkpoint_weights(self.net, net_weights(self.restored), self.restored[KEY]["net"])
            self.restored = None  # frees its memory
        if self.compile_net and self.trainer.state.fn == "fit":
            for part in self.modules_to_compile():
                part.compile()
        for split in ("val", "test"):
            with missing_entries(self.metadata):
                metrics: Any = self.make_metrics()
            # Compute groups would merge metrics whose states are equal after the first batch.
            collection = MetricCollection(metrics, prefix=f"{split}/", compute_groups=False)
            self.metrics[split] = collection
            self.metrics[f"{split}_loss"] = MeanMetric()

    @property
    def datamodule(self) -> Any:
        """The Trainer's `ResumableDataModule`; None if it has other loaders."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        return data if isinstance(data, ResumableDataModule) else None

    def configure_callbacks(self) -> list[pl.Callback]:
        return [] if self.ema is None else [EMA(self.ema)]

    def configure_optimizers(self) -> Any:
        return optim.build(self.net, self.optimizer_config, self.total_steps())

    def total_steps(self) -> float:
        """Returns the optimizer steps of the whole run; infinity if it has no end.

        Lightning's property would build our loader before it is known where the run resumes.
        """
        trainer = self.trainer
        if self.datamodule is None:
            return trainer.estimated_stepping_batches
        batches = epoch_batches(trainer, self.datamodule.train_batches())
        ends = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs and trainer.max_epochs > 0:
            ends.append(math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs)
        return min(ends, default=math.inf)

    def logged_metrics(self) -> list[str]:
        """Returns the names of all metrics that training and validation log."""
        names = ["loss"]
        for key, metric in self.metrics["val"].items(keep_base=True):
            names += getattr(metric, "names", (key,))
        # `derived` computes with values that do not matter here: only its names are needed.
        values = {f"val/{name}": torch.ones(()) for name in names}
        groups = [group for one in self.trainer.optimizers for group in one.param_groups]
        training = {f"train/{name}" for name in self.train_metrics()}
        if len({group["initial_lr"] for group in groups}) > 1:
            training |= {f"train/lr_{group['name']}" for group in groups}
        return sorted({*values, *self.derived(values, "val"), *training})

    # Training -------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        optim.refuse_clipping(self.trainer)
        sum_in_float32(self.trainer.strategy.model)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seeds this step from the run's seed and the position in training."""
        if self.optimizer_config.freeze:
            optim.freeze_statistics(self.net)  # `train` may have been called since the last step
        seed = position_seed(run_seed(), self.current_epoch, batch_idx, self.global_rank)
        torch.manual_seed(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss (scalar) of one micro-batch, weighted if a step has several."""
        with float32_by_default():
            output = self.step(batch, training=True)
        return self.loss_weighting.add(
            self.trainer, output.loss, output.num_targets, output.extra_metrics
        )

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        """Weights and clips the gradients of an optimizer step; logs its loss and their norm.

        Lightning calls it once an optimizer step, when all micro-batches and ranks have added their
        gradients. Before that, neither the loss of the step nor the norm is known.
        """
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        means = self.loss_weighting.finish(self.trainer, gradients)
        self.loss_check.add(means["loss"], self.global_step + 1)
        self.log_step(means)
        norm = total_norm(gradients)
        self.log_dict(logged_norms(self.net, norm, self.optimizer_config.layer_grad_norms))
        if limit := self.optimizer_config.gradient_clip:
            nn.utils.clip_grads_with_norm_(self.net.parameters(), limit, norm)
        # The rate is filled in on the GPU: a copy of a float would wait for it.
        lr = max(group["lr"] for group in optimizer.param_groups)
        self.log("train/lr", means["loss"].new_full((), lr))

    # Evaluation -----------------------------------------------------------------------------------

    @property
    def split(self) -> str:
        """What is evaluated now, "val" or "test"."""
        return "test" if self.trainer.testing else "val"

    def on_validation_epoch_start(self) -> None:
        # In float64, the rounding of sums hardly depends on the number of ranks.
        self.metrics.to(torch.float32 if self.device.type == "mps" else torch.float64)
        self.metrics[self.split].reset()
        self.metrics[f"{self.split}_loss"].reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        """Updates the metrics and returns the step's outputs."""
        loader: Any = getattr(self.trainer, f"{self.split}_dataloaders")
        sampler = getattr(loader, "sampler", None)
        # False: a repeated batch, so that all ranks have equally many.
        is_counted = not isinstance(sampler, EvalBatchSampler) or sampler.is_counted(batch_idx)
        with float32_by_default():
            output = self.step(batch, training=False)
            loss = self.metrics[f"{self.split}_loss"]
            update_metric(loss, (output.loss, output.num_targets), is_counted)
            found = (output.outputs, output.targets)
            for metric in self.metrics[self.split].values():
                update_metric(metric, found, is_counted, index=batch.get("index"))
        return output.outputs

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics, reduced over ranks, as `val/` or `test/`."""
        values = self.metrics[self.split].compute()
        values[f"{self.split}/loss"] = self.metrics[f"{self.split}_loss"].compute()
        values = {name: value.float() for name, value in values.items() if value.ndim == 0}
        values |= self.derived(values, self.split)
        self.log_dict(values, prog_bar=self.split == "val")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    # Checkpoints ----------------------------------------------------------------------------------

    def resolved_options(self) -> dict[str, Any]:
        """Returns `given_options` with the sizes found in the data filled in; primitives only."""
        net = asdict(self.net.config)
        return merge_options(self.given_options, {"model": accepted_options(type(self), net=net)})

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds our entry to the checkpoint; refuses to save NaN or infinity."""
        self.loss_check.check()
        check_weights(self.net, self.global_step)
        # Lightning may count an epoch that has not ended; a plain Trainer has its loops only.
        checkpoint["epoch"] = getattr(self.trainer.fit_loop, "completed", checkpoint["epoch"])
        options = self.resolved_options()
        checkpoint[KEY] = {
            "task": self.name,
            "version": VERSION,
            "metadata": self.metadata,
            "net": asdict(self.net.config),
            "config": {name: options.get(name, {}) for name in ("model", "data")},
        }
