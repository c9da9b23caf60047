"""Teachers of image classifiers: our networks, any classifier of timm, those of torchvision."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.vision.augment import denormalise, normalise
from modules.config import require
from tasks.checkpoints.pretrained import (
    distinct,
    downloading,
    model_folder,
    read_settings,
    weight_files,
)
from tasks.checkpoints.reading import best_checkpoint
from tasks.errors import DataError, UsageError, unknown_name
from tasks.options import Options
from tasks.training.distillation import TEACHER, Teacher, check_problem, match_rows
from tasks.vit.architectures import described_network, find_described
from tasks.vit.pretrained_timm import TimmFiles, imagenet_classes, timm_model


class Found(NamedTuple):
    """A trained network and what it reads.

    Args:
        net: From normalised pixels (B, C, H, W) to logits (B, K).
        names: Of its classes, as in `match_rows`.
        num_classes: Their number K.
        shape: Channels, height and width of its images.
        mean, std: Of each channel, of pixels in [0, 1].
    """

    net: nn.Module
    names: list[list[str]]
    num_classes: int
    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]


class ImageTeacher(Teacher):
    """A teacher with its own normalisation and image size.

    Args:
        source: See `load_teacher`.
        found: The network.
        metadata: Of the student's data: `class_names`, `channels`, `mean` and `std`.
    """

    def __init__(self, source: str, found: Found, metadata: Mapping[str, Any]) -> None:
        super().__init__(
            found.net, match_rows(source, found.names, found.num_classes, metadata["class_names"])
        )
        self.found = found
        self.channels, *self.size = found.shape
        self.mean = metadata["mean"]
        self.std = metadata["std"]
        if metadata["channels"] not in (1, self.channels):
            raise UsageError(
                f"{TEACHER} {source} reads images of {self.channels} channels, and the data have "
                f"{metadata['channels']}: give another teacher"
            )

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (B, K) of pixels (B, C, H, W) that the student's mean and std have normalised."""
        images = denormalise(pixels, self.mean, self.std)
        if images.shape[-2:] != tuple(self.size):
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        # Grey ones in each channel, with memory of their own, as `normalise` writes into them.
        images = images.expand(-1, self.channels, -1, -1).contiguous()
        return self.in_order(self.net(normalise(images, self.found.mean, self.found.std)))


def load_teacher(source: str, metadata: Mapping[str, Any]) -> ImageTeacher:
    """Loads a teacher.

    Args:
        source: See `TeacherConfig.path`.
        metadata: Of the student's data.

    Raises:
        UsageError: There is no such model, it is of another task, has other classes or cannot read
            the images, or its file holds code.
        DataError: It cannot be downloaded.
    """
    library, _, name = source.partition("/")
    find = LIBRARIES.get(library, find_ours)
    return ImageTeacher(source, find(source), metadata)


def find_ours(source: str) -> Found:
    """Finds what `--model.pretrained` takes, and any model in a folder of timm's layout."""
    is_checkpoint = best_checkpoint(source).endswith(".ckpt")
    if not is_checkpoint and (source.startswith("hf/") or Path(source).is_dir()):
        folder = model_folder(source, TEACHER)
        if "architecture" in read_settings(folder, "config.json", TEACHER):
            return AnyTimmFiles(source, TEACHER, weight_files(folder)).found()
    model = find_described(source, TEACHER)
    net, metadata = described_network(model)
    check_problem(source, metadata)
    size = net.config.image_size
    shape = (metadata["channels"], size, size)
    names = [list(names) for names in (model.class_names, model.titles) if names]
    return Found(net, names, len(metadata["class_names"]), shape, metadata["mean"], metadata["std"])


class AnyTimmFiles(TimmFiles):
    """A folder of timm's layout, of any of its architectures."""

    def find_base(self, settings: Options) -> None:
        """Keeps the settings."""
        self.settings = settings

    def found(self) -> Found:
        """Builds timm's model with the weights."""
        import timm

        check_problem(self.source, self.targets)
        arguments = self.settings.get("model_args") or {}
        with self.errors(": config.json"):
            foreign = sorted(arguments.keys() & signature(timm.create_model).parameters.keys())
            require(not foreign, f"model_args must not have {', '.join(foreign)}.")
            sizes = {"num_classes": self.settings.get("num_classes"), **arguments}
            net = timm_model(str(self.settings["architecture"]), **sizes)
        try:
            net.load_state_dict(self.state)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip().rstrip(".")
            raise UsageError(
                f"{self.option} {self.source}: its weights are not those of its config.json: "
                f"{reason}"
            ) from error
        cfg = {**net.pretrained_cfg, **self.settings.get("pretrained_cfg", {})}
        cfg |= self.normalisation
        return from_timm(self.source, net, cfg, (self.class_names, self.titles))


def find_timm(source: str) -> Found:
    """Finds `timm/<model>`."""
    advice = f"fetch config.json and model.safetensors elsewhere, and give {TEACHER} FOLDER"
    with downloading(source, advice):
        net = timm_model(source, pretrained=True)
    return from_timm(source, net, net.pretrained_cfg, imagenet_classes(net.num_classes))


def from_timm(
    source: str, net: Any, cfg: Mapping[str, Any], names: Sequence[list[str] | None]
) -> Found:
    """Returns a model of timm, given its pretrained_cfg and its classes by several names."""
    if not net.num_classes:
        raise UsageError(f"{TEACHER} {source} has no classifier: give another model")
    known = [list(one) for one in names if one]
    shape = tuple(cfg["input_size"])
    return Found(net, known, net.num_classes, shape, list(cfg["mean"]), list(cfg["std"]))


def find_torchvision(source: str) -> Found:
    """Finds `torchvision/<model>`, a classifier of the 1,000 classes of ImageNet."""
    from torchvision import models

    name = source.removeprefix("torchvision/")
    known = models.list_models(models)
    if name not in known:
        raise UsageError(unknown_name(name, known, "model of torchvision"))
    weights = models.get_model_weights(name)["DEFAULT"]
    try:
        state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(f"{TEACHER} {source} is refused: its file could run code") from error
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{source} could not be downloaded ({type(error).__name__}): fetch {weights.url} "
            f"elsewhere, into {torch.hub.get_dir()}/checkpoints"
        ) from error
    net = models.get_model(name, weights=None)
    net.load_state_dict(state)
    transforms = weights.transforms()
    side = transforms.crop_size[0]
    categories = weights.meta["categories"]
    names = [*imagenet_classes(len(categories)), distinct(categories, range(len(categories)))]
    known_names = [list(one) for one in names if one]
    shape = (len(transforms.mean), side, side)
    return Found(
        net, known_names, len(categories), shape, list(transforms.mean), list(transforms.std)
    )


LIBRARIES: dict[str, Callable[[str], Found]] = {
    "timm": find_timm,
    "torchvision": find_torchvision,
}
