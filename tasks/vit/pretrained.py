"""Pretrained image models: of timm and Hugging Face, and our own."""

import math
from pathlib import Path

from datamodules.sources import ProblemType
from datamodules.utils.files import parse_object
from modules.config import require
from modules.models.vit import ViTConfig
from modules.position import resize_grid
from modules.pretrained.settings import check_settings
from modules.pretrained.vit import BY_MODEL_TYPE, POSITION_TABLE
from modules.pretrained.weights import drop_other_classifier
from modules.schema import checked, from_dict
from tasks.checkpoints.pretrained import (
    ModelFolder,
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
from tasks.options import Options
from tasks.problems import external_targets
from tasks.vit.pretrained_base import Pretrained, distinct
from tasks.vit.pretrained_timm import TimmFiles, TimmModel

PREPROCESSOR = "preprocessor_config.json"


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
