"""`python -m tasks.vit compare`: size, speed and accuracy of several models, side by side."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from datamodules.images import ImageData
from datamodules.utils.files import may_hold, write_text
from tasks.errors import DataError, UsageError
from tasks.inference import DeviceName, on_device
from tasks.lab.tables import markdown
from tasks.options import Options
from tasks.problems import PROBLEMS
from tasks.profiling.timing import in_turns, seconds
from tasks.tracking.csv_files import write_csv
from tasks.tracking.report import digits, format_count
from tasks.tracking.run_folder import make_folder
from tasks.vit.architectures import with_weights
from tasks.vit.frozen import batches, image_data
from tasks.vit.other_classifiers import find_other
from tasks.vit.pretrained import find_model

OPTION = "compare"  # in messages, where other commands have the name of an option


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How to compare. The images are those of the first run, or those of `--data.*`.

    Args:
        batch_size: Images in each batch whose time is measured.
        repetitions: Times that the speed of each model is measured; the median is printed.
        device: Where to compute; auto: on a GPU if there is one.
        output: Folder for compare.md and compare.csv; null: none.
    """

    batch_size: int = 64
    repetitions: int = 5
    device: DeviceName = "auto"
    output: str | None = None


@dataclass
class Compared:
    """A model, and what was found.

    Args:
        name: As on the command line.
        net: In evaluation mode.
        metadata: As in a checkpoint.
        data: Options `--data` of its training; {}: not known.
        flops: Of the forward pass for one image, as PyTorch counts.
        images_per_s: Median.
        score: On the test images; None: the model has other classes.
    """

    name: str
    net: Any
    metadata: Options
    data: Options
    flops: int = 0
    images_per_s: float = 0.0
    score: float | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        size = self.metadata["image_size"]
        return self.metadata["channels"], size, size

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.net.parameters())


def compare(options: CompareOptions, models: list[str], data: Options) -> None:
    """Print parameters, FLOP, images/s and accuracy of several models.
    The MODELs come before all options. Each is a run folder, a checkpoint, `timm/<model>`,
    `hf/<model>`, or a folder or a .safetensors file of such weights. As baselines, also any
    classifier of timm, by name or in a folder, and `torchvision/<model>`, such as resnet50.
    """
    for name in ("batch_size", "repetitions"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} must be at least 1")
    if not models:
        raise UsageError(
            "compare needs models: name run folders, checkpoints or timm/<model name> before all "
            "options"
        )
    found = [load(name, options.device) for name in dict.fromkeys(models)]
    if options.output is not None:  # before anything is measured
        make_folder(Path(options.output), "--output")
    metric, tested = evaluate(found, data)
    for one in found:
        one.flops = counted_flops(one)
    measure_speed(found, options.batch_size, options.repetitions)
    print(f"tested with {tested}; images/s in batches of {options.batch_size}\n")
    print(table(found, metric), end="")
    if options.output is not None:
        write(found, metric, Path(options.output))


def load(name: str, device: DeviceName) -> Compared:
    """Loads a model of ours, or with our networks; else one of timm or torchvision."""
    try:
        net, metadata = with_weights(name, OPTION)
        data = find_model(name, OPTION).data
    except UsageError:
        other = find_other(name, OPTION)
        if other is None:
            raise
        return Compared(name, on_device(other.net.eval(), device), other.metadata, {})
    return Compared(name, on_device(net.eval(), device), metadata, data)


def counted_flops(model: Compared) -> int:
    """FLOP of the forward pass for one image, counted on the meta device."""
    image = torch.zeros(1, *model.shape, device="meta")  # (1, C, H, W)
    net = copy.deepcopy(model.net).to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(image)
    return counter.get_total_flops()


# Accuracy -----------------------------------------------------------------------------------------


def evaluate(models: Sequence[Compared], given: Options) -> tuple[str, str]:
    """Measures the score of each model on the same test images.

    The data are those of the first model that was trained here, unless options name others. Says
    of which models the classes are not theirs.

    Returns:
        The name of the score, and a description of the test images.
    """
    saved: Options = next((one.data for one in models if one.data), {})
    path = given.get("path", saved.get("path"))
    digests = {one.metadata.get("training_digest", 0) for one in models}
    problem = ""
    tested = "no images"
    for one in models:
        images = image_data(f"{OPTION} {one.name}", one.metadata, saved, given)
        trained = [other.data.get("path") for other in models if other.data]
        images.source.unseen = not any(may_hold(path, other) for other in trained)
        images.other_digests = digests
        problem = images.options.problem_type
        try:
            images.set_metadata(one.metadata)
            images.setup("test")
            images.check_held_out("test")
        except (UsageError, DataError) as error:
            print(f"{one.name} is not tested: {error}")
        else:
            one.score = score(one, images)
            tested = f"{format_count(len(images.dataset('test')), 'image')} of {images.origin}"
    return PROBLEMS[problem].monitor.removeprefix("val/"), tested


@torch.no_grad()
def score(model: Compared, data: ImageData) -> float:
    """Returns the metric of a model on all test images."""
    problem = PROBLEMS[model.metadata["problem_type"]](model.metadata)
    metric = problem.metrics()[problem.monitor.removeprefix("val/")]
    device = next(model.net.parameters()).device
    for pixels, labels in batches(data, "test"):
        predictions = problem.predictions(model.net(pixels.to(device)).float()).cpu()
        metric.update(predictions, problem.metric_targets(labels))
    return float(metric.compute())


# Speed --------------------------------------------------------------------------------------------


def measure_speed(models: Sequence[Compared], batch_size: int, repetitions: int) -> None:
    """Measures images/s of inference of all models in turns."""
    calls = [timed(one, batch_size) for one in models]
    for one, times in zip(models, in_turns(calls, repetitions), strict=True):
        one.images_per_s = batch_size / median(times)


def timed(model: Compared, batch_size: int) -> Callable[[], float]:
    """Returns a function that measures the seconds of inference on a batch."""
    device = next(model.net.parameters()).device
    images = torch.zeros(batch_size, *model.shape, device=device)  # (B, C, H, W)

    @torch.inference_mode()
    def step() -> None:
        model.net(images)

    return lambda: seconds(step, device.type)


# Tables -------------------------------------------------------------------------------------------


def table(models: Sequence[Compared], metric: str) -> str:
    """Returns a table in Markdown."""
    rows = [
        [
            one.name,
            one.metadata["image_size"],
            f"{digits(one.parameters / 1e6)} M",
            digits(one.flops / 1e9),
            f"{one.images_per_s:,.0f}" if one.images_per_s >= 1000 else f"{one.images_per_s:.4g}",
            "-" if one.score is None else f"{one.score:.4f}",
        ]
        for one in models
    ]
    header = ["model", "pixels", "parameters", "GFLOP an image", "images/s", f"test/{metric}"]
    return markdown(header, rows)


def write(models: Sequence[Compared], metric: str, folder: Path) -> None:
    """Writes compare.md and compare.csv."""
    write_text(folder / "compare.md", table(models, metric))
    columns: dict[str, list[Any]] = {
        "model": [one.name for one in models],
        "image_size": [one.metadata["image_size"] for one in models],
        "parameters": [one.parameters for one in models],
        "flop_forward": [one.flops for one in models],
        "images_per_s": [one.images_per_s for one in models],
        f"test/{metric}": [one.score for one in models],
    }
    write_csv(folder / "compare.csv", [*columns], [*columns.values()])
    print(f"\nwritten: {folder}/compare.md, compare.csv")
