"""What a checkpoint holds, entry by entry, checked before anything is built or loaded from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from datamodules.tokenizers.config import PairTokenizerConfig, TokenizerConfig
from modules.config import require
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import ARCHITECTURES, Seq2Seq, Seq2SeqConfig
from modules.models.vit import ViT, ViTConfig
from modules.pretrained.weights import build_on_meta
from modules.schema import checked, from_dict, shown

Kind = TypeVar("Kind")
KEY = "tessera"  # of our entry in a checkpoint
VERSION = 2  # of the layout of our entry; 1 had no number
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_COUNT = 2**53
MAX_NESTING = 20  # of options


# Network and data -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOptions:
    """Options of the run, as the command line has them."""

    model: dict[str, Any]
    data: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """Our entry of a checkpoint; primitives only."""

    task: str
    version: int
    metadata: dict[str, Any]
    net: dict[str, Any]
    config: RunOptions


@dataclass(frozen=True, kw_only=True)
class ClassMetadata:
    """Metadata of data with classes."""

    class_names: list[str]
    num_classes: int

    def __post_init__(self) -> None:
        different = len(set(self.class_names)) == len(self.class_names) == self.num_classes
        require(different, "metadata.class_names are not num_classes different names.")


@dataclass(frozen=True, kw_only=True)
class ImageMetadata(ClassMetadata):
    """Metadata of `datamodules.images.ImageData`."""

    channels: int
    image_size: int
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.mean) == len(self.std) == self.channels
        require(fits, "metadata.mean or std does not have one value per channel.")
        require(min(self.std, default=1.0) > 0, "metadata.std must be above 0.")


def check_tokens(metadata: Any, vocabulary: int, *names: str) -> None:
    """Raises `ValueError` unless the tokens in `names` exist and there is room for one at least."""
    for name in names:
        token = getattr(metadata, name)
        require(0 <= token < vocabulary, f"metadata.{name} is {token}, which is no token.")
    length = metadata.max_length
    require(length >= 1, f"metadata.max_length is {length}, but must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class TextMetadata:
    """Metadata of `datamodules.tokenized.TokenizedData`."""

    tokenizer: str
    tokenizer_options: TokenizerConfig
    vocabulary: int
    max_length: int
    padding: int

    def __post_init__(self) -> None:
        check_tokens(self, self.vocabulary, "padding")


@dataclass(frozen=True, kw_only=True)
class ReviewMetadata(TextMetadata, ClassMetadata):
    """Metadata of texts with classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ClassMetadata.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class MaskedTextMetadata(TextMetadata):
    """Metadata of texts to mask."""

    next_sentence: bool


@dataclass(frozen=True, kw_only=True)
class CorpusMetadata(TextMetadata):
    """Metadata of a corpus."""

    marks_documents: bool


@dataclass(frozen=True, kw_only=True)
class TranslationMetadata:
    """Metadata of `datamodules.translation.TranslationData`."""

    source_tokenizer: str
    target_tokenizer: str
    tokenizer_options: PairTokenizerConfig
    source_vocabulary: int
    target_vocabulary: int
    source_padding: int
    padding: int
    start: int
    end: int
    max_length: int
    languages: list[str]

    def __post_init__(self) -> None:
        check_tokens(self, self.target_vocabulary, "padding", "start", "end")
        check_tokens(self, self.source_vocabulary, "source_padding")
        require(len(self.languages) == 2, "metadata.languages are not two.")


class Schema(NamedTuple):
    """What the checkpoints of a task hold.

    Args:
        config: Dataclass of the network's config.
        build: From the config to the network.
        metadata: Dataclass of the data's metadata.
    """

    config: type
    build: Callable[[Any], nn.Module]
    metadata: type


def build_seq2seq(config: Seq2SeqConfig) -> Seq2Seq:
    """Builds the network of a config whose sizes are filled in."""
    return ARCHITECTURES[config.architecture](config)


SCHEMAS = {
    "vit": Schema(ViTConfig, ViT, ImageMetadata),
    "bert": Schema(BertConfig, BertClassifier, ReviewMetadata),
    "mlm": Schema(BertConfig, BertMaskedLM, MaskedTextMetadata),
    "lm": Schema(DecoderConfig, Decoder, CorpusMetadata),
    "seq2seq": Schema(Seq2SeqConfig, build_seq2seq, TranslationMetadata),
}
EQUAL_SIZES = ("num_classes", "channels", "image_size")  # in the network and its data
VOCABULARIES = ("vocabulary", "source_vocabulary", "target_vocabulary")  # the network may have more


def check_version(entry: Any) -> None:
    """Raises `ValueError` if our entry is of another version of the layout."""
    version = entry.get("version") if isinstance(entry, Mapping) else VERSION
    require(
        version == VERSION,
        f"it has version {shown(version)} of the layout, and this program reads version {VERSION} "
        "only: train again, or use the version of this program that wrote it",
    )


def check_entry(entry: Any) -> str:
    """Returns the task that a checkpoint is of.

    Raises:
        ValueError: Something in our entry is missing, unknown or of another type; by name.
    """
    found = from_dict(Entry, entry, f"{KEY}.")
    check_primitives(entry, KEY)
    return found.task


def check_model(checkpoint: Mapping[str, Any]) -> None:
    """Checks the network of a checkpoint, its weights and the metadata of its data.

    Raises:
        ValueError: Something is missing, unknown, of another type or size; by name.
    """
    entry = checkpoint[KEY]
    weights = checked(dict[str, Tensor], checkpoint["state_dict"], "state_dict")
    schema = SCHEMAS.get(entry["task"])
    if schema is None:  # a user's own task
        return
    net = entry["net"]
    check_metadata(entry["metadata"], schema.metadata)
    require(entry["config"]["model"].get("net") == net, f"{KEY}.config.model.net is not {KEY}.net.")
    for name in (*EQUAL_SIZES, *VOCABULARIES):
        own = net.get(name)
        data = entry["metadata"].get(name)
        more = name in VOCABULARIES and isinstance(own, int) and own > (data or 0)
        require(
            own is None or data is None or own == data or more,
            f"{KEY}.net.{name} is {shown(own)}, but its data have {shown(data)}.",
        )
    wanted = build_blank(entry).state_dict(prefix="net.")
    for name in weights:
        known = name in wanted
        require(known, f"state_dict.{name} is unexpected: {KEY}.net has no such weight.")
    for name, value in wanted.items():
        require(name in weights, f"state_dict.{name} is missing.")
        check_tensor(weights[name], value, f"state_dict.{name}")


def check_metadata(metadata: Any, kind: type) -> None:
    """Raises `ValueError` unless metadata are those of a task, options of tokenizers complete."""
    found: Any = from_dict(kind, metadata, f"{KEY}.metadata.")
    if not hasattr(found, "tokenizer_options"):
        return
    for field in fields(found.tokenizer_options):  # a default may change
        there = field.name in metadata["tokenizer_options"]
        require(there, f"{KEY}.metadata.tokenizer_options.{field.name} is missing.")


def build_blank(entry: Mapping[str, Any]) -> nn.Module:
    """Builds the network of our entry on the meta device.

    Raises:
        ValueError: Its options describe none; by name.
    """
    schema = SCHEMAS[entry["task"]]
    config: Any = from_dict(schema.config, entry["net"], f"{KEY}.net.")
    return build_on_meta(lambda: schema.build(config))


def check_tensor(value: Tensor, like: Tensor, name: str) -> None:
    """Raises `ValueError` unless `value` has the shape of `like` and a type that fits it."""
    shape = [*value.shape]
    wanted = [*like.shape]
    require(shape == wanted, f"{name} has shape {shape}, but must have {wanted}.")
    fits = value.dtype in FLOATS if like.dtype in FLOATS else value.dtype == like.dtype
    require(fits, f"{name} has dtype {value.dtype}, but must have {like.dtype}.")
    require(value.layout == torch.strided and not value.is_meta, f"{name} is not a dense tensor.")


def check_primitives(value: Any, name: str, levels: int = MAX_NESTING) -> None:
    """Raises `ValueError` unless YAML can hold this value."""
    name = name[:200]
    require(levels > 0, f"{name} is nested too deeply.")
    if isinstance(value, Mapping):
        for key, item in value.items():
            require(isinstance(key, str), f"{name} has a name that is {shown(key)}, not text.")
            check_primitives(item, f"{name}.{key}", levels - 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_primitives(item, f"{name}[{i}]", levels - 1)
    elif isinstance(value, int):
        require(abs(value) < MAX_COUNT, f"{name} is {shown(value)}.")
    else:
        require(value is None or isinstance(value, str | float), f"{name} is {shown(value)}.")


# Training ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCheckpointState:
    """State of a `ModelCheckpoint`, which removes its files once others are better."""

    dirpath: str | None
    best_model_path: str
    best_model_score: Tensor | None
    kth_best_model_path: str
    kth_value: Tensor
    best_k_models: dict[str, Tensor]
    last_model_path: str

    def __post_init__(self) -> None:
        own = (self.best_model_path, self.kth_best_model_path, self.last_model_path)
        for path in (*own, *self.best_k_models):
            inside = Path(path).is_relative_to(self.dirpath or "") and ".." not in Path(path).parts
            outside = f"callbacks name {path}, which is not in their folder {self.dirpath}."
            require(not path or inside, outside)


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer; `tasks.training.optim` compares its shapes with the parameters'."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class TrainingState:
    """State of training, as Lightning saves it."""

    epoch: int
    global_step: int
    loops: dict[str, dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    optimizer_states: list[OptimizerState]

    def __post_init__(self) -> None:
        require(self.epoch >= 0 and self.global_step >= 0, "epoch or global_step is below 0.")


def check_training(checkpoint: Mapping[str, Any]) -> None:
    """Checks what a run continues with, besides what `check_model` does.

    Args:
        checkpoint: Its content.

    Raises:
        ValueError: Something is missing or of another type; by name.
    """
    state = from_known_entries(TrainingState, checkpoint)
    for name, callback in state.callbacks.items():
        if name.startswith(("ModelCheckpoint", "RunCheckpoint")):
            from_known_entries(ModelCheckpointState, callback, f"callbacks.{name}.")


def read_count(state: Any, name: str, *path: str) -> int:
    """Returns a count in nested dicts, `name` being that of the outermost.

    Raises:
        ValueError: There is none, or it is below 0; by name.
    """
    for entry in path:
        state = checked(dict[str, Any], state, name)
        name = f"{name}.{entry}"
        require(entry in state, f"{name} is missing.")
        state = state[entry]
    require(checked(int, state, name) >= 0, f"{name} is below 0.")
    return int(state)


def check_like(value: Any, own: Any, name: str) -> None:
    """Checks a saved state against the state of a new object.

    Args:
        value: Saved; nested dicts of counts and flags.
        own: State of the new object; `value` may lack some of its entries.
        name: Of the outermost.

    Raises:
        ValueError: An entry is of another type or below 0; by name.
    """
    if isinstance(own, dict):
        found = checked(dict[str, Any], value, name)
        for entry in own.keys() & found.keys():
            check_like(found[entry], own[entry], f"{name}.{entry}")
    elif isinstance(own, bool | int):
        require(checked(type(own), value, name) >= 0, f"{name} is below 0.")


def from_known_entries(kind: type[Kind], state: Mapping[str, Any], prefix: str = "") -> Kind:
    """Builds a dataclass from those entries that it has; other versions of a package save more."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return from_dict(kind, {key: value for key, value in state.items() if key in known}, prefix)
