"""Your own block in a Vision Transformer, compared with a block of the library.

    python -m configs.examples.vary_a_block

The block is a feed-forward layer. "GLU Variants Improve Transformer" (Shazeer 2020) replaces
W2 activation(W1 x) by W2 (activation(W1 x) * V x), where * multiplies elements. The paper finds
that this also works well without an activation: the "bilinear" layer, W2 (W1 x * V x). Does it
work on 8 x 8 digits?

The accuracies are higher than that of `python -m tasks.vit fit --trainer.max_epochs 5`, 0.66 with
the same network: that command shifts the training images at random (`--model.augment.crop_padding
1`), which needs more epochs. This script does not; with `--model.augment.crop_padding 0` the
command reaches 0.93.
"""

import logging
import math
import statistics
import time
import warnings
from dataclasses import replace

import pytorch_lightning as pl
from torch import nn

from datamodules.images import ImageData
from modules.feedforward import FEEDFORWARDS, FeedForward
from modules.models.vit import VIT_PRESETS
from tasks.training.optim import OptimConfig
from tasks.vit.task import ViTTask

EPOCHS = 5
SEEDS = (0, 1)
TEST_DIGITS = 359


class Bilinear(FeedForward):
    """W2 (W1 x * V x): (B, N, E) -> (B, N, F) -> (B, N, E) (Shazeer 2020, equation 6).

    Three matrices of 2/3 of the hidden width F have as many parameters as two of the whole width.
    """

    def __init__(self, width: int, hidden: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__(width, 2 * hidden // 3, bias, dropout, activation=nn.Identity, gated=True)


# From now on, `feedforward="bilinear"` works in the config of every model: ViT, BERT, language
# models, translation. With TESSERA_TRUST=configs.examples.vary_a_block, commands import this module
# and take `--model.net.stack.feedforward bilinear`, too.
FEEDFORWARDS["bilinear"] = Bilinear


def train(feedforward: str, seed: int) -> float:
    """Trains the network of the preset "digits" with this feed-forward layer, and prints a row.

    Returns the accuracy on the test digits.
    """
    start = time.perf_counter()
    pl.seed_everything(seed)  # the same initial weights where shapes agree, and the same batches
    config = VIT_PRESETS["digits"]
    stack = replace(config.stack, feedforward=feedforward)
    task = ViTTask(replace(config, stack=stack), optimizer=OptimConfig(lr=3e-3))
    data = ImageData("digits")
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    (metrics,) = trainer.test(task, data, verbose=False)
    parameters = sum(parameter.numel() for parameter in task.net.parameters())
    accuracy = metrics["test/acc"]
    seconds = time.perf_counter() - start
    row = f"{feedforward:<14}{seed:>4}{parameters:>12,}{accuracy:>10.4f}"
    print(f"{row}{metrics['test/loss']:>8.3f}{seconds:>9.1f}", flush=True)
    return accuracy


def main() -> None:
    warnings.filterwarnings("ignore")  # Lightning's advice about workers and loggers
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    print(f"{EPOCHS} epochs in each row")
    print("feed-forward  seed  parameters  accuracy    loss  seconds", flush=True)
    gelu = statistics.mean(train("gelu", seed) for seed in SEEDS)
    bilinear = statistics.mean(train("bilinear", seed) for seed in SEEDS)
    print(answer(gelu, bilinear))


def answer(gelu: float, bilinear: float) -> str:
    """What two accuracies on the test digits say about the question above."""
    difference = bilinear - gelu
    # The variance of a fraction p of n samples is p (1 - p) / n, and variances of both add up.
    p = (gelu + bilinear) / 2
    error = math.sqrt(2 * p * (1 - p) / TEST_DIGITS)
    verdict = "Yes, as well as gelu"
    if abs(difference) > 2 * error:
        verdict = "Yes, better than gelu" if difference > 0 else "No, worse than gelu"
    return (
        f"{verdict}: the mean accuracies differ by {difference:+.4f}, and twice the standard error "
        f"of that is {2 * error:.4f}."
    )


if __name__ == "__main__":
    main()
