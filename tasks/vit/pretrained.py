"""Pretrained image models: of timm and Hugging Face, and our own."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from datamodules.sources import ProblemType
from datamodules.utils.files import parse_object, read_object
from modules.config import StackConfig, require
from modules.models.vit import ViTConfig
from modules.position import resize_grid
from modules.pretrained.settings import check_settings
from modules.pretrained.timm import (
    ARGUMENTS,
    config_from_timm_model,
    config_from_timm_state,
)
from modules.pretrained.vit import BY_MODEL_TYPE, POSITION_TABLE, TIMM
from modules.pretrained.weights import build_on_meta, drop_other_classifier
from modules.schema import checked, from_dict
from tasks.checkpoints.pretrained import (
    ModelFolder,
    downloading,
    model_folder,
    read_settings,
    weight_files,
)
from tasks.checkpoints.reading import (
    KEY,
    best_checkpoint,
    load_config,
    net_weights,
    read_checkpoint,
)
from tasks.checkpoints.weights import PRETRAINED, State, read_header, read_weights
from tasks.errors import UsageError, unknown_name, usage_errors
from tasks.options import Options, flat
from tasks.problems import external_targets

PREPROCESSOR = "preprocessor_config.json"


class Pretrained(ABC):
    """Weights that an option names, and what is known about their model.

    Args:
        source, option: As of `find_model`.

    Attributes:
        is_described: Whether all of `config` is known; otherwise options must say what shapes do
            not tell.
        class_names: Class of each row of the classifier; None: not known.
        titles: Unique readable names of the classes; None: as `class_names`.
        normalisation: `mean` and `std`, each with a number for each channel; {}: not known.
        targets: The metadata of `tasks.problems.external_targets`.
    """

    is_described = True
    class_names: list[str] | None = None
    titles: list[str] | None = None
    normalisation: dict[str, list[float]]

    def __init__(self, source: str, option: str) -> None:
        self.source = source
        self.option = option
        self.normalisation = {}
        self.targets = external_targets("single_label_classification")

    @abstractmethod
    def config(self) -> ViTConfig:
        """Returns the config of the model; `num_classes` is null if there is no classifier."""

    @abstractmethod
    def read(self) -> State:
        """Returns the weights under their own names."""

    @abstractmethod
    def convert(self, state: State, config: ViTConfig) -> State:
        """As `weights`, from what `read` returned; raises `ValueError` if they do not fit."""

    @cached_property
    def state(self) -> State:
        """What `read` returned."""
        return self.read()

    def weights(self, config: ViTConfig) -> State:
        """Returns weights under our names, positions resized to the image size of `config`.

        A classifier for another number of classes is left out. Raises `UsageError` if they do not
        fit `config`, `DataError` if they cannot be downloaded or are damaged.
        """
        state = self.state
        with self.errors(" does not fit the network"):
            return self.convert(state, config)

    def errors(self, what: str = "") -> AbstractContextManager[None]:
        """Turns a `ValueError` about the source into a `UsageError`; `what` follows its name."""
        return usage_errors(f"{self.option} {self.source}{what}")


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
    """A folder with the config.json of transformers."""

    def __init__(self, source: str, option: str, path: Path) -> None:
        super().__init__(source, option)
        self.folder = ModelFolder(str(path), BY_MODEL_TYPE, option)
        self.targets = external_targets(self.folder.problem_type())
        self.class_names = self.folder.class_names()
        if self.class_names is not None:
            self.titles = distinct(self.class_names, range(len(self.class_names)))
        if (path / PREPROCESSOR).exists():
            settings = read_settings(path, PREPROCESSOR, option)
            with self.errors(f": {PREPROCESSOR}"):
                self.normalisation = read_normalisation(settings)

    def config(self) -> ViTConfig:
        return self.folder.config

    def read(self) -> State:
        return self.folder.state()

    def convert(self, state: State, config: ViTConfig) -> State:
        family = BY_MODEL_TYPE[self.folder.family]
        weights = family.weights_from_external(state, config)
        saved = self.folder.config
        wanted = saved.prefix_tokens + math.prod(saved.grid)
        table = {family.full_name(name): value for name, value in state.items()}[family.positions]
        rows = table.shape[1]
        require(rows == wanted, f"{family.positions} has {rows} rows, but {wanted} by config.json.")
        return weights


def read_normalisation(settings: Options) -> dict[str, list[float]]:
    """Returns mean and std of a preprocessor_config.json; `ValueError` if it scales otherwise."""
    fixed = {"do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    check_settings(settings, fixed)
    standard = [0.5, 0.5, 0.5]  # if the file does not say
    return {
        name: checked(list[float], settings.get(f"image_{name}") or standard, f"image_{name}")
        for name in ("mean", "std")
    }


class OwnWeights(Pretrained):
    """Base of weights with our own names; subclasses set `saved`, their config."""

    saved: ViTConfig

    def config(self) -> ViTConfig:
        return self.saved

    def convert(self, state: State, config: ViTConfig) -> State:
        state = drop_other_classifier(state, config.num_classes)
        if self.saved.position == "learned" and POSITION_TABLE in state:
            table = resize_grid(state[POSITION_TABLE], config.grid)  # (rows, columns, E)
            state = {**state, POSITION_TABLE: table}
        return state


class RunCheckpoint(OwnWeights):
    """A checkpoint that `fit` wrote, or its run folder."""

    def __init__(self, source: str, option: str) -> None:
        super().__init__(source, option)
        self.checkpoint = read_checkpoint(best_checkpoint(source), "vit")
        self.saved = load_config(ViTConfig, self.checkpoint[KEY]["net"])
        metadata = self.checkpoint[KEY]["metadata"]
        self.class_names = metadata["class_names"]
        self.normalisation = {name: metadata[name] for name in ("mean", "std")}
        self.targets = {name: metadata[name] for name in self.targets}

    def read(self) -> State:
        return net_weights(self.checkpoint)


class ExportedFile(OwnWeights):
    """A file that `export --format safetensors` wrote, with our own names."""

    def __init__(self, source: str, option: str) -> None:
        super().__init__(source, option)
        header = read_header(source, option)
        with self.errors(": its header"):
            self.saved = from_dict(ViTConfig, parse_object(header["config"]))
            metadata = parse_object(header.get("metadata", "{}"))
            self.class_names = checked(list[str], metadata.get("class_names"), "class_names")
            self.normalisation = {
                name: checked(list[float], metadata.get(name), name) for name in ("mean", "std")
            }
            kinds = {"problem_type": ProblemType, "target_mean": float, "target_std": float}
            self.targets = {
                name: checked(kind, metadata.get(name), name) for name, kind in kinds.items()
            }

    def read(self) -> State:
        return read_weights(self.source, self.option)


# timm ---------------------------------------------------------------------------------------------


class TimmModel(Pretrained):
    """A model of timm by its name, `timm/<model>`."""

    def __init__(self, source: str, option: str) -> None:
        super().__init__(source, option)
        with torch.device("meta"):
            model = timm_model(source)
        with self.errors():
            self.base = config_from_timm_model(model)
        self.prefix_positions = not model.no_embed_class
        self.class_names, self.titles = imagenet_classes(model.num_classes)
        cfg = model.pretrained_cfg
        self.normalisation = {name: list(cfg[name]) for name in ("mean", "std")}

    def config(self) -> ViTConfig:
        return self.base

    def read(self) -> State:
        files = "config.json and model.safetensors"
        advice = f"fetch its {files} elsewhere, and give their folder as {self.option} FOLDER"
        with downloading(self.source, advice):
            return timm_model(self.source, pretrained=True).state_dict()

    def convert(self, state: State, config: ViTConfig) -> State:
        return TIMM.weights_from_external(state, config, self.prefix_positions)


class TimmFiles(Pretrained):
    """Files of timm's weights.

    The model is that of timm's config.json beside them, or else the one that they are named after.
    It is not known if neither names one, they differ, or the config.json has arguments that our
    ViT lacks: then sizes follow from shapes, and options must say the rest.

    Args:
        files: Of the weights; the first has the name.
    """

    def __init__(self, source: str, option: str, files: Sequence[Path]) -> None:
        super().__init__(source, option)
        self.files = files
        self.name = files[0].stem.partition(".")[0]
        self.base: ViTConfig | None = None
        self.prefix_positions: bool | None = None
        file = files[0].with_name("config.json")
        settings: Options = {}
        if file.exists():
            try:
                settings = read_object(file)
                self.read_classes(settings)
            except (OSError, ValueError) as error:
                reason = str(error).splitlines()[0].rstrip(".")
                raise UsageError(
                    f"{option} {source}: {file} ({reason}): repair or move it"
                ) from error
        self.find_base(settings)
        self.is_described = self.base is not None

    def read_classes(self, settings: Options) -> None:
        """Reads classes and normalisation; raises `ValueError` if an entry is of another type."""
        checked(Options | None, settings.get("model_args"), "model_args")
        cfg = checked(Options, settings.get("pretrained_cfg", settings), "pretrained_cfg")
        cfg = cfg | settings  # entries of the outer level win
        if cfg.get("mean") and cfg.get("std"):
            self.normalisation = {
                name: checked(list[float], cfg[name], name) for name in ("mean", "std")
            }
        kind = checked(ProblemType | None, settings.get("problem_type"), "problem_type")
        self.targets = external_targets(kind or "single_label_classification")
        names = checked(list[str] | Options | None, cfg.get("label_names"), "label_names")
        if isinstance(names, list):
            words = checked(Options | None, cfg.get("label_descriptions"), "label_descriptions")
            self.class_names = names
            self.titles = distinct([str((words or {}).get(name, name)) for name in names], names)
        else:
            count = checked(int | None, cfg.get("num_classes"), "num_classes")
            self.class_names, self.titles = imagenet_classes(count)

    def find_base(self, settings: Options) -> None:
        """Sets `base` and `prefix_positions` if the model is known; `UsageError` as of timm."""
        import timm

        name = str(settings.get("architecture", self.name))
        arguments = settings.get("model_args") or {}
        differ = timm.is_model(self.name) and name != self.name
        if not timm.is_model(name) or differ or not arguments.keys() <= ARGUMENTS:
            return
        with self.errors():
            StackConfig(depth=checked(int, arguments.get("depth", 1), "depth"))
            model = build_on_meta(lambda: timm_model(name, **arguments))
            if settings.get("global_pool", model.global_pool) == model.global_pool:
                self.base = config_from_timm_model(model)
                self.prefix_positions = not model.no_embed_class
                self.name = name

    def read(self) -> State:
        state: State = {}
        for file in self.files:
            state |= read_weights(str(file), self.option)
        return state

    def config(self) -> ViTConfig:
        base = self.base or ViTConfig(pool="mean", stack=StackConfig(heads=1))
        with self.errors():
            config = config_from_timm_state(self.state, base, self.prefix_positions)
            if self.base is not None:
                check_timm_sizes(self.name, config, self.base)
        return config

    def convert(self, state: State, config: ViTConfig) -> State:
        return TIMM.weights_from_external(state, config, self.prefix_positions)


def check_timm_sizes(model: str, config: ViTConfig, model_config: ViTConfig) -> None:
    """Raises `ValueError` if weights do not have the sizes of a timm model."""
    free_sizes = {name: getattr(config, name) for name in ("image_size", "channels", "num_classes")}
    expected = flat(asdict(replace(model_config, **free_sizes)))
    differ = [
        f"{name} is {value}, not {expected[name]}"
        for name, value in flat(asdict(config)).items()
        if value != expected[name]
    ]
    require(not differ, f"these are not weights of {model}: {', '.join(differ)}.")


def imagenet_classes(count: int | None) -> tuple[list[str] | None, list[str] | None]:
    """Returns the classes of an ImageNet of `count` classes: synsets such as n01440764, and words.

    None twice if there is no such ImageNet.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return None, None
    info = ImageNetInfo(subset)
    synsets = info.label_names()
    return synsets, distinct(list(map(info.index_to_description, range(len(synsets)))), synsets)


def distinct(names: Sequence[str], marks: Sequence[Any]) -> list[str]:
    """Returns names of classes, with its mark appended to each repeated name.

    >>> distinct(["cat", "crane", "crane"], [0, 1, 2])
    ['cat', 'crane (1)', 'crane (2)']
    """
    counts = Counter(names)  # two classes of ImageNet are called crane
    return [
        name if counts[name] == 1 else f"{name} ({mark})"
        for name, mark in zip(names, marks, strict=True)
    ]


def timm_model(source: str, pretrained: bool = False, **arguments: Any) -> Any:
    """Builds timm's model for `timm/<name>`; raises `UsageError` if timm has no such model."""
    import timm

    name = source.removeprefix("timm/")
    if not timm.is_model(name):
        raise UsageError(unknown_name(name, timm.list_models("vit_*"), "timm model"))
    known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if "." in name and name not in known:
        raise UsageError(unknown_name(name, known, "timm model"))
    return timm.create_model(name, pretrained=pretrained, **arguments)
