"""What the Lightning loop costs around a training step.

    python -m tests.benchmarks.loop [--rounds 5]

The model of `vit_step` on random images: a bare loop (same batches, step and clipping) against the
command `fit` with its rich progress bar on a terminal, best and last checkpoint, record of the run
and CSV logger; in turns, in one process. What `fit` does once in an epoch, saving two checkpoints,
is printed below.
"""

import os
import pty
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from tests.benchmarks import _compare

if TYPE_CHECKING:
    from datamodules.images import ImageData

BATCH = 64
STEPS = 12  # in each round
LINE = (
    f"--preset cifar_tiny --data.source digits --data.batch_size {BATCH} --trainer.max_epochs 1"
    " --trainer.accelerator cpu --run_dir"
)


def fill(data: "ImageData") -> None:
    """Replaces the digits by as many random images as a round takes, and one validation batch."""
    import torch

    from datamodules.images import MemoryImages
    from tasks.problems import external_targets

    for split, size in (("train", BATCH * STEPS), ("val", BATCH)):
        pixels = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8)
        data._datasets[split] = MemoryImages(pixels, torch.randint(0, 10, (size,)))
    names = [str(number) for number in range(10)]
    statistics = {"mean": [0.5] * 3, "std": [0.25] * 3}
    targets = {"class_names": names, **external_targets("single_label_classification")}
    data._metadata = {**targets, "channels": 3, "image_size": 32, **statistics}


def bare() -> float:
    """Images/s of a loop that does the steps and nothing else."""
    import torch

    from datamodules.images import ImageData
    from modules.models.vit import VIT_PRESETS
    from tasks.training import optim
    from tasks.vit.task import ViTTask

    data = ImageData(batch_size=BATCH)
    fill(data)
    task = ViTTask(net=VIT_PRESETS["cifar_tiny"])
    task.metadata = data.metadata()
    task.net = task.build(task.metadata)
    built = optim.build(task.net, task.optimizer_config, STEPS)
    for number, batch in enumerate(data.train_dataloader()):
        loss = task.step(batch, training=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.net.parameters(), 1.0)
        built["optimizer"].step()
        built["optimizer"].zero_grad()
        built["lr_scheduler"]["scheduler"].step()
        if number == 0:
            start = time.perf_counter()
    return (STEPS - 1) * BATCH / (time.perf_counter() - start)


@contextmanager
def terminal() -> Iterator[None]:
    """Makes standard output a terminal that another process reads."""
    ours, theirs = pty.openpty()
    os.environ["TERM"] = "xterm-256color"
    nothing = subprocess.DEVNULL
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=nothing, stderr=nothing)
    os.close(ours)
    with open(theirs, "w") as screen, redirect_stdout(screen):
        yield
    reader.wait()  # it ends with the terminal


def command() -> Callable[[], tuple[float, float]]:
    """A function that runs `fit`: images/s, and seconds that saving the checkpoints took."""
    import pytorch_lightning as pl

    from tasks.cli.lightning_cli import TaskCLI
    from tasks.vit.__main__ import APP

    class Clock(pl.Callback):
        """Seconds from the first step's end to the last one's, and when validation ended."""

        start = seconds = validated = 0.0

        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            self.start = self.start or time.perf_counter()
            self.seconds = time.perf_counter() - self.start

        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.validated = time.perf_counter()

    class TimedFit(TaskCLI):
        def fit_callbacks(self) -> list[pl.Callback]:
            self.clock = Clock()
            return [*super().fit_callbacks(), self.clock]

    def run() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder, terminal():
            cli = TimedFit(APP, "fit", [*LINE.split(), f"{folder}/run"])
            fill(cli.datamodule)
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
            saving = time.perf_counter() - cli.clock.validated
            bars = [type(callback).__name__ for callback in cli.trainer.callbacks]
            assert "Bar" in bars
            assert {path.name for path in cli.folder.rglob("*.ckpt")} == {"best.ckpt", "last.ckpt"}
        return (STEPS - 1) * BATCH / cli.clock.seconds, saving

    return run


def main() -> None:
    """Prints the table."""
    options = _compare.arguments(__doc__, 5).parse_args()
    from tasks.cli.lazy_imports import import_lightning
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    import_lightning()
    import torch

    torch.set_num_threads(2)
    fit = command()
    results = {"bare loop": _compare.Result(), "fit": _compare.Result()}
    saving = []
    for number in range(options.rounds + 1):
        alone = bare()
        rate, seconds = fit()
        if number or not options.rounds:
            results["bare loop"].rounds.append({"rate": alone})
            results["fit"].rounds.append({"rate": rate})
            saving.append(seconds)
    print(_compare.table(results, "images/s"))
    cost = results["bare loop"].median / results["fit"].median - 1
    print(f"the Lightning loop costs {cost:.1%} (goal: at most 5 %)")
    print(f"in addition, once in an epoch: two checkpoints in {statistics.median(saving):.2f} s")


if __name__ == "__main__":
    main()
