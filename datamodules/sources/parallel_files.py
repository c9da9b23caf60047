"""Texts in two languages in aligned files: line 5 of train.de translates line 5 of train.en."""

import io
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from datamodules.sources.base import listed
from datamodules.sources.compressed import CODECS, bounded_lines, opened
from datamodules.sources.parallel import Pairs, ParallelSource, hint
from datamodules.sources.text_tables import NOT_TEXT, broken
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import problem, regular_files
from datamodules.utils.splits import split_of

CHUNK = 2**16  # lines that exist as Python objects at a time


class AlignedFiles(ParallelSource):
    """A folder with a file for each split and language: `train.en` and `train.de`; `val` and `test` likewise, where
    given (also valid, dev, test_2016_flickr, ...), plain or as .gz or .zst. Folders in it may be named by split, too.
    """

    unused = {"name", "subset", "header"}

    @property
    def origin(self) -> str:
        return str(self._folder)

    @cached_property
    def _folder(self) -> Path:
        """The folder of the files.

        Raises:
            UsageError: There is none.
        """
        first, second = self.columns
        want = (
            f"--data.path takes a folder of aligned files, such as train.{first} and train.{second}"
        )
        folder = self.place
        if folder is None:
            raise UsageError(f"the source files needs --data.path: {want}.")
        if not folder.is_dir():
            fault = problem(folder) or f"is a file{hint(folder)}"
            raise UsageError(f"{folder} {fault}: {want}.")
        return folder

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split, of the source and of the target.

        Raises:
            UsageError: There are none; or one has no counterpart; or a split has several.
        """
        files: dict[str, list[Path]] = {}
        for stem, by_ending in self._stems().items():
            split, there = (
                split_of(Path(stem)),
                [name for name in self.columns if name in by_ending],
            )
            if not there or split not in ("train", "val", "test"):
                continue
            if split == "test" and self.options.test not in (None, stem):
                continue
            if len(there) == 1:
                (missing,) = set(self.columns) - set(there)
                raise UsageError(
                    f"{self._folder} holds {stem}.{there[0]} but no {stem}.{missing}: there are {stem}."
                    f"{{{','.join(by_ending)}}}; choose with --data.languages."
                )
            if split in files:
                more = "join them" if split != "test" else f"choose with --data.dataset.test {stem}"
                raise UsageError(
                    f"{files[split][0]} and {by_ending[there[0]]} are both of the {split} split: {more}."
                )
            files[split] = [by_ending[name] for name in self.columns]
        self._check(files)
        return files

    def _stems(self) -> dict[str, dict[str, Path]]:
        """The files below the folder by their name without the language, and by the language.

        Raises:
            UsageError: One is there twice, plain and compressed.
        """
        stems: dict[str, dict[str, Path]] = {}
        for path in regular_files(self._folder, self.bad, lambda path: bool(path.suffix)):
            name = path.relative_to(self._folder)
            name = name.with_suffix("") if name.suffix.lower() in CODECS else name
            files, language = stems.setdefault(str(name.with_suffix("")), {}), name.suffix[1:]
            if language in files and language in self.columns:
                raise UsageError(
                    f"{files[language]} and {path} are the same side of the same texts: remove one."
                )
            files[language] = path
        return stems

    def _check(self, files: dict[str, list[Path]]) -> None:
        if not files:
            found = listed(
                sorted(f"{stem}.{name}" for stem, names in self._stems().items() for name in names)
            )
            there, other = f", only {found}" if found else "", hint(self._folder)
            raise UsageError(
                f"{self._folder} holds no train.{self.columns[0]} and train.{self.columns[1]}{there}"
                f"{other or ': choose with --data.path and --data.languages'}."
            )
        if self.options.test is not None and "test" not in files:
            raise UsageError(
                f"{self._folder} holds no {self.options.test}.{self.columns[0]}: set --data.dataset.test."
            )

    def prepare(self) -> None:
        """Nothing to download, but to look whether there are files."""
        _ = self.files

    def has(self, split: str) -> bool:
        return split in self.files

    def read(self, split: str) -> Pairs:
        """The lines of a split's files.

        Raises:
            DataError: The files have not as many lines, are empty or damaged; or see `bad`.
        """
        first, second = self.files[split]
        source, target = self._column(first), self._column(second)
        if len(source) != len(target):
            raise DataError(
                f"{first} has {len(source):,} lines and {second} {len(target):,}: line by line the one must translate "
                "the other."
            )
        if not len(source):
            raise DataError(f"{first} is empty.")
        rows = torch.arange(1, len(source) + 1)
        pairs = Pairs(source, target, rows, f"line {{}} of {first} and {second.name}")
        bad = [side.is_null().to_numpy() for side in (source, target)]
        return (
            pairs.select(torch.from_numpy(~(bad[0] | bad[1])))
            if source.null_count + target.null_count
            else pairs
        )

    def _column(self, path: Path) -> Any:
        """Arrow strings, one for each line; null where bytes are not UTF-8, which is bad."""
        import pyarrow as pa

        lines, parts = self._lines(path), []
        while part := list(islice(lines, CHUNK)):
            parts.append(pa.array(part, pa.large_string()))
        return pa.chunked_array(parts, pa.large_string())

    def _lines(self, path: Path) -> Iterator[str | None]:
        try:
            with io.TextIOWrapper(
                opened(path), "utf-8-sig", errors="surrogateescape", newline="\n"
            ) as file:
                for number, line in enumerate(bounded_lines(file, path), 1):
                    if broken(line):
                        self.bad(f"line {number} of {path}", NOT_TEXT)
                        yield None
                    else:
                        yield line.rstrip("\r\n")
        except (OSError, EOFError) as error:
            reason = str(error).splitlines()[0][:99]
            raise DataError(
                f"{path} cannot be read ({reason}): fetch or write it again."
            ) from error
