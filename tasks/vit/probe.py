"""`python -m tasks.vit probe`: linear probe and k-nearest neighbours on frozen features."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from datamodules.images import ImageData
from datamodules.utils.progress import progress_bar
from modules.models.images import ImageNet, build_image_net
from modules.pretrained.weights import CLASSIFIERS, load_weights
from tasks.checkpoints.reading import run_of_checkpoint
from tasks.errors import UsageError
from tasks.inference import DeviceName, on_device
from tasks.options import Options, merge_options, names_data
from tasks.probing.classifiers import Labelled, Probed, probe
from tasks.probing.record import write_record
from tasks.tracking.csv_files import write_csv
from tasks.tracking.report import format_count
from tasks.tracking.run_folder import make_folder
from tasks.vit.architectures import find_described
from tasks.vit.frozen import batches, image_data
from tasks.vit.pretrained_base import Pretrained

SPLITS = ("train", "val", "test")
SETTINGS = ("l2", "k", "temperature")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What to probe. The images are those of the network's training, or those of `--data.*`.

    Args:
        ckpt_path: Run folder or checkpoint of `fit`, or what its `--model.pretrained` takes:
            `timm/<model name>`, `hf/<model>`, or a folder or file of weights.
        k: Nearest training images that vote on the class of an image.
        temperature: A vote has the weight exp(cosine similarity / temperature).
        device: Where to compute the features; auto: on a GPU if there is one.
        output: Folder for probe.json and probe.csv; null: the run folder, if there is one.
    """

    ckpt_path: str
    k: int = 20
    temperature: float = 0.07
    device: DeviceName = "auto"
    output: str | None = None


def probe_images(options: ProbeOptions, data: Options) -> None:
    """Classify frozen features by logistic regression and by k-nearest neighbours."""
    if options.k < 1:
        raise UsageError(f"--k {options.k} must be at least 1")
    if not options.temperature > 0:
        raise UsageError(f"--temperature {options.temperature} must be above 0")
    model = find_described(options.ckpt_path, "--ckpt_path")
    if names_data(data):  # rather than those of a training with other targets
        single = {"dataset": {"problem_type": "single_label_classification"}}
        data = merge_options(single, data)
    images = image_data(model.named, model.image_metadata(), model.data, data)
    images.setup("fit")
    metadata = images.metadata()
    if metadata["problem_type"] != "single_label_classification":
        raise UsageError(
            f"--ckpt_path {options.ckpt_path}: the data are for {metadata['problem_type']}, and "
            "probe needs images with one class each: name others with --data.path"
        )
    folder = output_folder(options)
    net = on_device(frozen_network(model), options.device)
    sizes = {split: len(images.dataset(split)) for split in SPLITS}
    with progress_bar("features", sum(sizes.values()), least=2000) as advance:
        train, val, test = (extract(net, images, split, advance) for split in SPLITS)
    found = probe(train, val, test, metadata["num_classes"], options.k, options.temperature)
    counts = f"{sizes['train']:,} training, {sizes['val']:,} validation, {sizes['test']:,} test"
    same = " (the validation images)" * (not images.source.has("test"))
    width = train.features.shape[1]
    print(f"{images.origin}: {counts} images{same}, {format_count(width, 'feature')} each")
    print_table(found)
    if folder is not None:
        about = {
            "model": options.ckpt_path,
            "data": images.origin,
            "samples": sizes,
            "k": options.k,
            "temperature": options.temperature,
        }
        write(found, folder, about)


def frozen_network(model: Pretrained) -> ImageNet:
    """Returns the network with its weights, in evaluation mode; it need not have a classifier."""
    config = model.config()
    config = replace(config, num_classes=config.num_classes or 1)
    weights = model.weights(config)
    with model.errors():
        net = build_image_net(config)
        load_weights(net, weights, (*CLASSIFIERS, "head.norm."))  # behind the features
    return net.eval()


@torch.no_grad()
def extract(
    net: ImageNet, data: ImageData, split: str, advance: Callable[[int], object]
) -> Labelled:
    """Returns the vectors that the classifier reads of all images of a split."""
    device = next(net.parameters()).device
    features = []
    labels = []
    for pixels, targets in batches(data, split):
        features.append(net.features(pixels.to(device)).float())
        labels.append(targets.to(device))
        advance(len(targets))
    return Labelled(torch.cat(features), torch.cat(labels))


def output_folder(options: ProbeOptions) -> Path | None:
    """Returns the folder of --output, made if need be, or that of the run; None: neither."""
    if options.output is not None:
        make_folder(Path(options.output), "--output")
        return Path(options.output)
    return run_of_checkpoint(options.ckpt_path)


def print_table(found: list[Probed]) -> None:
    """Prints accuracies, a line for each classifier."""
    titles = {"linear": "linear probe", "knn": "k-nearest neighbours"}
    print(f"\n{'classifier':<22}{'settings':<28}{'validation':>12}{'test':>10}\n{'-' * 72}")
    for one in found:
        settings = ", ".join(f"{name} {value:g}" for name, value in one.settings.items())
        print(f"{titles[one.classifier]:<22}{settings:<28}{one.val:>12.4f}{one.test:>10.4f}")


def write(found: list[Probed], folder: Path, about: Options) -> None:
    """Writes probe.json and probe.csv; says what other probe they replace."""
    note = write_record(folder, about, [one._asdict() for one in found])
    columns = [[one.settings.get(name) for one in found] for name in SETTINGS]
    write_csv(
        folder / "probe.csv",
        ["classifier", *SETTINGS, "val", "test"],
        [
            [one.classifier for one in found],
            *columns,
            [one.val for one in found],
            [one.test for one in found],
        ],
    )
    print(f"\nwritten: {folder}/probe.json, probe.csv{note}")
