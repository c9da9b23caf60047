"""Base of all sources of data, and the options that they share."""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import path_fault


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


T = TypeVar("T")


def find_source(sources: Mapping[str, T], name: str) -> T:
    """The entry of that name. Raises `UsageError` if there is none."""
    if name not in sources:
        raise UsageError(f"source is {name}, but must be one of {', '.join(sources)}.")
    return sources[name]


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
    suffixes: tuple[str, ...] = ()  # of the files that it reads, in lower case
    sources_by_suffix: Mapping[str, str] = {}  # the source of this task for other files
    option_prefix = "--data.dataset"  # of its options on the command line

    def __init__(self, path: str | None, options: Any, skip_bad: bool = False) -> None:
        self.path = path
        self.options = options
        self.skip_bad = skip_bad
        self.skipped: list[str] = []  # names of the samples that were skipped

    @property
    def origin(self) -> str:
        """Where the samples were read from."""
        return self.path or "embedded"

    @property
    def local_path(self) -> Path | None:
        """The path that the user gave, else the folder with these data below TESSERA_DATA."""
        if self.path is not None:
            return Path(self.path)
        root = os.environ.get("TESSERA_DATA")
        if not root or not self.options.local:
            return None
        folder = Path(root, self.options.local)
        return folder if folder.is_dir() else None

    def prepare(self) -> None:
        """Downloads what is missing; called on one process only.

        Raises `UsageError` if a path is named, but these data come with the program.
        """
        if self.embedded and self.path is not None:
            others = " or ".join(dict.fromkeys(self.sources_by_suffix.values()))
            hint = self.suggest_source(Path(self.path)) or f"; try --data.source {others}"
            raise UsageError(
                f"--data.path is {self.path}, but the {self.noun} are not read from files{hint}."
            )

    def has(self, split: str) -> bool:
        """Whether the data have this split of their own."""
        raise NotImplementedError

    # Samples that cannot be used.

    def reject(self, name: str, fault: str) -> None:
        """Counts a sample that cannot be used.

        Raises `DataError` if bad samples are not to be skipped.
        """
        if not self.skip_bad:
            advice = "fix or remove it, or skip such data with --data.skip_bad true"
            raise DataError(f"{name} {fault}: {advice}.")
        self.skipped.append(name)

    # Files and columns.

    def require_path(self, wanted: str, folder: bool = False) -> Path:
        """The file or folder to read, or with `folder` only a folder.

        Raises `UsageError` if there is none; it says that `wanted` is expected.
        """
        path = self.local_path
        if path is None:
            raise UsageError(f"this source needs --data.path: {wanted}.")
        fault = None if path.is_dir() else path_fault(path)
        if path.is_file() and folder:
            fault = "is a file"
        if fault is not None:
            hint = self.suggest_source(path)
            raise UsageError(f"{path} {fault}: --data.path takes {wanted}{hint}.")
        return path

    def suggest_source(self, path: Path) -> str:
        """End of a sentence that names the source for the files at `path`; empty if none does."""
        for file in path.rglob("*.*") if path.is_dir() else [path]:
            if file.suffix in self.sources_by_suffix and file.suffix not in self.suffixes:
                return f"; try --data.source {self.sources_by_suffix[file.suffix]}"
        return ""

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
            candidates: Names of columns, the likeliest first.
            fits: Whether the column may have an Arrow type.
            content: What it must hold, for messages.
            advice: What else may help if the column is missing.

        Raises:
            UsageError: The table has none of them, or it has another type.
            DataError: It has several of that name.
        """
        fitting = [field.name for field in schema if fits(field.type)]
        choose = f"no column holds {content}"
        if fitting:
            choose = f"set {self.option_prefix}.{option} to one of {', '.join(fitting)}"
        name = next((name for name in candidates if name in schema.names), None)
        if name is None:
            wanted = candidates[0] if candidates else f"of {content}"
            columns = ", ".join(schema.names)
            raise UsageError(f"no column {wanted} in {self.origin} ({columns}): {choose}{advice}.")
        if schema.names.count(name) > 1:
            raise DataError(f"{self.origin} has several columns {name}: rename or remove one.")
        kind = schema.field(name).type
        if not fits(kind):
            raise UsageError(
                f"column {name} of {self.origin} holds {str(kind)[:40]}, not {content}: {choose}."
            )
        return name


def shortened(names: list[str]) -> str:
    """The first ten names, for a message."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
