"""Texts in two languages in aligned files: line 5 of train.de translates line 5 of train.en."""

from functools import cached_property
from itertools import islice
from pathlib import Path

import pyarrow as pa
import torch

from datamodules.sources.base import shortened
from datamodules.sources.parallel import ParallelSource
from datamodules.sources.readers.formats import (
    COMPRESSION,
    open_decompressed,
    read_errors,
    read_lines,
    uncompressed_suffix,
)
from datamodules.sources.readers.tables import ARROW, CSV, JSON_LINES
from datamodules.sources.texts import TextSamples, text_samples
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import regular_files
from datamodules.utils.splits import split_of

LINES_AT_ONCE = 2**16  # lines that exist as Python objects at a time


class AlignedFiles(ParallelSource):
    """A folder with a file for each split and language.

    Validation and test files are called val, valid, dev, test_2016_flickr, ...; all may be
    compressed as .gz or .zst, and folders may be named by split instead.
    """

    example = "train.en and train.de"
    unused_options = {"name", "subset", "header"}

    @classmethod
    def reads(cls, file: Path) -> bool:
        """Any suffix may be that of a language, except those of tables."""
        suffix = uncompressed_suffix(file)
        is_table = suffix in (*CSV, *JSON_LINES, *ARROW)
        return bool(suffix) and not is_table and split_of(file) is not None

    @cached_property
    def _folder(self) -> Path:
        first, second = self.columns
        wanted = f"a folder of aligned files, such as train.{first} and train.{second}"
        return self.require_path(wanted, folder=True)

    @cached_property
    def files(self) -> dict[str, tuple[Path, Path]]:
        """The source file and the target file of each split.

        Raises `UsageError` if there are none; or one has no counterpart; or a split has several.
        """
        files: dict[str, tuple[Path, Path]] = {}
        found = self._files_by_stem()
        for stem, by_language in found.items():
            split = split_of(Path(stem))
            present = [name for name in self.columns if name in by_language]
            if not present or split not in ("train", "val", "test"):
                continue
            if split == "test" and self.options.test not in (None, stem):
                continue
            if len(present) == 1:
                (missing,) = set(self.columns) - set(present)
                raise UsageError(
                    f"{self._folder} holds {stem}.{present[0]} but no {stem}.{missing}: there are "
                    f"{stem}.{{{','.join(by_language)}}}; choose with --data.languages."
                )
            source, target = (by_language[name] for name in self.columns)
            if split in files:
                test = f"choose with --data.dataset.test {stem}"
                advice = test if split == "test" else "join them"
                raise UsageError(
                    f"{files[split][0]} and {source} are both of the {split} split: {advice}."
                )
            files[split] = (source, target)
        if not files:
            names = sorted(f"{stem}.{name}" for stem in found for name in found[stem])
            only = f", only {shortened(names)}" if names else ""
            hint = self.suggest_source(self._folder)
            hint = hint or ": choose with --data.path and --data.languages"
            first, second = self.columns
            raise UsageError(
                f"{self._folder} holds no train.{first} and train.{second}{only}{hint}."
            )
        if self.options.test is not None and "test" not in files:
            name = f"{self.options.test}.{self.columns[0]}"
            raise UsageError(f"{self._folder} holds no {name}: set --data.dataset.test.")
        return files

    def _files_by_stem(self) -> dict[str, dict[str, Path]]:
        """The files below the folder by their name without the language, and by the language.

        Raises `UsageError` if one is there twice, plain and compressed.
        """
        stems: dict[str, dict[str, Path]] = {}
        for path in regular_files(self._folder, self.reject, lambda path: bool(path.suffix)):
            name = path.relative_to(self._folder)
            if name.suffix.lower() in COMPRESSION:
                name = name.with_suffix("")
            files = stems.setdefault(str(name.with_suffix("")), {})
            language = name.suffix[1:]
            if language in files and language in self.columns:
                raise UsageError(
                    f"{files[language]} and {path} are the same side of the same texts: remove one."
                )
            files[language] = path
        return stems

    def languages_there(self) -> list[str]:
        """The suffixes of the training files."""
        stems = self._files_by_stem()
        found = [stems[stem] for stem in stems if split_of(Path(stem)) == "train"]
        return sorted(set().union(*found))

    def prepare(self) -> None:
        """Checks that there are files; nothing is downloaded."""
        _ = self.files

    def has(self, split: str) -> bool:
        return split in self.files

    def read(self, split: str) -> TextSamples:
        """The lines of a split's files.

        Raises `DataError` if the files differ in their number of lines, are empty or damaged.
        """
        first, second = self.files[split]
        source = self._read_column(first)
        target = self._read_column(second)
        if len(source) != len(target):
            raise DataError(
                f"{first} has {len(source):,} lines, but {second} {len(target):,}: each line of "
                "one file must translate the same line of the other."
            )
        if not len(source):
            raise DataError(f"{first} has no lines.")
        rows = torch.arange(1, len(source) + 1)
        where = f"line {{}} of {first} and {second.name}"
        pairs = text_samples(source, rows, where, targets=target)
        if source.null_count + target.null_count == 0:
            return pairs
        return pairs.select(~pairs.find(lambda column: torch.tensor(column.is_null().to_pylist())))

    def _read_column(self, path: Path) -> pa.ChunkedArray:
        """Arrow strings, one for each line; null for a rejected line that is not UTF-8."""
        chunks = []
        with read_errors(path), open_decompressed(path) as file:
            lines = read_lines(file, path, self.reject)
            while part := list(islice(lines, LINES_AT_ONCE)):
                chunks.append(pa.array(part, pa.large_string()))
        return pa.chunked_array(chunks, pa.large_string())
