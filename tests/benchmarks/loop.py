"""What the Lightning loop costs around a training step: `python -m tests.benchmarks.loop [--rounds 5]`.

The model of `vit_step` on random images: a bare loop (same batches, step and clipping) against `Trainer.fit` with the
logger, callbacks and progress lines of the command line; in turns, in one process. Ratio of the medians.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.benchmarks._compare import Result, table

BATCH, STEPS = 64, 12  # in each round


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"rounds of {STEPS} steps each, after one that does not count"
    )
    rounds = parser.parse_args().rounds
    from tasks.imports import import_lightning
    from tasks.runtime import tune_allocator

    tune_allocator()
    import_lightning()
    import pytorch_lightning as pl
    import torch

    from datamodules.images import ImageData, MemoryImages
    from modules.vit import VIT_PRESETS
    from tasks import optim
    from tasks.callbacks.progress import ProgressLines
    from tasks.callbacks.record import RunRecord
    from tasks.run_folder import MetricsCSV
    from tasks.vit.task import ViTTask

    torch.set_num_threads(2)

    class RandomImages(ImageData):
        """As many random images as a round takes."""

        def setup(self, stage: str) -> None:
            labels = torch.randint(0, 10, (BATCH * STEPS,))
            pixels = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8)
            self._datasets = {split: MemoryImages(pixels, labels) for split in ("train", "val")}
            names = [str(i) for i in range(10)]
            self._facts = {"class_names": names, "channels": 3, "image_size": 32, "mean": [0.5] * 3, "std": [0.25] * 3}

    class Clock(pl.Callback):
        """Seconds from the end of the first step to the end of the last."""

        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step == 1:
                self.start = time.perf_counter()
            self.seconds = time.perf_counter() - getattr(self, "start", 0.0)

    def with_lightning() -> float:
        with tempfile.TemporaryDirectory() as folder:
            clock = Clock()
            callbacks = [ProgressLines(), RunRecord(Path(folder), {"model": {}}), clock]
            trainer = pl.Trainer(
                max_epochs=1,
                logger=MetricsCSV(Path(folder)),
                callbacks=callbacks,
                log_every_n_steps=10,
                limit_val_batches=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(ViTTask(net=VIT_PRESETS["cifar_tiny"]), datamodule=RandomImages(batch_size=BATCH))
        return (STEPS - 1) * BATCH / clock.seconds

    def bare() -> float:
        data = RandomImages(batch_size=BATCH)
        data.setup("fit")
        task = ViTTask(net=VIT_PRESETS["cifar_tiny"])
        task.facts, task.net = data.facts(), task.build(data.facts())
        built = optim.build(task.net, task.optimizer_config, STEPS)
        for number, batch in enumerate(data.train_dataloader()):
            loss, _, _ = task.step(batch, training=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(task.net.parameters(), 1.0)
            built["optimizer"].step()
            built["optimizer"].zero_grad()
            built["lr_scheduler"]["scheduler"].step()
            if number == 0:
                start = time.perf_counter()
        return (STEPS - 1) * BATCH / (time.perf_counter() - start)

    results = {"bare loop": Result(), "Lightning": Result()}
    for number in range(rounds + 1):
        for name, run in (("bare loop", bare), ("Lightning", with_lightning)):
            rate = run()
            if number:
                results[name].rates.append(rate)
    print(table(results, "images/s", "bare loop"))
    medians = [statistics.median(result.rates) for result in results.values()]
    print(f"the Lightning loop costs {medians[0] / medians[1] - 1:.1%} (goal: at most 5 %)")


if __name__ == "__main__":
    main()
