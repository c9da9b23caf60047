"""What a checkpoint holds, entry by entry, and the check of it all before anything is built or loaded from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from datamodules.tokenizers.kinds import TokenizerConfig
from datamodules.tokenizers.pairs import PairTokenizerConfig
from modules.config import require
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import ARCHITECTURES, Seq2Seq, Seq2SeqConfig
from modules.models.vit import ViT, ViTConfig
from modules.schema import checked, from_dict, shown

Kind = TypeVar("Kind")
KEY = "tessera"  # our entry, see `Entry`
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST = 2**53  # of anything that is counted
NESTED = 20  # levels of options


# What the network is, and what its data were -------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Options of the run, as the command line has them."""

    model: dict[str, Any]
    data: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """Our entry of a checkpoint: primitives only."""

    task: str
    version: str
    facts: dict[str, Any]
    net: dict[str, Any]
    config: Options


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Facts of data with classes."""

    class_names: list[str]
    num_classes: int

    def __post_init__(self) -> None:
        different = len(set(self.class_names)) == len(self.class_names) == self.num_classes
        require(different, "facts.class_names are not num_classes different names.")


@dataclass(frozen=True, kw_only=True)
class Images(Classes):
    """Facts of images; see `ImageData.facts`."""

    channels: int
    image_size: int
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.mean) == len(self.std) == self.channels,
            "facts.mean or std is not of as many channels.",
        )
        require(min(self.std, default=1.0) > 0, "facts.std must be above 0.")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Facts of texts; see `TokenizedData.facts`."""

    tokenizer: str
    tokenizer_options: TokenizerConfig
    vocabulary: int
    max_length: int
    padding: int = 0  # older checkpoints do not say

    def __post_init__(self) -> None:
        require(
            0 <= self.padding < self.vocabulary,
            f"facts.padding is {self.padding}, which is no token.",
        )
        require(
            self.max_length >= 1, f"facts.max_length is {self.max_length}, but must be at least 1."
        )


@dataclass(frozen=True, kw_only=True)
class Reviews(Texts, Classes):
    """Facts of texts with classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Classes.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class MaskedTexts(Texts):
    """Facts of texts to mask."""

    next_sentence: bool


@dataclass(frozen=True, kw_only=True)
class Documents(Texts):
    """Facts of a corpus."""

    framed: bool


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Facts of pairs of texts; see `TranslationData.facts`."""

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
        tokens = {name: getattr(self, name) for name in ("padding", "start", "end")}
        for name, token in tokens.items():
            require(
                0 <= token < self.target_vocabulary, f"facts.{name} is {token}, which is no token."
            )
        require(
            0 <= self.source_padding < self.source_vocabulary, "facts.source_padding is no token."
        )
        require(
            self.max_length >= 1, f"facts.max_length is {self.max_length}, but must be at least 1."
        )
        require(len(self.languages) == 2, "facts.languages are not two.")


class Known(NamedTuple):
    """What the checkpoints of a task hold.

    Args:
        config: Of its network, a dataclass.
        build: From that to the network.
        facts: Of its data, a dataclass.
        data: Name of the class of its data, under which Lightning saves which batch is next.
    """

    config: type
    build: Callable[[Any], nn.Module]
    facts: type
    data: str


def build_seq2seq(config: Seq2SeqConfig) -> Seq2Seq:
    """The network of a configuration whose sizes are filled in."""
    return ARCHITECTURES[config.architecture](config)


KNOWN = {
    "vit": Known(ViTConfig, ViT, Images, "ImageData"),
    "bert": Known(BertConfig, BertClassifier, Reviews, "ReviewData"),
    "mlm": Known(BertConfig, BertMaskedLM, MaskedTexts, "MaskedTextData"),
    "lm": Known(DecoderConfig, Decoder, Documents, "CorpusData"),
    "seq2seq": Known(Seq2SeqConfig, build_seq2seq, Pairs, "TranslationData"),
}
SAME = ("num_classes", "channels", "image_size")  # of the network and of its data
ROOM = ("vocabulary", "source_vocabulary", "target_vocabulary")  # the network may have more


def check_entry(entry: Any) -> str:
    """The task that a checkpoint is of.

    Raises:
        ValueError: Something in our entry is missing, unknown or of another type, by name.
    """
    found = from_dict(Entry, entry, f"{KEY}.")
    check_primitives(entry, KEY)
    return found.task


def check_model(checkpoint: Mapping[str, Any]) -> None:
    """Check the network of a checkpoint, the facts of its data and its weights, without building it.

    Raises:
        ValueError: Something is missing, unknown, of another type or size, by name.
    """
    entry, weights = (
        checkpoint[KEY],
        checked(dict[str, Tensor], checkpoint["state_dict"], "state_dict"),
    )
    if (known := KNOWN.get(entry["task"])) is None:  # of somebody's own
        return
    facts, net = entry["facts"], entry["net"]
    found: Any = from_dict(known.facts, facts, f"{KEY}.facts.")
    if isinstance(found, Texts | Pairs):  # a default of today may be another than it had
        for field in fields(found.tokenizer_options):
            missing = field.name not in facts["tokenizer_options"]
            require(not missing, f"{KEY}.facts.tokenizer_options.{field.name} is missing.")
    require(entry["config"]["model"].get("net") == net, f"{KEY}.config.model.net is not {KEY}.net.")
    for name in (*SAME, *ROOM):
        own, data = net.get(name), facts.get(name)
        fits = own == data or (name in ROOM and isinstance(own, int) and own > data)
        require(
            None in (own, data) or fits,
            f"{KEY}.net.{name} is {shown(own)}, but its data have {shown(data)}.",
        )
    own = blank(entry).state_dict(prefix="net.")
    for name in weights:
        require(
            name in own,
            f"state_dict.{name} is unexpected: the network in {KEY}.net has no such weight.",
        )
    for name, value in own.items():
        require(name in weights, f"state_dict.{name} is missing.")
        check_tensor(weights[name], value, f"state_dict.{name}")


def blank(entry: Mapping[str, Any]) -> nn.Module:
    """The network of our entry, which is of a known task, without memory for its weights.

    Raises:
        ValueError: Its options describe none, by name.
    """
    known = KNOWN[entry["task"]]
    config: Any = from_dict(known.config, entry["net"], f"{KEY}.net.")
    try:
        with torch.device("meta"):
            return known.build(config)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
    ) as error:  # of odd sizes
        raise ValueError(
            f"{KEY}.net describes no network ({str(error).splitlines()[0]})."
        ) from error


def check_tensor(value: Tensor, like: Tensor, name: str) -> None:
    """Raises `ValueError` unless `value`, read from a file, has the shape of `like` and a type that fits it."""
    require(
        value.shape == like.shape,
        f"{name} has shape {[*value.shape]}, but must have {[*like.shape]}.",
    )
    fits = value.dtype in FLOATS if like.dtype in FLOATS else value.dtype == like.dtype
    require(fits, f"{name} has dtype {value.dtype}, but must have {like.dtype}.")
    require(value.layout == torch.strided and not value.is_meta, f"{name} is not a dense tensor.")


def check_primitives(value: Any, name: str, levels: int = NESTED) -> None:
    """Raises `ValueError` unless YAML could hold this value, of usual size: options are read and written as such."""
    require(levels > 0, f"{name[:200]} is nested too deeply.")
    if isinstance(value, Mapping):
        for key, one in value.items():
            require(
                isinstance(key, str), f"{name[:200]} has a name that is {shown(key)}, not text."
            )
            check_primitives(one, f"{name}.{key}", levels - 1)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            check_primitives(one, f"{name}[{number}]", levels - 1)
    else:
        small = not isinstance(value, int) or abs(value) < MOST
        require(
            value is None or (isinstance(value, str | int | float) and small),
            f"{name[:200]} is {shown(value)}.",
        )


COUNTS = {  # of Lightning's FitLoop, which starts afresh where one is missing
    "epoch": ("epoch_progress", "current", "ready"),
    "done": ("epoch_progress", "current", "completed"),
    "batch": ("epoch_loop.batch_progress", "current", "completed"),
    "step": (
        "epoch_loop.automatic_optimization.optim_progress",
        "optimizer",
        "step",
        "total",
        "completed",
    ),
    "logged": ("epoch_loop.state_dict", "_batches_that_stepped"),
}


# What a run goes on with ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """State of a `ModelCheckpoint`: files in its folder, which it removes once others are better."""

    dirpath: str | None
    best_model_path: str
    best_model_score: Tensor | None
    kth_best_model_path: str
    kth_value: Tensor
    best_k_models: dict[str, Tensor]
    last_model_path: str

    def __post_init__(self) -> None:
        for path in (
            self.best_model_path,
            self.kth_best_model_path,
            self.last_model_path,
            *self.best_k_models,
        ):
            inside = Path(path).is_relative_to(self.dirpath or "") and ".." not in Path(path).parts
            require(
                not path or inside,
                f"callbacks name {path}, which is not in their folder {self.dirpath}.",
            )


@dataclass(frozen=True)
class Optimizer:
    """State of an optimizer; `tasks.training.optim` compares its shapes with those of the parameters."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """Parameters of an optimizer with the same options."""

    name: str
    kind: str
    params: list[int]


@dataclass(frozen=True)
class NextBatch:
    """Where the data go on."""

    epoch: int
    batch: int

    def __post_init__(self) -> None:
        require(
            self.epoch >= 0 and self.batch >= 0,
            "The number of the next batch or of its epoch is below 0.",
        )


@dataclass(frozen=True)
class Training:
    """Where training stands, as Lightning saves it."""

    epoch: int
    global_step: int
    loops: dict[str, dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    optimizer_states: list[Optimizer]

    def __post_init__(self) -> None:
        require(self.epoch >= 0 and self.global_step >= 0, "epoch or global_step is below 0.")


def check_training(checkpoint: Mapping[str, Any]) -> None:
    """Check what a run goes on with, beside what `check_model` does.

    Args:
        checkpoint: Its content.

    Raises:
        ValueError: Something is missing or of another type, by name.
    """
    found = part(Training, checkpoint)
    counts = {
        name: count(found.loops, "loops", "fit_loop", *place) for name, place in COUNTS.items()
    }
    epoch, batch, steps = counts["epoch"], counts["batch"], counts["step"]
    if known := KNOWN.get(checkpoint[KEY]["task"]):
        require(
            steps == found.global_step,
            f"global_step is {found.global_step}, but its loops have {steps} steps.",
        )
        require(known.data in checkpoint, f"{known.data} is missing.")
        data = part(
            NextBatch, checked(dict[str, Any], checkpoint[known.data], known.data), f"{known.data}."
        )
        fits = (data.epoch, data.batch) in ((epoch - 1, batch), (epoch, 0))
        require(fits, f"{known.data} has another epoch or batch than its loops.")
        one = len(found.lr_schedulers) == len(found.optimizer_states) == 1
        require(one, "lr_schedulers or optimizer_states is not the state of one.")
        empty = bool(steps) and not found.optimizer_states[0].state
        scaled = "MixedPrecision" in checkpoint  # by a GradScaler, which skips the first steps
        require(scaled or not empty, "optimizer_states[0].state is empty.")
        done = count(found.lr_schedulers[0], "lr_schedulers[0]", "last_epoch")
        count(found.lr_schedulers[0], "lr_schedulers[0]", "_step_count")
        require(
            done == steps,
            f"lr_schedulers[0].last_epoch is {done}, but its loops have {steps} steps.",
        )
    for i, state in enumerate(found.optimizer_states):
        for j, group in enumerate(state.param_groups):
            part(Group, group, f"optimizer_states[{i}].param_groups[{j}].")
    for name, callback in found.callbacks.items():
        if name.startswith(("ModelCheckpoint", "RunCheckpoint")):
            part(Best, callback, f"callbacks.{name}.")


def count(state: Any, name: str, *place: str) -> int:
    """A number in nested dicts that is not below 0; `name` is of the outermost.

    Raises:
        ValueError: There is none, by name.
    """
    for entry in place:
        state, name = checked(dict[str, Any], state, name), f"{name}.{entry}"
        require(entry in state, f"{name} is missing.")
        state = state[entry]
    require(checked(int, state, name) >= 0, f"{name} is below 0.")
    return int(state)


def check_like(value: Any, own: Any, name: str) -> None:
    """Check a saved state against the state of a new object.

    Args:
        value: Saved; nested dicts of counts and flags.
        own: State of the new object; `value` may lack some of its entries.
        name: Of the outermost.

    Raises:
        ValueError: One is of another type or below 0, by name.
    """
    if isinstance(own, dict):
        found = checked(dict[str, Any], value, name)
        for entry in own.keys() & found.keys():
            check_like(found[entry], own[entry], f"{name}.{entry}")
    elif isinstance(own, bool | int):
        require(checked(type(own), value, name) >= 0, f"{name} is below 0.")


def part(kind: type[Kind], state: Mapping[str, Any], prefix: str = "") -> Kind:
    """Those entries of a dict that are known; other versions of the package that wrote it may have more."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return from_dict(kind, {key: value for key, value in state.items() if key in known}, prefix)
