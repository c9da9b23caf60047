"""What all tasks share: building, training steps, evaluation and checkpoints."""

import math
import os
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from typing_extensions import Self

from tasks.checkpoints.reading import KEY, VERSION, Checkpoint, net_weights, read_checkpoint
from tasks.checkpoints.weights import load_checkpoint_weights
from tasks.errors import RunError, UsageError, usage_errors
from tasks.options import build_from_options, merged
from tasks.tracking.media import Picture, Table
from tasks.training import optim
from tasks.training.averaging import EMA
from tasks.training.evaluation import update_metric
from tasks.training.loss_weighting import LossWeighting
from tasks.training.precision import float32_by_default, sum_in_float32, total_norm
from tasks.training.seeds import position_seed, run_seed

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
        ema: Decay of an exponential moving average (EMA) of the weights per optimizer step, such as
            0.999, which is evaluated and saved; null: none.
        compile: Compile the network with torch.compile, in place.
    """

    name: str  # of the task, as in `python -m tasks.NAME`
    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    monitor_mode: str = "min"
    train_metrics: tuple[str, ...] = ("loss", "grad_norm", "lr", "samples_per_s")
    pretrained: str | None = None  # where `build` takes weights from
    net: Any  # nn.Module with a `config`, a dataclass of primitives; None until built
    metrics: Any  # nn.ModuleDict: "val" and "test", "val_loss" and "test_loss"
    first_bad_step: Tensor

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
        self.metadata: dict[str, Any] = {}
        self.run_config: dict[str, Any] = {}  # the command line's options, kept in checkpoints
        self.restored: Checkpoint | None = None  # until the network has its weights
        self.untimed_seconds = 0.0  # spent on samples and the like, not on training
        self.metrics = nn.ModuleDict()
        self.loss_weighting = LossWeighting()
        self.register_buffer("first_bad_step", torch.tensor(-1), persistent=False)

    # Every task defines these three ---------------------------------------------------------------

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

    @staticmethod
    def check_options(
        options: Any, on_command_line: Collection[str], given: Collection[str]
    ) -> None:
        """Refuses options that contradict each other.

        Args:
            options: All options of the run.
            on_command_line: Names of those on the command line, such as "--data.path".
            given: The same, and names of those in config files.
        """

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

        Before a Trainer uses it with other data than before, give these its metadata (class names,
        tokenizer, normalisation): `datamodule.set_metadata(task.metadata)`.

        Args:
            checkpoint_path: The checkpoint, or a run folder.
            map_location: Device of the weights.
            options: Of the task, instead of the saved ones, as the command line has them:
                `optimizer={"lr": 1e-4}`. Not `compile`: call `task.net.compile()`.

        Raises `UsageError` if it is missing, of another task, or an option is wrong; `RunError` if
        it is damaged.
        """
        checkpoint = read_checkpoint(checkpoint_path, cls.name)
        config = checkpoint[KEY]["config"]
        saved = merged(config["model"], {"net": checkpoint[KEY]["net"], "compile": False})
        if options.pop("compile", False):
            raise UsageError("compile is an option of `fit`: call task.net.compile()")
        task = build_from_options(cls, saved, options)
        task.run_config = {"model": merged(saved, options), "data": config["data"]}
        task.restore(checkpoint)
        with torch.random.fork_rng(devices=[]):  # initial weights, which are replaced
            task.configure_model()
        return task.to(map_location)

    def setup(self, stage: str) -> None:
        """Refuses data whose classes, tokenizer or normalisation are not those of the weights."""
        if self.metadata and stage != "predict":
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
        self.metadata = self.metadata or self.datamodule.metadata()
        torch.manual_seed(run_seed())  # initial weights follow from the seed alone
        with usage_errors():
            self.net = self.build(self.metadata)
            optim.freeze(self.net, self.optimizer_config.freeze)
        if self.restored is not None:
            load_checkpoint_weights(self.net, net_weights(self.restored), self.restored[KEY]["net"])
            self.restored = None  # frees its memory
        if self.compile_net and self.trainer.state.fn == "fit":
            for part in self.modules_to_compile():
                part.compile()
        for split in ("val", "test"):
            metrics: Any = self.make_metrics()
            # Compute groups would merge metrics whose states are equal after the first batch.
            collection = MetricCollection(metrics, prefix=f"{split}/", compute_groups=False)
            self.metrics[split] = collection
            self.metrics[f"{split}_loss"] = MeanMetric()

    @property
    def datamodule(self) -> Any:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_callbacks(self) -> list[pl.Callback]:
        return [] if self.ema is None else [EMA(self.ema)]

    def configure_optimizers(self) -> Any:
        return optim.build(self.net, self.optimizer_config, self.total_steps())

    def total_steps(self) -> float:
        """Returns the optimizer steps of the whole run; infinity if it has no end.

        Lightning's property would build the loader before it is known where the run resumes.
        """
        trainer = self.trainer
        batches = self.datamodule.train_batches()
        limit = trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        ends = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs and trainer.max_epochs > 0:
            ends.append(math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs)
        return min(ends, default=math.inf)

    def logged_metrics(self) -> list[str]:
        """Returns the names of all metrics that training and validation log."""
        names = ["loss"]
        for key, metric in self.metrics["val"].items(keep_base=True):
            names += getattr(metric, "names", (key,))
        values = {f"val/{name}": torch.ones(()) for name in names}  # only the names matter
        groups = [
            group for optimizer in self.trainer.optimizers for group in optimizer.param_groups
        ]
        training = {f"train/{name}" for name in self.train_metrics}
        if len({group["initial_lr"] for group in groups}) > 1:
            training |= {f"train/lr_{group['name']}" for group in groups}
        return sorted({*values, *self.derived(values, "val"), *training})

    # Training -------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        sum_in_float32(self.trainer.strategy.model)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seeds this step from the run's seed and the position in training."""
        torch.manual_seed(
            position_seed(run_seed(), self.current_epoch, batch_idx, self.global_rank)
        )

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
        """Weights and clips the gradients of an optimizer step; logs the norm before clipping."""
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        means = self.loss_weighting.finish(self.trainer, gradients)
        self._record_bad_loss(means["loss"])
        self.log_step(means)
        norm = total_norm(gradients)
        if limit := self.optimizer_config.gradient_clip:
            nn.utils.clip_grads_with_norm_(self.net.parameters(), limit, norm)
        if hasattr(norm, "full_tensor"):  # a DTensor, if the weights are sharded
            norm = norm.full_tensor()
        self.log("train/grad_norm", norm)
        # The rate is filled in on the GPU: a copy of a float would wait for it.
        lr = max(group["lr"] for group in optimizer.param_groups)
        self.log("train/lr", means["loss"].new_full((), lr))

    def _record_bad_loss(self, loss: Tensor) -> None:
        """Records the first step whose loss is not finite; a GPU is asked every 50 steps only."""
        bad = ~torch.isfinite(loss.detach()) & (self.first_bad_step < 0)
        self.first_bad_step.masked_fill_(bad, self.global_step)
        if loss.device.type == "cpu" or self.global_step % 50 == 0:
            self.check_loss()

    def check_loss(self) -> None:
        """Raises `RunError` if the loss became NaN or infinite, with the step."""
        step = int(self.first_bad_step)
        if step >= 0:
            raise RunError(
                f"the loss became NaN or infinite at step {step} (epoch {self.current_epoch}): "
                "try a lower --model.optimizer.lr or gradient_clip; checkpoints before it are "
                "kept"
            )

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
        # False: a repeated batch, so that all ranks have equally many.
        is_counted = loader.sampler.is_counted(batch_idx)
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

    def resolved_config(self) -> dict[str, Any]:
        """Returns the run's options with the sizes found in the data filled in; primitives only."""
        return merged(self.run_config, {"model": {"net": asdict(self.net.config)}})

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds our entry to the checkpoint; refuses to save NaN or infinity."""
        self.check_loss()
        if not all(torch.isfinite(parameter).all() for parameter in self.net.parameters()):
            raise RunError(
                f"the weights became NaN or infinite by step {self.global_step}: try a lower "
                "--model.optimizer.lr; checkpoints before it are kept"
            )
        # Lightning may count an epoch that has not ended; a plain Trainer has its loops only.
        checkpoint["epoch"] = getattr(self.trainer.fit_loop, "completed", checkpoint["epoch"])
        config = self.resolved_config()
        checkpoint[KEY] = {
            "task": self.name,
            "version": VERSION,
            "metadata": self.metadata,
            "net": asdict(self.net.config),
            "config": {name: config.get(name, {}) for name in ("model", "data")},
        }
