"""`python -m tasks.igpt probe`: how well the features of each layer tell classes apart."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datamodules.pixels import PixelData
from datamodules.utils.batching import epoch_permutation
from datamodules.utils.files import replacing
from datamodules.utils.progress import progress_bar
from modules.activations import recorded
from modules.models.gpt import Decoder
from tasks.checkpoints.exporting import made_parents
from tasks.checkpoints.reading import KEY, best_checkpoint, read_checkpoint
from tasks.errors import UsageError
from tasks.igpt.architectures import PixelModel, from_checkpoint
from tasks.inference import DeviceName, on_device
from tasks.options import Options, build_from_options, merge_options, names_data
from tasks.probing.classifiers import STRENGTHS, Labelled, accuracy, fit_linear
from tasks.probing.record import write_record
from tasks.tracking.csv_files import write_csv
from tasks.tracking.report import write_png

BATCH = 64  # images at a time
SPLITS = ("train", "val", "test")


class LayerAccuracy(NamedTuple):
    """Accuracies of the linear probe of a layer; layer 0 is the embedding.

    Args:
        layer: Blocks before it.
        l2: Strength of the probe's L2, that of the lowest `val_loss`.
        val_loss: Cross-entropy of the validation images. It decides, because their accuracy tells
            little if they are few.
        val: Accuracy on the validation images.
        test: Accuracy on the test images.
    """

    layer: int
    l2: float
    val_loss: float
    val: float
    test: float


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What to probe. The images are those of the network's training, or those of `--data.*`.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, or its run folder.
        limit: Largest number of training images, chosen at random.
        device: Where to compute the features; auto: on a GPU if there is one.
        output: Folder for probe.json, probe.csv and probe.png; null: beside the folder of the
            checkpoint.
    """

    ckpt_path: str
    limit: int = 10_000
    device: DeviceName = "auto"
    output: str | None = None


def probe(options: ProbeOptions, data: Options) -> None:
    """Classify images by logistic regression on the features of each layer (Chen 2020, 2.4)."""
    if options.limit < 1:
        raise UsageError(f"--limit {options.limit} must be at least 1")
    checkpoint = read_checkpoint(options.ckpt_path, "igpt")
    model = from_checkpoint(checkpoint)
    saved = merge_options(checkpoint[KEY]["config"]["data"], {"palette": None})
    is_named = names_data(data)
    if is_named:
        other = {"path": None, "source": None, "dataset": {"class_names": None}}
        saved = merge_options(saved, {**other, "label_fraction": 1.0})
    images = build_from_options(PixelData, saved, data, "--data.")
    images.source.recorded_by = None if is_named else options.ckpt_path
    images.set_metadata({**model.metadata, **(class_metadata(images) if is_named else {})})
    images.prepare_data()
    metadata = images.metadata()
    is_classified = metadata["problem_type"] == "single_label_classification"
    if not is_classified or not metadata["class_names"]:
        raise UsageError("probe needs images with one class each: name others with --data.path")
    model = model._replace(net=on_device(model.net, options.device))
    found = probe_layers(model, images, options.limit)
    print(f"{'layer':>5}{'validation loss':>17}{'accuracy':>10}{'test accuracy':>15}")
    for one in found:
        print(f"{one.layer:>5}{one.val_loss:>17.4f}{one.val:>10.4f}{one.test:>15.4f}")
    print("layer 0: the embedding")
    best = min(found, key=lambda one: one.val_loss)
    print(f"lowest validation loss: layer {best.layer}, test accuracy {best.test:.4f}")
    beside = Path(best_checkpoint(options.ckpt_path)).resolve().parent.parent
    folder = beside if options.output is None else Path(options.output)
    sizes = {split: len(images.dataset(split)) for split in SPLITS}
    sizes["train"] = min(options.limit, sizes["train"])
    about = {"model": options.ckpt_path, "data": images.origin, "samples": sizes}
    with made_parents(folder / "probe.csv"):
        note = write_record(folder, about, [one._asdict() for one in found])
        layer, *scores = (list(column) for column in zip(*found, strict=True))
        names = ["embedding", *[f"block {i}" for i in range(len(found) - 1)]]
        header = ["layer", "output_of", *LayerAccuracy._fields[1:]]
        write_csv(folder / "probe.csv", header, [layer, names, *scores])
        with replacing(folder / "probe.png") as partial, partial.open("wb") as file:
            draw(found, file)
    print(f"wrote {folder / 'probe.csv'}, probe.json and probe.png{note}")


def class_metadata(images: PixelData) -> dict[str, object]:
    """Returns the classes of other images than those of the training."""
    names = images.source.checked_class_names()
    return {"class_names": names, "num_classes": len(names)}


def probe_layers(model: PixelModel, images: PixelData, limit: int) -> list[LayerAccuracy]:
    """Returns the accuracies of all layers."""
    classes = len(images.metadata()["class_names"])
    indices = {split: [*range(len(images.dataset(split)))] for split in SPLITS}
    order = epoch_permutation(len(indices["train"]), seed=0, epoch=0)
    indices["train"] = order[:limit].sort().values.tolist()
    with progress_bar("features", sum(map(len, indices.values()))) as advance:
        train, val, test = (
            all_features(model, images, split, indices[split], advance) for split in SPLITS
        )
    found = []
    with progress_bar("classifiers", len(train)) as advance:
        for layer in range(len(train)):
            best: LayerAccuracy | None = None
            start = None
            for strength in STRENGTHS:  # each starts from the last, which is faster
                start = fit_linear(train[layer], classes, strength, start)
                logits = start(val[layer].features)  # (S, K)
                loss = float(F.cross_entropy(logits, val[layer].labels))
                if best is None or loss < best.val_loss:
                    val_accuracy = accuracy(logits, val[layer].labels)
                    test_accuracy = accuracy(start(test[layer].features), test[layer].labels)
                    best = LayerAccuracy(layer, strength, loss, val_accuracy, test_accuracy)
            assert best is not None
            found.append(best)
            advance(1)
    return found


def all_features(
    model: PixelModel,
    images: PixelData,
    split: str,
    indices: list[int],
    advance: Callable[[int], object],
) -> list[Labelled]:
    """Returns features and classes of some images of a split, for each layer."""
    dataset = images.dataset(split)
    device = next(model.net.parameters()).device
    parts = []
    labels = []
    for start in range(0, len(indices), BATCH):
        batch = dataset[indices[start : start + BATCH]]
        tokens = model.palette.encode(batch["image"].to(device))
        parts.append(layer_features(model.net, model.inputs(tokens)).cpu())
        labels.append(batch["label"])
        advance(len(batch["label"]))
    features = torch.cat(parts, 1)  # (L + 1, S, E)
    return [Labelled(one, torch.cat(labels)) for one in features]


@torch.no_grad()
def layer_features(net: Decoder, tokens: Tensor) -> Tensor:
    """Means over all tokens (B, N) of the residual stream, normed as the next block reads it.

    Returns (L + 1, B, E), float32: of the embedding, and of the output of each of the L blocks.
    """
    blocks = list(net.stack.blocks)
    names = ["embedding", *[f"blocks.{i}" for i in range(len(blocks))]]
    with recorded(net, *names) as found:
        net(tokens)
    norms: list[Any] = [block.norm1 for block in blocks]
    if net.config.stack.order in ("post", "res_post"):  # whose norms come after the sub-layers
        norms = [nn.Identity() for _ in blocks]
    norms.append(net.stack.norm)
    means = [norm(found[name]).float().mean(1) for name, norm in zip(names, norms, strict=True)]
    return torch.stack(means)  # L + 1 of (B, E)


def draw(found: list[LayerAccuracy], file: BinaryIO) -> None:
    """Writes the curve of accuracies as PNG."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 4), dpi=100, layout="constrained")
    axis = figure.add_subplot()
    layers = [one.layer for one in found]
    axis.plot(layers, [one.test for one in found], marker="o", label="test")
    axis.plot(layers, [one.val for one in found], marker=".", linestyle="--", label="validation")
    axis.set(xlabel="layer (0: embedding)", ylabel="accuracy of the linear probe")
    axis.set_xticks(layers[:: max(1, len(layers) // 12)])
    axis.grid(alpha=0.3)
    axis.legend()
    write_png(figure, file)
