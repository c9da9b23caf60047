"""Image classifiers that are not ours: any of timm, and those of torchvision."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from modules.config import require
from modules.pretrained.weights import BUILD_ERRORS
from modules.schema import check_value
from tasks.checkpoints.pretrained import (
    distinct,
    downloading,
    model_folder,
    read_settings,
    weight_files,
)
from tasks.checkpoints.reading import best_checkpoint
from tasks.errors import DataError, UsageError, unknown_name, usage_errors
from tasks.options import Options
from tasks.problems import external_targets
from tasks.vit.pretrained import check_normalisation
from tasks.vit.pretrained_base import checked_resizing
from tasks.vit.pretrained_timm import TimmFiles, imagenet_classes, timm_model


class Found(NamedTuple):
    """A trained network and what it reads.

    Args:
        net: From normalised pixels (B, C, H, W) to logits (B, K).
        names: Of its classes, as in `match_rows`.
        num_classes: Their number K.
        shape: Channels, height and width of its images.
        mean, std: Of each channel, of pixels in [0, 1].
        resizing: `interpolation` and `crop_pct`; {}: the defaults.
        targets: The metadata of `tasks.problems.external_targets`.
    """

    net: nn.Module
    names: list[list[str]]
    num_classes: int
    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]
    resizing: Options = {}
    targets: Options = external_targets("single_label_classification")

    @property
    def metadata(self) -> Options:
        """As in a checkpoint."""
        return {
            "class_names": self.names[-1] if self.names else [*map(str, range(self.num_classes))],
            "channels": self.shape[0],
            "image_size": self.shape[1],
            "mean": self.mean,
            "std": self.std,
            **self.resizing,
            **self.targets,
        }


def find_other(source: str, option: str) -> Found | None:
    """Finds a classifier of another library; None: the source names none.

    Args:
        source: `timm/<model>`, `torchvision/<model>`, or a folder of timm's layout, local or
            `hf/<model>`.
        option: What names it in messages.

    Raises:
        UsageError: There is no such model, it has no classifier, or its file holds code.
        DataError: It cannot be downloaded.
    """
    library = source.partition("/")[0]
    if library in LIBRARIES:
        return LIBRARIES[library](source, option)
    is_checkpoint = best_checkpoint(source).endswith(".ckpt")
    if is_checkpoint or not (library == "hf" or Path(source).is_dir()):
        return None
    folder = model_folder(source, option)
    if "architecture" not in read_settings(folder, "config.json", option):
        return None
    return AnyTimmFiles(source, option, weight_files(folder)).found()


class AnyTimmFiles(TimmFiles):
    """A folder of timm's layout, of any of its architectures."""

    def find_base(self, settings: Options) -> None:
        """Keeps the settings."""
        self.settings = settings

    def found(self) -> Found:
        """Builds timm's model with the weights."""
        import timm

        arguments = self.settings.get("model_args") or {}
        with self.errors(": config.json"):
            foreign = sorted(arguments.keys() & signature(timm.create_model).parameters.keys())
            require(not foreign, f"model_args must not have {', '.join(foreign)}.")
            sizes = {"num_classes": self.settings.get("num_classes"), **arguments}
            try:
                net = timm_model(str(self.settings["architecture"]), like=["*"], **sizes)
            except BUILD_ERRORS as error:
                raise ValueError(str(error).partition("\n")[0]) from error
        try:
            net.load_state_dict(self.state)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip().rstrip(".")
            raise UsageError(
                f"{self.named}: its weights are not those of its config.json: {reason}"
            ) from error
        # Older files have the entries of pretrained_cfg on the outer level.
        own = self.settings.get("pretrained_cfg", self.settings)
        cfg = net.pretrained_cfg | {name: value for name, value in own.items() if value is not None}
        cfg |= self.normalisation
        found = from_timm(self.named, net, cfg, (self.class_names, self.titles))
        return found._replace(targets=self.targets)


def find_timm(source: str, option: str) -> Found:
    """Finds `timm/<model>`."""
    advice = f"fetch config.json and model.safetensors elsewhere, and give {option} FOLDER"
    with downloading(source, advice):
        net = timm_model(source, pretrained=True, like=["*"])
    named = f"{option} {source}"
    return from_timm(named, net, net.pretrained_cfg, imagenet_classes(net.num_classes))


def from_timm(
    named: str, net: Any, cfg: Mapping[str, Any], names: Sequence[list[str] | None]
) -> Found:
    """Returns a model of timm, given its pretrained_cfg and its classes by several names."""
    if not net.num_classes:
        raise UsageError(f"{named} has no classifier: give another model")
    known = [list(one) for one in names if one]
    with usage_errors(named):
        resizing = checked_resizing(cfg["interpolation"], cfg["crop_pct"])
        size = check_value(list[int], cfg["input_size"], "input_size")
        is_square = len(size) == 3 and size[1] == size[2]
        require(is_square, f"input_size is {size}, but must be [channels, side, side]")
        mean, std = ([*cfg[name]] for name in ("mean", "std"))
        check_normalisation({"mean": mean, "std": std}, size[0])
        for one in known:
            fits = len(one) == net.num_classes
            require(fits, f"it has {len(one)} classes, but predicts {net.num_classes}")
    return Found(net, known, net.num_classes, tuple(size), mean, std, resizing)


def find_torchvision(source: str, option: str) -> Found:
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
        raise UsageError(f"{option} {source} is refused: its file could run code") from error
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{source} could not be downloaded ({type(error).__name__}): fetch {weights.url} "
            f"elsewhere, into {torch.hub.get_dir()}/checkpoints"
        ) from error
    # What torchvision's builders take from the weights.
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):  # they normalise the input in their own way
        options = {"transform_input": True, "init_weights": False}
    if name.startswith("vit_"):
        options = {"image_size": weights.meta["min_size"][0]}
    net = models.get_model(name, weights=None, **options)
    net.load_state_dict(state)
    transforms = weights.transforms()
    side = transforms.crop_size[0]
    categories = weights.meta["categories"]
    names = [*imagenet_classes(len(categories)), distinct(categories, range(len(categories)))]
    known_names = [list(one) for one in names if one]
    shape = (len(transforms.mean), side, side)
    mean, std = list(transforms.mean), list(transforms.std)
    interpolation = transforms.interpolation.value  # such as "bilinear"
    with usage_errors(f"{option} {source}"):
        resizing = checked_resizing(interpolation, side / transforms.resize_size[0])
    return Found(net, known_names, len(categories), shape, mean, std, resizing)


LIBRARIES: dict[str, Callable[[str, str], Found]] = {
    "timm": find_timm,
    "torchvision": find_torchvision,
}
