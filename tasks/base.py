"""What every task shares: building, stepping, logging and what its checkpoints hold."""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from tasks import __version__
from tasks.checkpoints.reading import KEY, Checkpoint, net_weights
from tasks.checkpoints.weights import load_weights
from tasks.cli.parsing import merged
from tasks.errors import RunError, usage_errors
from tasks.training import optim
from tasks.training.evaluation import count
from tasks.training.loss_weighting import LossWeighting
from tasks.training.precision import float32_by_default, sum_in_float32, total_norm
from tasks.training.seeds import position_seed, run_seed

Batch = dict[str, Any]


class Task(pl.LightningModule):
    """A network, its loss and its optimizer; subclasses say how to build the network and what one step is.

    The network is built in `configure_model`, after the data are known: from the data's facts (class names, channels,
    normalisation) in a new run, from the checkpoint's in any other.

    Args:
        optimizer: optimizer, schedule and clipping.
        ema: decay of the running average of weights, per optimizer step (0.999); None for none.
        compile: compile the network with `torch.compile`, in place, so that checkpoint keys keep their names.
    """

    name: str  # of the task, as in `python -m tasks.NAME`
    monitor: str = "val/loss"  # decides which checkpoint is best
    monitor_mode: str = "min"
    train_names: tuple[str, ...] = (
        "loss",
        "grad_norm",
        "lr",
        "samples_per_s",
    )  # logged as train/loss
    net: Any  # nn.Module with a `config`, a dataclass of primitives; None until built
    metrics: Any  # nn.ModuleDict: "val" and "test", "val_loss" and "test_loss"
    first_bad_step: Tensor

    def __init__(
        self, optimizer: optim.OptimConfig, ema: float | None = None, compile: bool = False
    ) -> None:
        super().__init__()
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema {ema} must lie between 0 and 1, as in 0.999")
        self.optimizer_config, self.ema, self.compile_net = optimizer, ema, compile
        self.net = None
        self.facts: dict[str, Any] = {}
        self.run_config: dict[str, Any] = {}  # the command line's options, kept in checkpoints
        self.restored: Checkpoint | None = None
        self.untimed_seconds = (
            0.0  # seconds that training stood still, for samples or the like; rates leave them out
        )
        self.metrics, self.loss_weighting = nn.ModuleDict(), LossWeighting()
        self.register_buffer("first_bad_step", torch.tensor(-1), persistent=False)

    # What a task is -------------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, facts: Mapping[str, Any]) -> nn.Module:
        """The network for data with these facts; its `config` is a dataclass of primitives."""

    @abstractmethod
    def step(self, batch: Batch, training: bool) -> tuple[Tensor, Any, Any]:
        """Loss (scalar), outputs and targets of one batch, as the metrics want them."""

    @abstractmethod
    def make_metrics(self) -> dict[str, Metric]:
        """The evaluation metrics by their short names, such as {"acc": ...}."""

    @staticmethod
    def check_options(options: Any, typed: Collection[str], named: Collection[str]) -> None:
        """Refuse options that cannot go together: `typed` are on the command line, `named` there or in a config."""

    # Building -------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take facts and weights from a checkpoint when the network is built."""
        self.restored, self.facts = checkpoint, checkpoint[KEY]["facts"]

    def compiled(self) -> list[nn.Module]:
        """Parts of the network that a step calls, which `--compile` compiles in place."""
        return [self.net]

    @float32_by_default()
    def configure_model(self) -> None:
        """Build the network, once the data are set up."""
        if self.net is not None:
            return
        self.facts = self.facts or self.datamodule.facts()
        torch.manual_seed(run_seed())  # initial weights follow from the seed alone
        with usage_errors():
            self.net = self.build(self.facts)
            optim.freeze(self.net, self.optimizer_config.freeze)
        if self.restored is not None:
            load_weights(self.net, net_weights(self.restored), self.restored[KEY]["net"])
            self.restored = None  # frees its memory
        if self.compile_net and self.trainer.state.fn == "fit":
            for part in self.compiled():
                part.compile()
        for split in ("val", "test"):
            found = MetricCollection(
                dict(self.make_metrics()), prefix=f"{split}/", compute_groups=False
            )
            self.metrics[split] = found  # without groups, which means that begin alike would share
            self.metrics[f"{split}_loss"] = MeanMetric()

    @property
    def datamodule(self) -> Any:
        """The data of this run."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_callbacks(self) -> list[pl.Callback]:
        """The running average of weights, where asked for."""
        if self.ema is None:
            return []
        from tasks.training.ema import EMA

        return [EMA(self.ema)]

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule, counted in optimizer steps."""
        return optim.build(self.net, self.optimizer_config, self.total_steps())

    def total_steps(self) -> float:
        """Optimizer steps of the whole run, from the data's size alone; infinite where the run has no end."""
        trainer = self.trainer
        batches, limit = self.datamodule.train_batches(), trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        ends = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs and trainer.max_epochs > 0:
            ends.append(-(-batches // trainer.accumulate_grad_batches) * trainer.max_epochs)
        return min(ends, default=math.inf)

    def logged(self) -> list[str]:
        """Names of all that training and its validations log, which callbacks may monitor."""
        metrics = self.metrics["val"].items(keep_base=True)
        names = [
            "loss",
            *(name for key, metric in metrics for name in getattr(metric, "names", (key,))),
        ]
        values = {f"val/{name}": torch.ones(()) for name in names}
        rates = {
            group["name"]: group["initial_lr"]
            for one in self.trainer.optimizers
            for group in one.param_groups
        }
        trained = [
            *self.train_names,
            *(f"lr_{name}" for name in rates if len(set(rates.values())) > 1),
        ]
        return sorted(
            {*values, *self.derived(values, "val"), *(f"train/{name}" for name in trained)}
        )

    # Training -------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Let gradients lose no digits between processes."""
        sum_in_float32(self.trainer.strategy.model)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Let every random draw of this step follow from the seed and the position in training."""
        torch.manual_seed(
            position_seed(run_seed(), self.current_epoch, batch_idx, self.global_rank)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss (scalar) of one micro-batch, weighted where a step has several."""
        with float32_by_default():
            loss, outputs, targets = self.step(batch, training=True)
        return self.loss_weighting.add(
            self.trainer, loss, self.weight(targets), self.training_figures(outputs)
        )

    def training_figures(self, outputs: Any) -> Mapping[str, Tensor]:
        """What else to take means of in training, by name, given a step's outputs."""
        return {}

    def log_step(self, means: Mapping[str, Tensor]) -> None:
        """Log an optimizer step's means over all its targets: `train/loss`."""
        self.log("train/loss", means["loss"], prog_bar=True)

    @staticmethod
    def samples(batch: Batch) -> int:
        """Number of samples in a batch."""
        return len(next(iter(batch.values())))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Finish the gradients of a step, clip them to the total norm asked for, and log the norm before it."""
        parameters = [p for p in self.net.parameters() if p.grad is not None]
        means = self.loss_weighting.finish(
            self.trainer, [p.grad for p in parameters if p.grad is not None]
        )
        self._watch(means["loss"])
        self.log_step(means)
        limit = (
            self.optimizer_config.gradient_clip if gradient_clip_val is None else gradient_clip_val
        )
        if limit and gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(parameters, limit)
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        if limit and gradient_clip_algorithm != "value":
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self.log(
            "train/grad_norm", getattr(norm, "full_tensor", lambda: norm)()
        )  # of gradients in parts: over all
        self.log("train/lr", max(group["lr"] for group in optimizer.param_groups))

    def _watch(self, loss: Tensor) -> None:
        """Remember the first step whose loss is not a number, looking only now and then where looking stalls."""
        bad = ~torch.isfinite(loss.detach()) & (self.first_bad_step < 0)
        self.first_bad_step.masked_fill_(bad, self.global_step)
        if loss.device.type == "cpu" or self.global_step % 50 == 0:
            self.check_finite()

    def check_finite(self) -> None:
        """Stop a run whose loss became NaN or infinite.

        Raises:
            RunError: names the step, and the checkpoint that is still good.
        """
        if (step := int(self.first_bad_step)) >= 0:
            raise RunError(
                f"the loss became NaN or infinite at step {step} (epoch {self.current_epoch}): try a lower "
                "--model.optimizer.lr or --model.optimizer.gradient_clip; checkpoints before it are kept"
            )

    # Evaluation -----------------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Batch, split: str, batch_idx: int) -> Any:
        loader: Any = getattr(self.trainer, f"{split}_dataloaders")
        with float32_by_default():
            loss, outputs, targets = self.step(batch, training=False)
            counts = loader.sampler.counts(batch_idx)
            count(self.metrics[f"{split}_loss"], (loss, self.weight(targets)), counts)
            for metric in self.metrics[split].values():
                count(metric, (outputs, targets), counts)
        return outputs

    @staticmethod
    def weight(targets: Any) -> Any:
        """How many targets a batch's loss is the mean of."""
        return len(targets)

    def _log_evaluation(self, split: str) -> None:
        values = self.metrics[split].compute() | {
            f"{split}/loss": self.metrics[f"{split}_loss"].compute()
        }
        values = {name: value.float() for name, value in values.items() if value.ndim == 0}
        self.log_dict(values | self.derived(values, split), prog_bar=split == "val")

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Metrics that follow from others once those are reduced over all samples, such as perplexity."""
        return {}

    def _start_evaluation(self, split: str) -> None:
        exact = (
            torch.float32 if self.device.type == "mps" else torch.float64
        )  # sums then do not depend on their order
        self.metrics.to(exact)
        self.metrics[split].reset()
        self.metrics[f"{split}_loss"].reset()

    def on_validation_epoch_start(self) -> None:
        """Start the `val/` metrics afresh."""
        self._start_evaluation("val")

    def on_test_epoch_start(self) -> None:
        """Start the `test/` metrics afresh."""
        self._start_evaluation("test")

    def on_validation_epoch_end(self) -> None:
        """Log the `val/` metrics, reduced over ranks."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log the `test/` metrics, reduced over ranks."""
        self._log_evaluation("test")

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        """Update the `val/` metrics; the step's outputs."""
        return self._evaluate(batch, "val", batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> Any:
        """Update the `test/` metrics; the step's outputs."""
        return self._evaluate(batch, "test", batch_idx)

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Figures that follow from samples/s over all devices, by the names they are logged under."""
        return {}

    def notes(self) -> dict[str, str]:
        """What to say beside the figures of an evaluation by name, such as how a score was computed."""
        return {}

    def draw_results(self, folder: Path) -> None:
        """Draw into the run folder what the test found, such as a confusion matrix."""

    def closing_texts(self, folder: Path) -> dict[str, str]:
        """Texts to end the run with, by name, such as a generated one; files of them go into the run folder."""
        return {}

    def keep_files(self, folder: Path) -> None:
        """Write into the run folder, at its start, what other programs may want, such as a tokenizer."""

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def resolved(self) -> dict[str, Any]:
        """The run's options with the network filled in, primitives only; tasks add what the data decided."""
        return merged(self.run_config, {"model": {"net": asdict(self.net.config)}})

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make the checkpoint self-contained; never write one that holds or met what is not a number."""
        self.check_finite()
        if not all(torch.isfinite(parameter).all() for parameter in self.net.parameters()):
            raise RunError(
                f"the weights became NaN or infinite by step {self.global_step} (epoch {self.current_epoch}): try a "
                "lower --model.optimizer.lr; checkpoints before it are kept"
            )
        checkpoint["epoch"] = self.trainer.fit_loop.completed  # type: ignore[attr-defined]  # as the loops have it
        config = self.resolved()
        checkpoint[KEY] = {
            "task": self.name,
            "version": __version__,
            "facts": self.facts,
            "net": asdict(self.net.config),
            "config": {name: config.get(name, {}) for name in ("model", "data")},
        }
