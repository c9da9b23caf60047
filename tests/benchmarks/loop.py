"""What the Lightning loop costs around a training step: `python -m tests.benchmarks.loop [--rounds 5]`.

The model of `vit_step` on random images: a bare loop (same batches, step and clipping) against the command `fit`, with
its rich progress bar on a terminal, best and last checkpoint, record of the run and CSV logger; in turns, in one
process. Ratio of the medians; what `fit` does once in an epoch, saving two checkpoints, is told beside it.
"""

import argparse
import os
import pty
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from tests.benchmarks._compare import Result, table

if TYPE_CHECKING:
    from datamodules.images import ImageData

BATCH, STEPS = 64, 12  # in each round


def fill(data: "ImageData") -> None:
    """As many random images as a round takes, and one batch to validate, in place of the digits."""
    import torch

    from datamodules.images import MemoryImages

    for split, size in (("train", BATCH * STEPS), ("val", BATCH)):
        pixels = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8)
        data._datasets[split] = MemoryImages(pixels, torch.randint(0, 10, (size,)))
    names = [str(i) for i in range(10)]
    data._metadata = {
        "class_names": names,
        "channels": 3,
        "image_size": 32,
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
    }


def bare() -> float:
    """Images/s of a loop that does the steps and nothing else."""
    import torch

    from datamodules.images import ImageData
    from modules.models.vit import VIT_PRESETS
    from tasks.training import optim
    from tasks.vit.task import ViTTask

    data, task = ImageData(batch_size=BATCH), ViTTask(net=VIT_PRESETS["cifar_tiny"])
    fill(data)
    task.metadata, task.net = data.metadata(), task.build(data.metadata())
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
    """Standard output is a terminal that another process reads, as it is at a desk."""
    ours, theirs = pty.openpty()
    os.environ["TERM"] = "xterm-256color"
    reader = subprocess.Popen(
        ["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(ours)
    with open(theirs, "w") as screen, redirect_stdout(screen):
        yield
    reader.wait()  # it ends with the terminal


def command() -> Callable[[], tuple[float, float]]:
    """A function that runs `fit` up to the end of training: images/s, and seconds that saving the checkpoints took."""
    import pytorch_lightning as pl

    from tasks.cli.lightning_cli import TaskCLI
    from tasks.vit.__main__ import APP

    class Clock(pl.Callback):
        """From the end of the first step to the end of the last; after the validation only checkpoints follow."""

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

        def fit(self, model: Any, datamodule: Any, **_: Any) -> None:
            fill(datamodule)
            self.trainer.fit(model, datamodule=datamodule)
            self.saving = time.perf_counter() - self.clock.validated
            assert any(
                isinstance(bar, pl.callbacks.RichProgressBar) for bar in self.trainer.callbacks
            )
            assert {path.name for path in self.folder.rglob("*.ckpt")} == {"best.ckpt", "last.ckpt"}

    def run() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder, terminal():
            line = f"--preset cifar_tiny --data.source digits --data.batch_size {BATCH} --trainer.max_epochs 1"
            done = TimedFit(
                APP,
                "fit",
                [*line.split(), "--trainer.accelerator", "cpu", "--run_dir", f"{folder}/run"],
            )
        return (STEPS - 1) * BATCH / done.clock.seconds, done.saving

    return run


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help=f"rounds of {STEPS} steps each, after one that does not count",
    )
    rounds = parser.parse_args().rounds
    from tasks.cli.lazy_imports import import_lightning
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    import_lightning()
    import torch

    torch.set_num_threads(2)
    fit, results, saving = command(), {"bare loop": Result(), "fit": Result()}, []
    for number in range(rounds + 1):
        alone = bare()
        rate, seconds = fit()
        if number:
            results["bare loop"].rates.append(alone)
            results["fit"].rates.append(rate)
            saving.append(seconds)
    print(table(results, "images/s", "bare loop"))
    medians = [result.median for result in results.values()]
    print(f"the Lightning loop costs {medians[0] / medians[1] - 1:.1%} (goal: at most 5 %)")
    print(
        f"beside it, once in an epoch: both checkpoints saved in {statistics.median(saving):.2f} s"
    )


if __name__ == "__main__":
    main()
