"""Pretrained image models: of timm and Hugging Face, and our own."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datamodules.sources import ProblemType
from datamodules.utils.files import parse_object
from datamodules.vision.decoding import resizing
from modules.config import require
from modules.models.images import ImageConfig, config_class
from modules.models.mae import MAEConfig
from modules.pretrained.images import TRANSFORMERS, conversion
from modules.pretrained.settings import check_settings
from modules.pretrained.weights import drop_other_classifier
from modules.schema import check_value, from_dict
from tasks.checkpoints.pretrained import (
    Families,
    ModelFolder,
    distinct,
    model_folder,
    read_settings,
    read_task_checkpoint,
    weight_files,
)
from tasks.checkpoints.reading import (
    KEY,
    best_checkpoint,
    load_config,
    net_weights,
)
from tasks.checkpoints.weights import PRETRAINED, State, read_header, read_weights
from tasks.errors import UsageError
from tasks.options import Options, merge_options
from tasks.problems import external_targets
from tasks.vit.networks import load_image_config
from tasks.vit.pretrained_base import Pretrained, checked_resizing
from tasks.vit.pretrained_timm import TimmFiles, TimmModel

PREPROCESSOR = "preprocessor_config.json"
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers, in that file
DECODER = "decoder."  # begins the names of weights that only a masked autoencoder has


def find_model(source: str, option: str = PRETRAINED) -> Pretrained:
    """Returns the pretrained model that `source` names.

    Args:
        source: `timm/<model>`, or `hf/<model>` of the hub; a folder of Hugging Face's or timm's
            layout; a checkpoint or run folder; or a file of weights, of timm or by `export --format
            safetensors`.
        option: The option that names it, for messages.

    Raises:
        UsageError: There is no such model, or it is not supported.
        DataError: It cannot be downloaded, or is damaged.
    """
    if source.startswith("timm/"):
        return TimmModel(source, option)
    if best_checkpoint(source).endswith(".ckpt"):
        return RunCheckpoint(source, option)
    if source.startswith("hf/") or Path(source).is_dir():
        folder = model_folder(source, option)
        if "architecture" in read_settings(folder, "config.json", option):
            return TimmFiles(source, option, weight_files(folder))
        return HuggingFaceModel(source, option, folder)
    if "config" in read_header(source, option):
        return ExportedFile(source, option)
    return TimmFiles(source, option, [Path(source)])


class HuggingFaceModel(Pretrained):
    """A folder with the config.json of transformers, of one of some families."""

    families: ClassVar[Families] = TRANSFORMERS

    def __init__(self, source: str, option: str, path: Path) -> None:
        super().__init__(source, option)
        self.folder = ModelFolder(str(path), self.families, option)
        self.targets = external_targets(self.folder.problem_type())
        self.class_names = self.folder.class_names()
        if self.class_names is not None:
            self.titles = distinct(self.class_names, range(len(self.class_names)))
        if (path / PREPROCESSOR).exists():
            settings = read_settings(path, PREPROCESSOR, option)
            with self.errors(f": {PREPROCESSOR}"):
                self.normalisation = read_normalisation(settings)
                self.resizing = read_resizing(settings)

    def config(self) -> ImageConfig:
        config: ImageConfig = self.folder.config
        return config

    def read(self) -> State:
        return self.folder.state()

    def convert(self, state: State, config: Any) -> State:
        family = self.families[self.folder.family]
        weights = family.weights_from_external(state, config)
        named = {family.full_name(name): value for name, value in state.items()}
        family.check_saved(named, self.folder.config)
        return weights


def read_normalisation(settings: Options) -> dict[str, list[float]]:
    """Returns mean and std of a preprocessor_config.json; `ValueError` if it scales otherwise."""
    fixed = {"do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    check_settings(settings, fixed)
    standard = [0.5, 0.5, 0.5]  # if the file does not say
    return {
        name: check_value(list[float], settings.get(f"image_{name}") or standard, f"image_{name}")
        for name in ("mean", "std")
    }


def check_normalisation(normalisation: Mapping[str, Sequence[float]], channels: int | None) -> None:
    """Raises `ValueError` if mean or std are not numbers of each channel, or a std is not above 0.

    `normalisation` has both.
    """
    for name, values in normalisation.items():
        fits = len(values) == channels
        require(fits, f"{name} has {len(values)} numbers for {channels} channels")
    require(min(normalisation["std"]) > 0, "every std must be above 0")


def read_resizing(settings: Options) -> Options:
    """Returns interpolation and crop_pct of a preprocessor_config.json.

    Raises `ValueError` if it names another interpolation, or no sizes for its crop, or if it crops
    without resizing.
    """
    if settings.get("do_center_crop"):
        check_settings(settings, {"do_resize": True})
    number = check_value(int | None, settings.get("resample"), "resample")
    number = RESAMPLE["bilinear"] if number is None else number
    names = {number: name for name, number in RESAMPLE.items()}
    require(number in names, f"resample is {number}, but must be 2 (bilinear) or 3 (bicubic).")
    crop_pct = settings.get("crop_pct")
    if crop_pct is None and settings.get("do_center_crop"):
        fraction = read_side(settings, "crop_size") / read_side(settings, "size")
        crop_pct = math.floor(fraction * 1e4) / 1e4  # rounded up, it could mean one pixel less
    return checked_resizing(names[number], 1.0 if crop_pct is None else crop_pct)


def preprocessor(metadata: Mapping[str, Any]) -> Options:
    """Returns the preprocessor_config.json of transformers: sizes, mean and standard deviation."""
    size = metadata["image_size"]
    options = resizing(metadata)
    return {
        "image_processor_type": "BitImageProcessor",  # that of ViT does not keep the proportions
        "do_convert_rgb": metadata["channels"] == 3,
        "do_resize": True,
        "size": {"shortest_edge": math.floor(size / options["crop_pct"])},
        "resample": RESAMPLE[options["interpolation"]],
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": metadata["mean"],
        "image_std": metadata["std"],
    }


def read_side(settings: Options, name: str) -> int:
    """Returns a size of a preprocessor_config.json, in pixels; `ValueError` if it is none."""
    size = settings.get(name)
    if isinstance(size, Mapping):
        size = size.get("shortest_edge", size.get("height"))
    side: int = check_value(int, size, name)
    require(side > 0, f"{name} is {side}, but must be at least 1.")
    return side


class OwnWeights(Pretrained):
    """Base of weights with our own names; subclasses set `saved`, their config."""

    saved: ImageConfig

    def config(self) -> ImageConfig:
        return self.saved.encoder if isinstance(self.saved, MAEConfig) else self.saved

    @property
    def new_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        if isinstance(self.saved, MAEConfig):
            return "head.", "distillation_head.", "pool."
        return super().new_parts

    def convert(self, state: State, config: ImageConfig) -> State:
        state = drop_other_classifier(state, config.num_classes)
        state = {name: value for name, value in state.items() if not name.startswith(DECODER)}
        return conversion(config).resize(state, self.saved, config)


# Other metadata that tell which images a model has been trained with, and their labels.
OF_TRAINING: dict[str, Any] = {"class_labels": list[str], "training_digest": int}


class RunCheckpoint(OwnWeights):
    """A checkpoint that `fit` wrote, or its run folder; subclasses may set `tasks`, whose it is."""

    tasks: tuple[str, ...] = ("vit", "mae")

    def __init__(self, source: str, option: str) -> None:
        super().__init__(source, option)
        self.checkpoint = read_task_checkpoint(best_checkpoint(source), self.tasks, option)
        what = f"checkpoint '{source}'"
        if self.checkpoint[KEY]["task"] == "mae":
            self.saved = load_config(MAEConfig, self.checkpoint[KEY]["net"], what)
        else:
            self.saved = load_image_config(self.checkpoint, what)
        metadata = self.checkpoint[KEY]["metadata"]
        self.class_names = metadata["class_names"]
        self.normalisation = {name: metadata[name] for name in ("mean", "std")}
        self.resizing = resizing(metadata)
        self.targets = {name: metadata.get(name, start) for name, start in self.targets.items()}
        self.targets |= {name: metadata[name] for name in OF_TRAINING if name in metadata}
        problem = {"problem_type": self.targets["problem_type"]}  # which --model.problem_type sets
        self.data = merge_options(self.checkpoint[KEY]["config"]["data"], {"dataset": problem})

    def read(self) -> State:
        return net_weights(self.checkpoint)


class ExportedFile(OwnWeights):
    """A file that `export --format safetensors` wrote, with our own names."""

    def __init__(self, source: str, option: str) -> None:
        super().__init__(source, option)
        header = read_header(source, option)
        with self.errors(": its header"):
            saved = parse_object(header["config"])
        if {"vocabulary", "source_vocabulary"} & saved.keys():
            raise UsageError(
                f"{option} {source} is of another task: give one of `tasks.vit` or `tasks.mae`"
            )
        with self.errors(": its header"):
            kind = MAEConfig if "mask_ratio" in saved else config_class(saved)
            self.saved = from_dict(kind, saved)
            metadata = parse_object(header.get("metadata", "{}"))
            self.class_names = check_value(list[str], metadata.get("class_names"), "class_names")
            self.normalisation = {
                name: check_value(list[float], metadata.get(name), name) for name in ("mean", "std")
            }
            self.resizing = checked_resizing(**resizing(metadata))
            kinds = {"problem_type": ProblemType, "target_mean": float, "target_std": float}
            metadata = {"target_mean": 0.0, "target_std": 1.0} | metadata
            kinds |= {name: kind for name, kind in OF_TRAINING.items() if name in metadata}
            self.targets = {
                name: check_value(kind, metadata.get(name), name) for name, kind in kinds.items()
            }

    def read(self) -> State:
        return read_weights(self.source, self.option)
