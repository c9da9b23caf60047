"""What an optimizer step costs, and whether a command line can run at all."""

import math
import shlex
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from typing import Any

from tasks.errors import RunError, UnknownLength, UsageError

BATCHES = 32  # whose tokens are counted: texts vary in length
COMPUTED_BATCHES = 4  # of them, whose FLOPs are counted


@dataclass(frozen=True)
class StepCost:
    """The cost of an optimizer step, and what else building the network has told.

    Args:
        tokens: Of all processes; mean over the first batches, with padding; of pairs both sides, of
            images patches or pixels.
        flops: Mean, forward and backward, as `torch.utils.flop_counter` counts.
        parameters: Of the network.
        metrics: Names of what training and validation log.
        monitor: The one of them whose best value is kept.
        has_timer: Whether `trainer.max_time` limits the run.
    """

    tokens: float
    flops: float
    parameters: int
    metrics: list[str]
    monitor: str
    has_timer: bool


def check_fit(task: str, arguments: list[str], where: str) -> StepCost:
    """The cost of a step of `fit`; raises `UsageError`, which says where, if it cannot run."""
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself shows them
            return step_cost(task, arguments)
    except UnknownLength as error:
        raise UsageError(
            f"{where}: minutes say nothing about the number of steps, which the schedule or its "
            "warmup needs: add model.optimizer.schedule: constant and model.optimizer.warmup: 10, "
            "in steps, to the options, or give budget.steps"
        ) from error
    except (UsageError, RunError) as error:
        raise UsageError(f"{where}: {error}") from error
    except SystemExit as stop:  # of an option such as --help
        raise UsageError(f"{where}: {shlex.join(arguments)} is no training") from stop


def check_names(task: str, arguments: list[str], where: str, has_files: bool = True) -> None:
    """Refuses options that do not exist, or whose values are of another type.

    Without `has_files`, those of other files are not looked at: they may be missing.
    """
    from tasks.cli.lazy_imports import import_lightning

    import_lightning()
    from tasks.cli.app import app
    from tasks.cli.lightning_cli import TaskCLI

    class Parsed(TaskCLI):
        """Parses the options, and builds nothing."""

        def before_instantiate_classes(self) -> None:
            if has_files:
                super().before_instantiate_classes()

        def instantiate_classes(self) -> None:
            """Does nothing."""

    try:
        Parsed(app(task), "fit", list(arguments))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def step_cost(task: str, arguments: list[str]) -> StepCost:
    """Builds the network of a `fit`, and counts what its first batches cost."""
    from tasks.cli.lazy_imports import import_lightning

    import_lightning()
    from pytorch_lightning.callbacks import Timer

    from tasks.cli.app import app
    from tasks.cli.lightning_cli import TaskCLI

    cli: Any = TaskCLI(app(task), "fit", list(arguments))
    data, model, trainer = cli.datamodule, cli.model, cli.trainer
    trainer.datamodule = data
    data.trainer = model.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    model.configure_model()
    model.configure_optimizers()  # refuses a schedule that needs to know its end
    model.train()
    loader = iter(data.train_dataloader())
    batches = [next(loader)]
    if "image" not in batches[0]:  # all images have the same size
        batches += islice(loader, BATCHES - 1)
    tokens = [tokens_of(batch, model.net) for batch in batches]
    computed = [data.on_before_batch_transfer(one, 0) for one in batches[:COMPUTED_BATCHES]]
    flops_per_token = sum(flops_of(model, batch) for batch in computed) / sum(
        tokens[: len(computed)]
    )
    processes = trainer.num_devices * trainer.num_nodes
    step_tokens = sum(tokens) / len(tokens) * trainer.accumulate_grad_batches * processes
    return StepCost(
        tokens=step_tokens,
        flops=step_tokens * flops_per_token,
        parameters=sum(parameter.numel() for parameter in model.net.parameters()),
        metrics=model.logged_metrics(),
        monitor=model.monitor,
        has_timer=any(isinstance(one, Timer) for one in trainer.callbacks),
    )


def tokens_of(batch: Mapping[str, Any], net: Any) -> int:
    """Positions of a batch that the network computes: token ids, or pixels or patches of images."""
    from modules.models.gpt import DecoderConfig

    if "image" in batch:
        config = net.config
        is_decoder = isinstance(config, DecoderConfig)  # of pixels
        count = config.max_length if is_decoder else math.prod(config.grid)
        return len(batch["image"]) * count
    return sum(batch[name].numel() for name in ("source", "tokens") if name in batch)


def flops_of(model: Any, batch: Mapping[str, Any]) -> int:
    """FLOPs of a training step on a batch, forward and backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from modules.kernels.cpu import HAS_ONEDNN

    def linear_flops(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(2 * math.prod(a) * b[0])  # (M, K), (N, K)

    unknown_to_torch = {torch.ops.mkldnn._linear_pointwise: linear_flops} if HAS_ONEDNN else {}
    counter = FlopCounterMode(display=False, custom_mapping=unknown_to_torch)
    with sdpa_kernel(SDPBackend.MATH), counter:  # other kernels of a CPU are not counted
        model.step(batch, training=True).loss.backward()
    return int(counter.get_total_flops())
