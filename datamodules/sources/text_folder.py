"""Texts in .txt files."""

import re
from functools import cached_property
from pathlib import Path

import torch

from datamodules.sources.folder import ClassFolders, files_below
from datamodules.sources.texts import Texts, TextSource, arrow_texts
from datamodules.utils.errors import UsageError
from datamodules.utils.files import printable, problem, read_bytes
from datamodules.utils.splits import SPLITS


class TextFolder(ClassFolders[Texts], TextSource):
    """A text in each file, a folder for each class: `train/CLASS/*.txt`; val/ and test/ likewise, where given.

    Texts without a class may lie in `unsupervised/`, or below train/ in a folder of that name (unsup, unlabelled).
    """

    endings, example = (".txt",), "*.txt"
    set_aside = SPLITS["unlabelled"]

    def split_folder(self, split: str) -> Path | None:
        folder = super().split_folder(split)
        if folder is None and split == "unlabelled" and (train := super().split_folder("train")):
            return next((train / name for name in self.set_aside if (train / name).is_dir()), None)
        return folder

    def read(self, split: str) -> Texts:
        folder = self.split_folder(split)
        assert folder is not None
        if split == "unlabelled":
            paths = files_below(folder, self.endings, self.bad)
            return self.read_files(paths, torch.zeros(len(paths), dtype=torch.int64))
        return self.read_files(*self.labelled_files(folder))

    def read_files(self, paths: list[Path], labels: torch.Tensor) -> Texts:
        """The texts in some files; one that is not UTF-8 is bad."""
        texts, good = [], []
        for i, path in enumerate(paths):
            if (text := self.decoded(path)) is not None:
                texts.append(text)
                good.append(i)
        return Texts(arrow_texts(texts), labels[good], torch.tensor(good, dtype=torch.int64), paths)

    def decoded(self, path: Path) -> str | None:
        """A file's text; None where it is bad."""
        try:
            content = read_bytes(path)
        except OSError as error:
            self.bad(printable(path), f"cannot be read ({error.strerror})")
            return None
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            self.bad(printable(path), f"holds bytes that are not UTF-8 in line {line}")
            return None


class PlainTexts(TextFolder):
    """Texts to pretrain on: a file whose documents are parted by empty lines, or a folder with a document in each file.

    A folder with `train/CLASS/` is read as `TextFolder` reads it, hence with the same validation texts.
    """

    @cached_property
    def _plain(self) -> Path | None:
        """The file or folder, where it is not one of splits and classes."""
        path = Path(self.path or "")
        fault = (
            "needs --data.path" if self.path is None else None if path.is_dir() else problem(path)
        )
        if fault:
            raise UsageError(
                f"{self.path or 'this source'} {fault}: --data.path takes a .txt file, or a folder of such files."
            )
        return path if path.is_file() or super().split_folder("train") is None else None

    def has(self, split: str) -> bool:
        return split == "train" if self._plain else super().has(split)

    def read(self, split: str) -> Texts:
        path = self._plain
        if path is None:
            return super().read(split)
        if path.is_dir():
            if not (paths := files_below(path, self.endings, self.bad)):
                raise UsageError(f"{path} holds no {', '.join(self.endings)} files.")
            return self.read_files(paths, torch.zeros(len(paths), dtype=torch.int64))
        parts = re.split(r"\n\s*\n", (self.decoded(path) or "").strip())
        labels, rows = torch.zeros(len(parts), dtype=torch.int64), torch.arange(1, len(parts) + 1)
        return Texts(arrow_texts(parts), labels, rows, f"document {{}} of {path}")
