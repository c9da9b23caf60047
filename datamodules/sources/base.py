"""What every source of labelled samples offers, and the options that all share."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.splits import stratified_split


@dataclass(frozen=True)
class SourceOptions:
    """What to know about a data set that its files do not say.

    Args:
        name: Id on the Hugging Face hub, for the source "hub", such as uoft-cs/cifar10 or stanfordnlp/imdb.
        subset: Part of that data set where it has several, such as de-en of wmt/wmt16.
        local: Folder below the one that the environment variable TESSERA_DATA names, read instead of the hub.
        label_column: Column with the classes; None: label, labels or the first of a class type.
        val_fraction: Share of the training samples, in each class, set aside where the data have no validation split.
        split_seed: Of the draw of that share; kept apart from the seed of training, so that runs can be compared.
        class_names: Names in the order of the labels; None: as the data say.
    """

    name: str | None = None
    subset: str | None = None
    local: str | None = None
    label_column: str | None = None
    val_fraction: float = 0.1
    split_seed: int = 0
    class_names: list[str] | None = None


@dataclass(frozen=True)
class DatasetOptions(SourceOptions):
    """What to know about a data set of images that its files do not say.

    Args:
        image_column: Column with the images; None: the first that holds images.
        channels: Colour channels that images are converted to, 1 or 3; None: as the data are.
        mean: Of each channel, in [0, 1]; None: measured on the training images.
        std: Standard deviation of each channel, likewise.
    """

    image_column: str | None = None
    channels: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


class Split(Protocol):
    """Samples of one split, not loaded yet, with a class for each."""

    @property
    def labels(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def select(self, keep: Any) -> Any: ...


S = TypeVar("S", bound=Split)


class Source(Generic[S]):
    """Base: a source knows its class names and gives the samples of a split.

    Args:
        path: File or folder that the user named, or None.
        options: See `SourceOptions`; a kind of data adds its own.
        skip_bad: Pass over files and rows that cannot be used, and count them.
    """

    noun = "images"  # what the samples are, for messages
    prefix = "--data.dataset"  # of its options on the command line, likewise
    unused: Set[str] = frozenset()  # options that mean nothing here

    def __init__(self, path: str | None, options: Any, skip_bad: bool = False) -> None:
        self.path, self.options, self.skip_bad = path, options, skip_bad
        self.skipped: list[str] = []
        self.known_names: list[str] | None = (
            None  # from a checkpoint; for data that hold no training split
        )

    @property
    def origin(self) -> str:
        """Where the samples were read from."""
        return self.path or "embedded"

    def prepare(self) -> None:
        """Downloads what is missing; called on one process only."""

    @property
    def class_names(self) -> list[str]:
        """Names in the order of the labels."""
        raise NotImplementedError

    def has(self, split: str) -> bool:
        """Whether the data have this split of their own."""
        raise NotImplementedError

    def records(self, split: str) -> S | None:
        """Of "train", "val" or "test"; None where the data have no such split."""
        raise NotImplementedError

    # What follows from these, for every source.

    def bad(self, name: str, problem: str) -> None:
        """Counts a sample that cannot be used.

        Raises:
            DataError: Bad samples are not to be skipped.
        """
        if not self.skip_bad:
            raise DataError(
                f"{name} {problem}: mend or remove it, or leave such out with --data.skip_bad true."
            )
        self.skipped.append(name)

    def column(self, table: Any, option: str, found: list[str]) -> str:
        """The column that an option names, else the first of those found.

        Raises:
            UsageError: There is none; lists the columns there are.
            DataError: There are several of that name.
        """
        given = getattr(self.options, option)
        if given is None and not found or given is not None and given not in table.column_names:
            raise UsageError(
                f"no column {given or option.removesuffix('_column')} in {self.origin}: "
                f"set {self.prefix}.{option} to one of {', '.join(table.column_names)}."
            )
        name = given or found[0]
        if table.column_names.count(name) > 1:
            raise DataError(
                f"{self.origin} has {table.column_names.count(name)} columns {name}: rename or remove one."
            )
        return name

    def check(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with the cells of a JSON object that the source uses; None if nothing is."""
        return None

    def names(self) -> list[str]:
        """The class names as the options call them.

        Raises:
            UsageError: The options name another number of classes, or there are fewer than two.
        """
        own, given = self.class_names, self.options.class_names
        if given is not None and len(given) != len(own):
            raise UsageError(
                f"class_names lists {len(given)} classes, the data have {len(own)}: {listed(own)}."
            )
        names = given or own
        if len(names) < 2:
            raise UsageError(
                f"the data have one class only ({listed(names)}): classification needs at least two."
            )
        return names

    def agree(self, known: list[str]) -> None:
        """Compares the classes with those of a checkpoint.

        Raises:
            UsageError: They differ; names both.
        """
        if (own := self.names()) != known:
            raise UsageError(
                f"the data have {len(own)} classes ({listed(own)}), the checkpoint {len(known)} ({listed(known)}): "
                "use the data that it was trained for."
            )

    def split(self, split: str) -> S:
        """The samples of "train", "val" or "test": the data's own, or held back from the training split.

        Without a validation split, `val_fraction` of each class of the training split is it; without a test split, the
        validation split is tested, with a warning.

        Raises:
            UsageError: There is no training split, or it is too small to hold samples back.
        """
        found = self.records(split)
        if found is not None and (split != "train" or self.has("val")):
            return found
        if split == "test":
            rank_zero_warn("The data have no test split: the validation split is tested instead.")
            return self.split("val")
        train = found if split == "train" else self.records("train")
        if train is None:
            raise UsageError(f"{self.path or 'the data set'} has no training split.")
        first, second = stratified_split(
            train.labels, self.options.val_fraction, self.options.split_seed
        )
        if len(second) == 0:
            raise UsageError(
                f"there are too few training {self.noun} to hold some back: add a validation split."
            )
        return train.select(first if split == "train" else second)


def listed(names: list[str]) -> str:
    """The first ten names, for a message."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


READS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".parquet": "hub",
}
READS |= {
    ".arrow": "hub",
    ".jpg": "folder",
    ".jpeg": "folder",
    ".png": "folder",
}  # a source by the ending of files


def other_source(path: Path, own: tuple[str, ...], endings: Mapping[str, str] = READS) -> str:
    """Which source reads what lies at `path`, as the end of a sentence; empty where none but that of `own` endings."""
    files = path.rglob("*.*") if path.is_dir() else [path]
    source = next(
        (
            endings[file.suffix]
            for file in files
            if file.suffix in endings and file.suffix not in own
        ),
        None,
    )
    return f"; try --data.source {source}" if source else ""
