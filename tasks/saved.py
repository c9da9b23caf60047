"""What a checkpoint holds, entry by entry, and the check of it all before anything is built or loaded from it."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from datamodules.tokenizers.kinds import TokenizerConfig
from datamodules.tokenizers.pairs import PairTokenizerConfig
from modules.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.config import require
from modules.decoder import Decoder, DecoderConfig
from modules.schema import checked, from_dict, shown
from modules.seq2seq import ARCHITECTURES, Seq2Seq, Seq2SeqConfig
from modules.vit import ViT, ViTConfig

Kind = TypeVar("Kind")
KEY = "tessera"  # our entry, see `Entry`
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST = 2**53  # of anything that is counted
NESTED = 20  # levels of options
VERSION = r"[2-9]\.\d+\.\d+(\.?(a|b|rc|dev|post)\d+)*"  # of Lightning


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
        require(len(self.class_names) == self.num_classes, "facts.class_names are not as many as num_classes.")


@dataclass(frozen=True, kw_only=True)
class Images(Classes):
    """Facts of images; see `ImageData.facts`."""

    channels: int
    image_size: int
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.mean) == len(self.std) == self.channels, "facts.mean or std is not of as many channels.")
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
        require(0 <= self.padding < self.vocabulary, f"facts.padding is {self.padding}, which is no token.")
        require(self.max_length >= 1, f"facts.max_length is {self.max_length}, but must be at least 1.")


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
            require(0 <= token < self.target_vocabulary, f"facts.{name} is {token}, which is no token.")
        require(0 <= self.source_padding < self.source_vocabulary, "facts.source_padding is no token.")
        require(self.max_length >= 1, f"facts.max_length is {self.max_length}, but must be at least 1.")
        require(len(self.languages) == 2, "facts.languages are not two.")


class Known(NamedTuple):
    """What the checkpoints of a task hold.

    Args:
        config: Of its network, a dataclass.
        build: From that to the network.
        facts: Of its data, a dataclass.
        data: Name of the class of its data, under which Lightning keeps where they stand.
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
    entry, weights = checkpoint[KEY], checked(dict[str, Tensor], checkpoint["state_dict"], "state_dict")
    if (known := KNOWN.get(entry["task"])) is None:  # of somebody's own
        return
    facts, net = entry["facts"], entry["net"]
    found: Any = from_dict(known.facts, facts, f"{KEY}.facts.")
    if isinstance(found, Texts | Pairs):  # all of them are read
        lacking = {field.name for field in fields(found.tokenizer_options)} - facts["tokenizer_options"].keys()
        require(not lacking, f"{KEY}.facts.tokenizer_options.{min(lacking, default='')} is missing.")
    require(entry["config"]["model"].get("net") == net, f"{KEY}.config.model.net is not {KEY}.net.")
    for name in (*SAME, *ROOM):
        own, data = net.get(name), facts.get(name)
        fits = own == data or (name in ROOM and isinstance(own, int) and own > data)
        require(None in (own, data) or fits, f"{KEY}.net.{name} is {shown(own)}, but its data have {shown(data)}.")
    own = blank(entry).state_dict(prefix="net.")
    wrong = sorted(own.keys() ^ weights.keys())
    require(not wrong, f"state_dict.{(wrong or ' ')[0]} is missing, or not of the network in {KEY}.net.")
    for name, value in own.items():
        check_tensor(weights[name], value, f"state_dict.{name}")


def check_options(kind: type, options: Mapping[str, Any], name: str) -> None:
    """Check the options of a task or of its data, for which a parser would take null as well.

    Args:
        kind: The class that has them.
        options: By name; those left out have their defaults.
        name: Of the options, for messages.

    Raises:
        ValueError: One is unknown or of another type, by name.
    """
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):  # a subclass passes on the options of its base class
        types |= get_type_hints(base.__init__)  # type: ignore[misc]
    for option, value in options.items():
        require(option in types, f"{name}.{option}: this version has no such entry.")
        checked(types[option], value, f"{name}.{option}")


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
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:  # of odd sizes
        raise ValueError(f"{KEY}.net describes no network ({str(error).splitlines()[0]}).") from error


def check_tensor(value: Tensor, like: Tensor, name: str) -> None:
    """Raises `ValueError` unless `value`, read from a file, has the shape of `like` and a type that fits it."""
    require(value.shape == like.shape, f"{name} has shape {[*value.shape]}, but must have {[*like.shape]}.")
    fits = value.dtype in FLOATS if like.dtype in FLOATS else value.dtype == like.dtype
    require(fits and value.layout == torch.strided and not value.is_meta, f"{name} is {value.dtype}, not a number.")


def check_primitives(value: Any, name: str, levels: int = NESTED) -> None:
    """Raises `ValueError` unless YAML could hold this value, of usual size: options are read and written as such."""
    require(levels > 0, f"{name[:200]} is nested too deeply.")
    if isinstance(value, Mapping):
        for key, one in value.items():
            require(isinstance(key, str), f"{name[:200]} has a name that is {shown(key)}, not text.")
            check_primitives(one, f"{name}.{key}", levels - 1)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            check_primitives(one, f"{name}[{number}]", levels - 1)
    else:
        small = not isinstance(value, int) or abs(value) < MOST
        require(value is None or (isinstance(value, str | int | float) and small), f"{name[:200]} is {shown(value)}.")


# What a run goes on with ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """How many there were of something that is begun and completed."""

    ready: int
    completed: int
    started: int = 0
    processed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            count = getattr(self, field.name)
            require(0 <= count < MOST, f"loops.fit_loop has {shown(count)} as a number of {field.name}.")


@dataclass(frozen=True)
class Progress:
    """Of one of Lightning's loops: in all, and in the present epoch."""

    total: Counts
    current: Counts


@dataclass(frozen=True)
class BatchProgress(Progress):
    """Of a loop over batches."""

    is_last_batch: bool


@dataclass(frozen=True)
class Steps:
    """Of an optimizer."""

    step: Progress
    zero_grad: Progress


@dataclass(frozen=True)
class Optimization:
    """Of the loop that has it."""

    optimizer: Steps


@dataclass(frozen=True)
class Epoch:
    """What `EpochLoop` keeps."""

    _batches_that_stepped: int
    validates: bool = False
    random: list[dict[str, Any] | None] | None = None

    def __post_init__(self) -> None:
        for state in self.random or ():
            if state is not None:
                check_random(state)


LOOPS = {  # entries of fit_loop by how their names end
    "epoch_loop.state_dict": Epoch,
    "batch_progress": BatchProgress,
    "optim_progress": Optimization,
    "progress": Progress,
    "state_dict": dict[str, Any],
}
STEPS = "epoch_loop.automatic_optimization.optim_progress"
NEEDED = ("epoch_progress", "epoch_loop.state_dict", "epoch_loop.batch_progress", STEPS)


@dataclass(frozen=True)
class Record:
    """What `RunRecord` keeps."""

    samples: int
    seconds: float
    elapsed: float


@dataclass(frozen=True)
class Best:
    """What a `ModelCheckpoint` keeps: its files, all of them in its folder, since it removes those that are no longer
    among the best."""

    dirpath: str | None
    best_model_path: str
    best_model_score: Tensor | None
    kth_best_model_path: str
    kth_value: Tensor
    best_k_models: dict[str, Tensor]
    last_model_path: str

    def __post_init__(self) -> None:
        for path in (self.best_model_path, self.kth_best_model_path, self.last_model_path, *self.best_k_models):
            inside = Path(path).is_relative_to(self.dirpath or "") and ".." not in Path(path).parts
            require(not path or inside, f"callbacks name {path}, which is not in their folder {self.dirpath}.")
        for score in (self.best_model_score, self.kth_value, *self.best_k_models.values()):
            require(score is None or score.numel() == 1, "callbacks have a score that is not one number.")


@dataclass(frozen=True)
class Stopping:
    """What `EarlyStopping` keeps."""

    wait_count: int
    stopped_epoch: int
    best_score: Tensor
    patience: int
    stopping_reason: str = "not_stopped"


@dataclass(frozen=True)
class Average:
    """What an average of the weights keeps; see `tasks/averaging.py`."""

    trained: dict[str, Tensor]

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        """All that it keeps, by names as in the network."""
        return [self.trained]


@dataclass(frozen=True)
class MovingAverage(Average):
    """Of `EMA`."""

    step: int


@dataclass(frozen=True)
class MeanOfLast(Average):
    """Of `LastWeights`."""

    last: list[dict[str, Tensor]]

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        """As in the base class."""
        return [self.trained, *self.last]


@dataclass(frozen=True)
class Scaler:
    """What a gradient scaler keeps."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


@dataclass(frozen=True)
class Group:
    """Of an optimizer's parameters."""

    name: str
    kind: str
    params: list[int]


@dataclass(frozen=True)
class Optimizer:
    """State of an optimizer."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Schedule:
    """State of a schedule."""

    last_epoch: int
    _step_count: int


@dataclass(frozen=True)
class Place:
    """Where the data stand."""

    epoch: int
    batch: int


CALLBACKS = {
    "RunRecord": Record,
    "FolderCheckpoint": Best,
    "ModelCheckpoint": Best,
    "EarlyStopping": Stopping,
    "EMA": MovingAverage,
    "LastWeights": MeanOfLast,
}


def check_training(checkpoint: Mapping[str, Any], in_parts: bool = False) -> None:
    """Check what a run goes on with, beside what `check_model` does.

    Args:
        checkpoint: Its content.
        in_parts: The states of its optimizers are elsewhere.

    Raises:
        ValueError: Something is missing, of another type or contradicts the rest, by name.
    """
    needed = ["global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "optimizer_states"]
    for name in needed[:-1] if in_parts else needed:
        require(name in checkpoint, f"{name} is missing: a run cannot go on from weights alone.")
    step = checked(int, checkpoint["global_step"], "global_step")
    version = checked(str, checkpoint["pytorch-lightning_version"], "pytorch-lightning_version")
    require(bool(re.fullmatch(VERSION, version)), f"pytorch-lightning_version is {shown(version)}.")
    places = check_loops(checked(dict[str, Any], checkpoint["loops"], "loops").get("fit_loop"), step)
    if "MixedPrecision" in checkpoint:
        from_dict(Scaler, checkpoint["MixedPrecision"], "MixedPrecision.")
    for number, schedule in enumerate(checked(list[Any], checkpoint["lr_schedulers"], "lr_schedulers")):
        part(Schedule, schedule, f"lr_schedulers[{number}]")
    states = [] if in_parts else checked(list[Any], checkpoint["optimizer_states"], "optimizer_states")
    for number, state in enumerate(states):
        check_optimizer(from_dict(Optimizer, state, f"optimizer_states[{number}]."), f"optimizer_states[{number}]")
    for name, state in checked(dict[str, dict[str, Any]], checkpoint["callbacks"], "callbacks").items():
        kind = CALLBACKS.get(name.partition("{")[0])
        found = kind and state and part(kind, state, f"callbacks.{name}")
        if isinstance(found, Average):
            check_average(found, checkpoint, f"callbacks.{name}")
    if known := KNOWN.get(checkpoint[KEY]["task"]):
        require(known.data in checkpoint, f"{known.data} is missing.")
        place = part(Place, checkpoint[known.data], known.data)
        require((place.epoch, place.batch) in places, f"{known.data} and loops.fit_loop are not of one place.")
        one = len(checkpoint["lr_schedulers"]) == 1 and (in_parts or len(states) == 1)
        require(one, "optimizer_states and lr_schedulers must have one element each.")


def part(kind: type[Kind], state: Any, name: str) -> Kind:
    """Those entries of a dict that are known; other versions of the package that wrote it may have more."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    state = checked(dict[str, Any], state, name)
    return from_dict(kind, {key: value for key, value in state.items() if key in known}, f"{name}.")


def check_loops(loops: Any, step: int) -> list[tuple[int, int]]:
    """Check the state of `FitLoop`, whose number of optimizer steps must be `step`.

    Returns:
        Where the data may stand: in which epoch, before which batch.
    """
    found: dict[str, Any] = {}
    for name, value in checked(dict[str, Any], loops, "loops.fit_loop").items():
        kind = next((kind for end, kind in LOOPS.items() if name.endswith(end)), Any)
        found[name] = checked(kind, value, f"loops.fit_loop.{name}")
    for name in NEEDED:
        require(name in loops, f"loops.fit_loop.{name} is missing.")
    epochs, epoch, batches, steps = (found[name] for name in NEEDED)
    taken = steps.optimizer.step.total.completed
    agree = taken == step == epoch._batches_that_stepped + epoch.validates
    require(agree, f"global_step is {shown(step)}, but loops.fit_loop counts other steps.")
    now, done = epochs.current, epochs.current.completed
    agree = epochs.total == now and now.ready == now.started and done == now.processed and now.ready - 1 <= done
    require(agree and done <= now.ready, "loops.fit_loop.epoch_progress contradicts itself.")
    for counts in (batches.total, batches.current):
        even = {counts.ready, counts.started, counts.processed, counts.completed}
        require(len(even) == 1, "loops.fit_loop.epoch_loop.batch_progress contradicts itself.")
    return [(done, batches.current.ready), (now.ready, 0)]


def check_random(state: Mapping[str, Any]) -> None:
    """Check the states of random generators by having some of their kind take them."""
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
    except Exception as error:  # whatever the generators say
        raise ValueError("random of loops.fit_loop holds no states of random generators.") from error


def check_optimizer(found: Optimizer, name: str) -> None:
    """Check that the groups have the parameters that there are states of; their shapes are checked where they load."""
    groups = [part(Group, group, f"{name}.param_groups[{i}]") for i, group in enumerate(found.param_groups)]
    numbers = [number for group in groups for number in group.params]
    require(len(set(numbers)) == len(numbers), f"{name}.param_groups have a parameter twice.")
    require(found.state.keys() <= set(numbers), f"{name}.state is of parameters that are in none of its groups.")


def check_average(found: Average, checkpoint: Mapping[str, Any], name: str) -> None:
    """Check the weights beside those of the network."""
    if checkpoint[KEY]["task"] not in KNOWN:
        return
    own = {f"net.{key}": value for key, value in blank(checkpoint[KEY]).named_parameters()}
    for weights in found.weights:
        require(weights.keys() == own.keys(), f"{name} has not the names of the network's weights.")
        for key, value in own.items():
            check_tensor(weights[key], value, f"{name}.{key}")
