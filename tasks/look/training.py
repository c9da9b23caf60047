"""`fit --look_every N`: what attention does over a training, as curves and as an animation."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn

from datamodules.utils.errors import DataError
from datamodules.utils.files import write_text
from modules.activations import attention_parts, recorded, stacks, weight_names
from modules.measures import entropy
from tasks.errors import UsageError
from tasks.lightning_patches import is_accumulating, logged_step
from tasks.look.figures import draw_lines, draw_tiles, save_figure
from tasks.look.page import render
from tasks.look.subjects import SUBJECTS, Subject, subject_of
from tasks.look.views import Curves, Heads, Sample
from tasks.tracking.csv_files import write_csv
from tasks.tracking.media import log_media, media_loggers
from tasks.tracking.report import format_count
from tasks.training.gradient_norms import unsharded
from tasks.training.precision import float32_by_default, total_norm

# A checkpoint holds what is kept.
MAX_TOKENS = 64  # queries and keys of a text
MAX_FRAME = 600_000  # weights of a step: 12 layers of 12 heads on 64 tokens
MAX_FRAMES = 8_000_000  # weights of all steps
MAX_POINTS = 2000  # of a curve


def look_callback(every: int, run_dir: Path, task: str) -> Callback:
    """The callback of `--look_every`, which writes into RUN_DIR/look; raises `UsageError`."""
    if every < 1:
        raise UsageError(f"--look_every {every} must be at least 1 step")
    if task not in SUBJECTS:
        known = ", ".join(SUBJECTS)
        raise UsageError(f"--look_every is for the tasks {known}, not '{task}': leave it out")
    return TrainingLook(every, run_dir / "look")


class TrainingLook(Callback):
    """Keeps entropy, distance and gradient norm by layer, and the attention of a fixed sample.

    The sample is the first of the validation split when the run began. Resumed runs continue the
    curves. Only the first process measures, unless weights are sharded.

    Args:
        every: Optimizer steps between measurements.
        folder: For the page and the curves; made when there is something to write.
    """

    def __init__(self, every: int, folder: Path) -> None:
        self.every = every
        self.folder = folder
        self.steps: list[int] = []
        self.curves: dict[str, list[float]] = {}  # by "entropy/layer 0", a value for each step
        self.frame_steps: list[int] = []
        self.frames: dict[str, list[Tensor]] = {}  # by title: 255 sqrt(weights), uint8 (L, H, N, M)
        self.batch: dict[str, Tensor] = {}
        self.written = 0  # step of the page

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "curves": self.curves,
            "frame_steps": self.frame_steps,
            "frames": self.frames,
            "batch": {name: value.cpu() for name, value in self.batch.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        self.curves = state_dict["curves"]
        self.frame_steps = state_dict["frame_steps"]
        self.frames = state_dict["frames"]
        self.batch = state_dict["batch"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the sample, without using random numbers of the training."""
        task: Any = pl_module
        if not self.batch:
            with torch.random.fork_rng(devices=[]):
                self.batch = first_sample(trainer.datamodule.dataset("val"))  # type: ignore[attr-defined]
        tensors = {name: x for name, x in self.batch.items() if isinstance(x, Tensor)}
        on_device = {name: value.to(task.device) for name, value in tensors.items()}
        self.subject = subject_of(task, on_device)
        self.batch = self.subject.batch
        self.attention_layers = self.subject.attention_layers()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if trainer.global_step % self.every or is_accumulating(trainer):
            return
        whole = getattr(trainer.strategy, "whole", None)
        if not (trainer.is_global_zero or whole):
            return
        with untimed(pl_module):
            values = self.gradients(trainer, pl_module.net)  # type: ignore[arg-type]
            with whole() if whole else nullcontext():
                weights = self.attention(trainer)
            values |= self.measures(weights)
            frames = {
                layers.title: small(one, self.subject)
                for layers, one in zip(self.attention_layers, weights, strict=True)
            }
            self.keep(trainer.global_step, values, frames)
            log(trainer, values, frames)

    def gradients(self, trainer: pl.Trainer, net: nn.Module) -> dict[str, float]:
        """Norms of the gradients of each block.

        They are clipped by now: the logged norm of all tells by how much.
        """
        clipped = unsharded(total_norm([p.grad for p in net.parameters() if p.grad is not None]))
        scale = trainer.callback_metrics["train/grad_norm"] / clipped.clamp(min=1e-30)
        values = {}
        for prefix, stack in stacks(net).items():
            for layer, block in enumerate(stack.blocks):
                gradients = [p.grad for p in block.parameters() if p.grad is not None]
                norm = unsharded(total_norm(gradients)) * scale if gradients else 0.0
                values[curve_name("gradient norm", prefix[:-1], layer)] = float(norm)
        return values

    @torch.no_grad()
    def attention(self, trainer: pl.Trainer) -> list[Tensor]:
        """The weights of each kind of attention, (L, H, N, M)."""
        net = self.subject.net
        every = [weight_names(net, layers.part) for layers in self.attention_layers]
        was_training = net.training
        net.eval()
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                trainer.precision_plugin.val_step_context(),
                float32_by_default(),
                recorded(net, *chain(*every)) as found,
            ):
                self.subject.run()
        finally:
            net.train(was_training)
        return [torch.cat([found[name] for name in names]).float().cpu() for names in every]

    def measures(self, weights: Sequence[Tensor]) -> dict[str, float]:
        """Entropy of all attention, and distance of self-attention, by layer."""
        values = {}
        for layers, one in zip(self.attention_layers, weights, strict=True):
            is_self = layers.part != "cross"
            part = layers.part if is_self else "cross-attention"
            measures = {"entropy": entropy(one).mean((-1, -2))}  # (L,)
            if is_self:
                measures["distance"] = self.subject.distance(one, layers).mean(-1)  # (L,)
            for measure, by_layer in measures.items():
                for layer, value in enumerate(by_layer.tolist()):
                    values[curve_name(measure, part, layer)] = value
        return values

    def keep(self, step: int, values: dict[str, float], frames: dict[str, Tensor]) -> None:
        """Adds a step to the curves and to the animation, and leaves out earlier ones."""
        self.steps.append(step)
        for name, value in values.items():
            self.curves.setdefault(name, []).append(value)
        self.frame_steps.append(step)
        for title, weights in frames.items():
            frame = weights.sqrt().mul(255).round().to(torch.uint8)
            self.frames.setdefault(title, []).append(frame)
        while sum(sum(map(Tensor.numel, some)) for some in self.frames.values()) > MAX_FRAMES:
            if len(self.frame_steps) < 3:
                break
            self.frame_steps = every_second(self.frame_steps)
            self.frames = {title: every_second(some) for title, some in self.frames.items()}
        if len(self.steps) > MAX_POINTS:
            self.steps = every_second(self.steps)
            self.curves = {name: every_second(line) for name, line in self.curves.items()}

    # What is written ------------------------------------------------------------------------------

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, pl_module)
        if trainer.is_global_zero and not self.steps:
            steps = format_count(trainer.global_step, "step")
            print(f"--look_every {self.every}: nothing to draw after {steps}")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.write(trainer, pl_module)

    def write(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the page and the curves, unless they are there."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self.steps or self.written == self.steps[-1]:
            return
        self.written = self.steps[-1]
        with untimed(pl_module):
            self.folder.mkdir(parents=True, exist_ok=True)
            curves = self.curve_views()
            sample = Sample("training", {"attention": [*self.head_views()], "curves": [*curves]})
            note = "the first validation sample; layers and heads count from 0"
            page = render(f"Tessera {self.subject.task.name}", note, [sample], {})
            write_text(self.folder / "look.html", page)
            write_csv(
                self.folder / "curves.csv",
                ["step", *self.curves],
                [self.steps, *([f"{y:.6g}" for y in line] for line in self.curves.values())],
            )
            for view in curves:
                save_figure(draw_lines(view), self.folder / view.title.replace(" ", "-"))

    def curve_views(self) -> list[Curves]:
        units = {
            "entropy": "nats, mean over heads and queries",
            "distance": f"{self.subject.unit}, mean over heads and queries",
            "gradient norm": "norm, before clipping",
        }
        views = []
        for measure, unit in units.items():
            lines = {
                name.removeprefix(f"{measure}/"): line
                for name, line in self.curves.items()
                if name.startswith(f"{measure}/")
            }
            if lines:  # a Swin whose stages are all too large has gradients only
                title = f"{measure} by layer"
                views.append(Curves(title, self.steps, {**lines}, "optimizer step", unit))
        return views

    def head_views(self) -> list[Heads]:
        """The attention of the sample over the steps."""
        steps = [f"step {step}" for step in self.frame_steps]
        views = []
        net = self.subject.net
        for layers in self.attention_layers:
            weights = torch.stack(self.frames[layers.title]).float().div(255).square()
            title = f"{layers.title} over the training"
            prefix, _ = attention_parts(net)[layers.part]
            config = stacks(net)[prefix].config
            if weights.shape[2] < config.heads:
                title += ", mean over heads"
            if weights.shape[1] < config.depth:
                title += " and layers"
            views.append(self.subject.heads(title, weights, layers, steps))
        return views


def log(trainer: pl.Trainer, values: dict[str, float], frames: dict[str, Tensor]) -> None:
    """Gives values and pictures of a step to the loggers."""
    loggers = media_loggers(trainer)
    for logger in loggers:
        names = {f"look/{name}".replace(" ", "_"): value for name, value in values.items()}
        logger.log_metrics(names, logged_step(trainer))
    if loggers:
        pictures = {title.replace(" ", "_"): draw_tiles(one) for title, one in frames.items()}
        log_media(trainer, {f"look/{title}": picture for title, picture in pictures.items()})


def curve_name(measure: str, part: str, layer: int) -> str:
    """Such as "entropy/encoder layer 0"."""
    return f"{measure}/{f'{part} layer {layer}'.strip()}"


def first_sample(split: Any) -> dict[str, Any]:
    """The first sample of a split that can be read, as a batch."""
    for index in range(len(split)):
        with suppress(DataError):  # as of a damaged image
            return split[[index]]
    raise UsageError("--look_every needs a validation sample that can be read: leave it out")


@contextmanager
def untimed(task: Any) -> Iterator[None]:
    """Does not count the time as training time."""
    start = time.perf_counter()
    yield
    task.untimed_seconds += time.perf_counter() - start


def small(weights: Tensor, subject: Subject) -> Tensor:
    """The part that is kept: the first tokens of a text; if it is large, means over heads, layers.

    (L, H, N, M) -> (L or 1, H or 1, N or MAX_TOKENS, M or MAX_TOKENS).
    """
    if "image" not in subject.batch:
        weights = weights[..., :MAX_TOKENS, :MAX_TOKENS]
    for axis in (1, 0):
        if weights.numel() > MAX_FRAME:
            weights = weights.mean(axis, keepdim=True)
    return weights


def every_second(values: list[Any]) -> list[Any]:
    """Every second value but the last, and the last."""
    return values[:-1:2] + values[-1:]
