"""Folders of files, one folder for each class."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from datamodules.sources.base import S, Source, other_source
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import named, printable, problem, regular_files
from datamodules.utils.splits import SPLITS
from datamodules.vision.records import IMAGE_ENDINGS, Records


class ClassFolders(Source[S]):
    """Base of sources that are files in `train/CLASS/`, at any depth below CLASS; val/ and test/ likewise, if given."""

    endings: tuple[str, ...] = IMAGE_ENDINGS
    example = "*.jpg"
    unused = {"name", "subset", "local", "label_column", "image_column", "text_column"}
    set_aside: tuple[str, ...] = ()  # folders beside the classes that are none

    @cached_property
    def root(self) -> Path:
        """The folder, which holds train/."""
        want = f"a folder with train/CLASS/{self.example}"
        if self.path is None:
            raise UsageError(f"this source needs --data.path: {want}.")
        root = Path(self.path)
        if not root.is_dir():
            fault = problem(root) or "is a file"
            raise UsageError(
                f"{root} {fault}: --data.path takes {want}{other_source(root, self.endings)}."
            )
        return root

    def split_folder(self, split: str) -> Path | None:
        """The folder of a split, where there is one."""
        return next(
            (self.root / name for name in SPLITS[split] if (self.root / name).is_dir()), None
        )

    @cached_property
    def class_names(self) -> list[str]:
        folder = self.split_folder("train")
        if self.options.class_names or folder is None and self.known_names:
            return self.options.class_names or self.known_names or []
        advice = f"put {self.noun} into train/CLASS/, one folder for each class."
        if folder is None:
            raise UsageError(
                f"{self.root} has no folder train/: {advice[:-1]}{other_source(self.root, self.endings)}."
            )
        names = self._class_folders(folder)
        if not names:
            raise UsageError(f"{folder} has no class folders: {advice}")
        return names

    def has(self, split: str) -> bool:
        return self.split_folder(split) is not None

    def _class_folders(self, folder: Path) -> list[str]:
        try:
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            raise DataError(
                f"{folder} cannot be read ({error.strerror}): allow it, or remove the folder."
            ) from error
        classes = [name for name in names if os.path.isdir(folder / name)]
        for name in sorted(set(names) - set(classes)):
            if fault := problem(
                folder / name
            ):  # such as a broken link, which may have been a class
                self.bad(printable(folder / name), fault)
        if strange := next((name for name in classes if named(name)), None):
            raise DataError(
                f"the class folder {printable(folder / strange)} {named(strange)}: rename it."
            )
        return [name for name in classes if name not in self.set_aside]

    def labelled_files(self, folder: Path) -> tuple[list[Path], Tensor]:
        """The files of a split's folder, class by class, and their labels (S,).

        Raises:
            UsageError: There are no files, or a folder that is no class; in the training split, a class without files.
            DataError: A file is of another kind, unless bad files are skipped.
        """
        names = self.class_names
        unknown = sorted(set(self._class_folders(folder)) - set(names))
        if unknown:
            near = get_close_matches(unknown[0], names, 1)
            hint = (
                f"; did you mean {near[0]}?"
                if near
                else f"; the classes are {', '.join(names[:10])}."
            )
            raise UsageError(f"{folder / unknown[0]} is not one of the {len(names)} classes{hint}")
        paths, labels = [], []
        for label, name in enumerate(names):
            files = (
                files_below(folder / name, self.endings, self.bad)
                if os.path.isdir(folder / name)
                else []
            )
            if not files and folder == self.split_folder("train"):
                raise UsageError(
                    f"class {name} is empty: put {self.noun} into {folder / name}, or remove the folder."
                )
            paths += files
            labels += [label] * len(files)
        if not paths:
            raise UsageError(f"{folder} holds no {self.noun}.")
        return paths, torch.tensor(labels, dtype=torch.int64)


class Folder(ClassFolders[Records]):
    """The user's own images: `train/CLASS/*.jpg`, at any depth below CLASS; val/ and test/ likewise, where given."""

    def records(self, split: str) -> Records | None:
        folder = self.split_folder(split)
        if folder is None:
            return None
        paths, labels = self.labelled_files(folder)
        return Records(paths, labels, torch.arange(len(paths)))


def files_below(
    folder: Path, endings: tuple[str, ...], bad: Callable[[str, str], None]
) -> list[Path]:
    """All files with these endings below a folder at any depth, sorted; hidden files are passed over.

    Args:
        folder: Where to look.
        endings: In lower case, such as (".txt",).
        bad: Told the name of whatever else there is, and what is wrong with it; raises, or returns where such are left
            out. See also `regular_files`.
    """
    files = []
    for path in regular_files(folder, bad):
        if path.suffix.lower() in endings:
            files.append(path)
        else:
            bad(str(path), f"is not one of the kinds {', '.join(ending[1:] for ending in endings)}")
    return files
