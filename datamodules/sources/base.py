"""Base of all sources of data, and the options that they share."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.readers.formats import uncompressed_suffix
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import (
    DATASETS_FILES,
    MISSING,
    did_you_mean,
    is_ignored_folder,
    path_fault,
    printable,
)
from datamodules.utils.splits import split_of

PLACEHOLDER = "FILE_OR_FOLDER_OR_HUB_ID"  # --data.path of the recipes for any text
MAX_NAME = 40  # characters of the name of a column; a longer one is a sample in a first line


@dataclass(frozen=True)
class HubOptions:
    """Which data set of the Hugging Face hub to read, or which copy of one.

    Args:
        name: Id on the hub, for the source hub, such as stanfordnlp/imdb.
        subset: Part of that data set if it has several, such as de-en of wmt/wmt16.
        local: Folder below the one that the environment variable TESSERA_DATA names, read instead
            of the hub.
    """

    name: str | None = None
    subset: str | None = None
    local: str | None = None


def local_path(path: str | None, options: Any) -> Path | None:
    """The path that the user gave, else the folder with these data below TESSERA_DATA."""
    if path is not None:
        return Path(path)
    root = os.environ.get("TESSERA_DATA")
    if not root or not options.local:
        return None
    folder = Path(root, options.local)
    part = folder / (options.subset or "")  # a repository of the hub may have a folder for each
    return next((path for path in (part, folder) if path.is_dir()), None)


class Source:
    """Base: where data are read from, and what is wrong with them.

    Args:
        path: File or folder that the user gave, or None.
        options: A `HubOptions`, or a class with more.
        skip_bad: Skip files and rows that cannot be used, and count them.
    """

    noun = "images"  # what the samples are called in messages
    unused_options: Set[str] = frozenset()  # options that this source ignores
    embedded = False  # whether the samples come with the program
    is_fallback = False  # whether a path is read only if no other source reads it
    suffixes: tuple[str, ...] = ()  # of the files that it reads, in lower case
    example = ""  # such a file in messages, such as train.csv
    name = ""  # of this source among those of its task
    alternatives: Mapping[str, type["Source"]] = {}  # the sources of its task, by name
    option_prefix = "--data.dataset."  # of its options on the command line
    path_option = "--data.path"  # the option that names its path
    skip_advice = ", or skip such data with --data.skip_bad true"  # of messages about bad samples
    recorded_by: str | None = None  # the run or checkpoint that has the path; None: it was given
    unseen = False  # whether a model is evaluated that was trained on other data

    def __init__(self, path: str | None, options: Any, skip_bad: bool = False) -> None:
        self.path = path
        self.options = options
        self.skip_bad = skip_bad
        self.skipped: list[str] = []  # names of the samples that were skipped
        self._warned: set[str] = set()  # what the user was told
        self._columns: dict[str, str] = {}  # that were found, by the option that chooses them

    @classmethod
    def reads(cls, file: Path) -> bool:
        """Whether the name of a file, relative to the folder of the data, says that it is read."""
        return uncompressed_suffix(file) in cls.suffixes

    @property
    def origin(self) -> str:
        """Where the samples were read from."""
        if self.embedded:
            return self.name
        return str(self.local_path or self.options.name or self.name)

    @property
    def local_path(self) -> Path | None:
        """As of the function of this name."""
        return local_path(self.path, self.options)

    def prepare(self) -> None:
        """Downloads what is missing; called on one process only.

        Raises `UsageError` if a path is named, but these data come with the program.
        """
        if self.embedded and self.path is not None:
            raise UsageError(
                f"{self.path_option} is {self.path}, but the {self.noun} are not read from files"
                f"{self.suggest_source(Path(self.path)) or '; leave --data.source out'}."
            )

    def has(self, split: str) -> bool:
        """Whether the data have this split of their own."""
        raise NotImplementedError

    def is_held_out(self, split: str) -> bool:
        """Whether "val" or "test" is a part of the training split, for want of one of its own."""
        return not (self.is_evaluated_whole(split) or self.has(split) or self.has("val"))

    def is_evaluated_whole(self, split: str) -> bool:
        """Whether all samples are "val" or "test": of unseen data that are not split."""
        return self.unseen and split != "train" and not (self.has("val") or self.has("test"))

    def warn_untested(self) -> None:
        """Says once that the data have no test split."""
        self.warn_once("The data have no test split: the validation split is tested instead.")

    def warn_once(self, message: str) -> None:
        """Warns, unless this source has done so."""
        if message not in self._warned:
            rank_zero_warn(message)
        self._warned.add(message)

    # Samples that cannot be used.

    def reject(self, name: str, fault: str) -> None:
        """Counts a sample that cannot be used.

        Raises `DataError` if bad samples are not to be skipped.
        """
        if not self.skip_bad:
            advice = f"fix or remove it{self.skip_advice}"
            if name == str(self.local_path):  # without this file there are no samples
                advice = "fix it, or give another file"
            raise DataError(f"{name} {fault}: {advice}.")
        self.skipped.append(name)

    # Files and columns.

    def require_path(self, wanted: str, folder: bool = False) -> Path:
        """The file or folder to read, or with `folder` only a folder.

        Raises `UsageError` if there is none; it says that `wanted` is expected.
        """
        path = self.local_path
        if path is None:
            raise UsageError(f"this source needs {self.path_option}: {wanted}.")
        fault = None if path.is_dir() else path_fault(path)
        if path.is_file() and folder:
            fault = "is a file"
        if fault == MISSING and self.recorded_by is not None:
            relative = "" if path.is_absolute() else ", relative to the folder where it was started"
            raise UsageError(
                f"{printable(path)} {MISSING}: {self.recorded_by} was trained with this path"
                f"{relative}; if the data were moved, add {self.path_option} with their place."
            )
        if fault == MISSING:
            raise UsageError(missing_path(path, self.alternatives, self.path_option, wanted))
        if fault is not None:
            hint = self.suggest_source(path)
            raise UsageError(f"{path} {fault}: {self.path_option} takes {wanted}{hint}.")
        return path

    def suggest_source(self, path: Path) -> str:
        """End of a sentence that names the source for the files at `path`; empty if none does."""
        names = [name for name in sources_at(self.alternatives, path) if name != self.name]
        return f"; try --data.source {' or '.join(names)}" if names else ""

    def find_column(
        self,
        schema: Any,
        option: str,
        candidates: Sequence[str],
        fits: Callable[[Any], bool],
        content: str,
        advice: str = "",
    ) -> str:
        """The first of `candidates` that is a column of a table.

        Args:
            schema: Arrow schema of the table.
            option: Name of the option that chooses the column, for messages.
            candidates: Names of columns, the most likely first.
            fits: Whether the column may have an Arrow type.
            content: What it must hold, for messages.
            advice: What else may help if the column is missing.

        Raises:
            UsageError: The table has none of them, it has another type, or another option chooses
                it, too.
            DataError: It has several of that name.
        """
        chosen = [column for other, column in self._columns.items() if other != option]
        fitting = [field.name for field in schema if fits(field.type) and field.name not in chosen]
        choose = f"no other column holds {content}"
        if fitting:
            choose = f"set {self.option_prefix}{option} to {' or '.join(fitting)}"
        lower = [name.lower() for name in candidates]
        if similar := [name for name in fitting if name.lower() in lower]:
            choose = f"set {self.option_prefix}{option} {similar[0]}"
        name = next((name for name in candidates if name in schema.names), None)
        if name is None:
            wanted = candidates[0] if candidates else f"of {content}"
            columns = shortened([brief(name) for name in schema.names])
            if ".csv" in self.suffixes and not similar:
                has_samples = any(len(name) > MAX_NAME for name in schema.names)
                header = "name the columns in the first line of the file"
                choose = header if has_samples or not fitting else f"{choose}, or {header}"
            raise UsageError(f"no column {wanted} in {self.origin} ({columns}): {choose}{advice}.")
        if schema.names.count(name) > 1:
            raise DataError(f"{self.origin} has several columns {name}: rename or remove one.")
        kind = schema.field(name).type
        if not fits(kind):
            raise UsageError(
                f"column {name} of {self.origin} holds {str(kind)[:40]}, not {content}: {choose}."
            )
        for other, column in self._columns.items():
            if column == name and other != option:
                raise UsageError(
                    f"column {name} of {self.origin} is both {other} and {option}: set "
                    f"{self.option_prefix}{other} or {option} to another column."
                )
        self._columns[option] = name
        return name

    def chosen_columns(self) -> str:
        """The columns of tables that are read, as "text column review, label column label"."""
        options = sorted(self._columns, key=lambda option: option == "label_column")
        return ", ".join(
            f"{option.replace('_', ' ')} {self._columns[option]}" for option in options
        )


class OwnSource(Source):
    """The source of a datamodule that makes or reads its samples itself, and has all splits."""

    def __init__(self, name: str) -> None:
        super().__init__(None, HubOptions())
        self.name = name

    @property
    def origin(self) -> str:
        return self.name

    def has(self, split: str) -> bool:
        return True


def missing_path(
    path: Path, sources: Mapping[str, type[Source]], option: str, wanted: str = ""
) -> str:
    """The message about a path where nothing is, with the nearest name in its folder.

    `sources` are all that the task reads; if there are none, `option` takes what is `wanted`.
    """
    takes = f"{wanted}." if not sources else accepted_paths(sources)
    if path.name == PLACEHOLDER:
        return f"{PLACEHOLDER} stands for your data: {option} takes {takes}"
    hint = did_you_mean(path)
    return f"{printable(path)} {MISSING}{hint}: {option} takes {takes}"


def accepted_paths(sources: Mapping[str, type[Source]]) -> str:
    """What --data.path takes, as the end of a message."""
    kinds = [f"{source.example} ({name})" for name, source in sources.items() if source.example]
    hub_id = "uoft-cs/cifar10" if "digits" in sources else "stanfordnlp/imdb"
    return (
        f"a path such as {' or '.join(kinds)}, or an id of the hub such as {hub_id}; or set "
        "--data.source."
    )


def sources_at(sources: Mapping[str, type[Source]], path: Path) -> dict[str, Path]:
    """Names of the sources that read what lies at `path`, and a file that each of them reads.

    In a folder, only files that are named by split count, if some are: a README may lie beside.
    Sources with `is_fallback` are left out if there are others.
    """
    by_split: dict[str, Path] = {}
    others: dict[str, Path] = {}
    for file in files_at(path):
        found = others if split_of(file) is None else by_split
        for name, source in sources.items():
            if name not in found and source.reads(file):
                found[name] = file
    found = by_split or others
    preferred = [name for name in found if not sources[name].is_fallback] or found
    return {name: found[name] for name in sources if name in preferred}


def files_at(path: Path) -> Iterator[Path]:
    """A file, or those below a folder, relative to it; of many of a kind in a folder, a few."""
    if not path.is_dir():
        yield Path(path.name)
    for root, folders, names in os.walk(path, followlinks=True):
        folder = Path(root).relative_to(path)
        folders[:] = sorted(name for name in folders if not is_ignored_folder(name))
        if len(folder.parts) > 1:  # links are followed where splits and classes may lie
            folders[:] = [name for name in folders if not Path(root, name).is_symlink()]
        visible = sorted(n for n in names if not n.startswith(".") and n not in DATASETS_FILES)
        if folder.parts:  # one of each kind and split is enough
            kinds = {(split_of(Path(n)), *n.rsplit(".", 2)[1:]): n for n in reversed(visible)}
            visible = sorted(kinds.values())
        yield from (folder / name for name in visible)


def unknown_splits(root: Path, files: list[Path], total: int) -> str:
    """The warning that some of the files below a folder belong to no split."""
    names = shortened([str(path) for path in files])
    count = f"{len(files)} of {total} files"
    return f"{root}: left out {count}, of which the split is unknown: {names}."


def shortened(names: list[str]) -> str:
    """The first ten names, for a message."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def brief(name: str) -> str:
    """The beginning of a name, for a message."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
