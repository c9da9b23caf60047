"""Pretrained image models of timm."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from datamodules.sources import ProblemType
from datamodules.utils.files import read_object
from modules.config import StackConfig, require
from modules.models.images import ImageConfig
from modules.models.vit import ViTConfig
from modules.pretrained.images import Conversion, conversion, timm_conversion
from modules.pretrained.weights import build_on_meta
from modules.schema import check_value
from tasks.checkpoints.pretrained import distinct, downloading, refuse_file_of_folder
from tasks.checkpoints.weights import State, read_weights
from tasks.errors import UsageError, unknown_name
from tasks.options import Options, flat
from tasks.problems import external_targets
from tasks.training.distillation import TEACHER
from tasks.vit.pretrained_base import Pretrained, checked_resizing

OURS = ("vit_*", "deit*", "mixer_*", "swin_*", "swinv2_*")  # names of models like ours


class TimmModel(Pretrained):
    """A model of timm by its name, `timm/<model>`."""

    def __init__(self, source: str, option: str) -> None:
        super().__init__(source, option)
        with torch.device("meta"):
            model = timm_model(source)
        with self.errors():
            self.base = our_conversion(model).from_model(model)
        self.layout = layout_of(model)
        self.class_names, self.titles = imagenet_classes(model.num_classes)
        cfg = model.pretrained_cfg
        self.normalisation = {name: list(cfg[name]) for name in ("mean", "std")}
        with self.errors():
            self.resizing = checked_resizing(cfg["interpolation"], cfg["crop_pct"])

    def config(self) -> ImageConfig:
        return self.base

    def read(self) -> State:
        files = "config.json and model.safetensors"
        advice = f"fetch its {files} elsewhere, and give their folder as {self.option} FOLDER"
        with downloading(self.source, advice):
            return timm_model(self.source, pretrained=True).state_dict()

    def convert(self, state: State, config: ImageConfig) -> State:
        return conversion(config).family.weights_from_external(state, config, **self.layout)


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
        self.base: ImageConfig | None = None
        self.layout: dict[str, Any] = {}
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
        if "model_type" in settings:  # of transformers
            refuse_file_of_folder(source, option)
        self.find_base(settings)
        self.is_described = self.base is not None

    def read_classes(self, settings: Options) -> None:
        """Reads classes and preprocessing; raises `ValueError` if an entry is of another type."""
        check_value(Options | None, settings.get("model_args"), "model_args")
        cfg = check_value(Options, settings.get("pretrained_cfg", settings), "pretrained_cfg")
        cfg = cfg | settings  # entries of the outer level win
        if cfg.get("mean") and cfg.get("std"):
            self.normalisation = {
                name: check_value(list[float], cfg[name], name) for name in ("mean", "std")
            }
        interpolation = cfg.get("interpolation") or "bicubic"  # timm's own defaults
        self.resizing = checked_resizing(interpolation, cfg.get("crop_pct") or 0.875)
        kind = check_value(ProblemType | None, settings.get("problem_type"), "problem_type")
        self.targets = external_targets(kind or "single_label_classification")
        names = check_value(list[str] | Options | None, cfg.get("label_names"), "label_names")
        if isinstance(names, list):
            words = check_value(Options | None, cfg.get("label_descriptions"), "label_descriptions")
            self.class_names = names
            self.titles = distinct([str((words or {}).get(name, name)) for name in names], names)
        else:
            count = check_value(int | None, cfg.get("num_classes"), "num_classes")
            self.class_names, self.titles = imagenet_classes(count)

    def find_base(self, settings: Options) -> None:
        """Sets `base`, `layout` and, without a config.json, the preprocessing of a known model.

        Raises `UsageError` if timm has the model, but our networks cannot represent it.
        """
        import timm

        name = str(settings.get("architecture", self.name))
        arguments = settings.get("model_args") or {}
        differ = timm.is_model(self.name) and name != self.name
        if not timm.is_model(name) or differ:
            return
        with self.errors():
            model = build_on_meta(lambda: timm_model(name))
            plain = our_conversion(model)
            self.unknown_arguments = sorted(arguments.keys() - set(plain.known_arguments))
            if self.unknown_arguments:
                return
            StackConfig(depth=check_value(int, arguments.get("depth", 1), "depth"))
            if arguments:
                model = build_on_meta(lambda: timm_model(name, **arguments))
            if settings.get("global_pool", model.global_pool) == model.global_pool:
                self.base = plain.from_model(model)
                self.layout = layout_of(model)
                self.name = name
        tagged = self.files[0].stem
        cfg = timm.get_pretrained_cfg(tagged if timm.is_model_pretrained(tagged) else self.name)
        if self.base is not None and not settings and cfg is not None:
            self.normalisation = {"mean": list(cfg.mean), "std": list(cfg.std)}
            with self.errors():
                self.resizing = checked_resizing(cfg.interpolation, cfg.crop_pct)

    def read(self) -> State:
        state: State = {}
        for file in self.files:
            state |= read_weights(str(file), self.option)
        return state

    def config(self) -> ImageConfig:
        base = self.base or ViTConfig(pool="mean", stack=StackConfig(heads=1))
        with self.errors():
            config: ImageConfig = conversion(base).from_state(self.state, base, **self.layout)
            if self.base is not None:
                check_timm_sizes(self.name, config, self.base)
        return config

    def convert(self, state: State, config: ImageConfig) -> State:
        return conversion(config).family.weights_from_external(state, config, **self.layout)


def our_conversion(model: Any) -> Conversion:
    """As `timm_conversion`; its error says what the model can be used for."""
    try:
        return timm_conversion(model)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; it can only be a teacher: {TEACHER} timm/<model>, or a "
            "folder with its config.json"
        ) from error


def layout_of(model: Any) -> dict[str, Any]:
    """Returns what the shapes of a timm model's weights do not tell, as arguments of its family."""
    is_vit = hasattr(model, "no_embed_class")
    return {"prefix_positions": not model.no_embed_class} if is_vit else {}


def check_timm_sizes(model: str, config: ImageConfig, model_config: ImageConfig) -> None:
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


def timm_model(
    source: str, pretrained: bool = False, like: Sequence[str] = OURS, **arguments: Any
) -> Any:
    """Builds timm's model for `timm/<name>`.

    Raises `UsageError` if timm has no such model; it suggests a name `like` these patterns.
    """
    import timm

    name = source.removeprefix("timm/")
    if not timm.is_model(name):
        raise UsageError(unknown_name(name, timm.list_models([*like]), "timm model"))
    known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if "." in name and name not in known:
        raise UsageError(unknown_name(name, known, "timm model"))
    return timm.create_model(name, pretrained=pretrained, **arguments)
