"""Folders of files, one folder for each class."""

import os
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from datamodules.sources.base import shortened
from datamodules.sources.labelled import LabelledSource, S
from datamodules.sources.readers.formats import Reject
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import name_fault, path_fault, printable, regular_files
from datamodules.utils.splits import SPLITS


class ClassFolders(LabelledSource[S]):
    """Base of sources that are files in `train/CLASS/`, at any depth; likewise val/ and test/."""

    example: str  # name of a file in messages, such as 1.png
    unused_options = {"name", "subset", "local", "label_column", "image_column", "text_column"}
    no_classes: tuple[str, ...] = ()  # names of folders that are not classes

    @cached_property
    def root(self) -> Path:
        """The folder that holds train/."""
        return self.require_path(f"a folder with train/CLASS/{self.example}", folder=True)

    def split_folder(self, split: str) -> Path | None:
        """The folder of a split, if there is one."""
        folders = [self.root / name for name in SPLITS[split]]
        return next((folder for folder in folders if folder.is_dir()), None)

    @cached_property
    def class_names(self) -> list[str]:
        folder = self.split_folder("train")
        if self.options.class_names:
            return list(self.options.class_names)
        if folder is None and self.checkpoint_classes:
            return self.checkpoint_classes
        names = self._class_folders(folder) if folder is not None else []
        if not names:
            fault = "has no folder train/" if folder is None else "has no class folders in train/"
            raise UsageError(
                f"{self.root} {fault}: put {self.noun} into train/CLASS/, one folder for each "
                f"class{self.suggest_source(self.root)}."
            )
        return names

    def has(self, split: str) -> bool:
        return self.split_folder(split) is not None

    def _class_folders(self, folder: Path) -> list[str]:
        try:
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            advice = "allow it, or remove the folder"
            raise DataError(f"{folder} cannot be read ({error.strerror}): {advice}.") from error
        classes = []
        for name in names:
            path = folder / name
            if not path.is_dir():
                fault = path_fault(path)
                if fault:  # such as a broken link, which may have been a class
                    self.reject(printable(path), fault)
            elif fault := name_fault(name):
                raise DataError(f"the class folder {printable(path)} {fault}: rename it.")
            elif name not in self.no_classes:
                classes.append(name)
        return classes

    def labelled_files(self, folder: Path) -> tuple[list[Path], Tensor]:
        """The files of a split's folder, class by class, and their labels (S,).

        Raises `UsageError` if there are no files, if a folder is no class, or if a class of the
        training split has no files; `DataError` if a file is of another kind and bad files are not
        skipped.
        """
        names = self.class_names
        unknown = [name for name in self._class_folders(folder) if name not in names]
        if unknown:
            similar = get_close_matches(unknown[0], names, 1)
            hint = f"did you mean {similar[0]}?" if similar else f"they are {shortened(names)}."
            raise UsageError(
                f"{folder / unknown[0]} is not one of the {len(names)} classes; {hint}"
            )
        paths = []
        labels = []
        for label, name in enumerate(names):
            files = []
            if (folder / name).is_dir():
                files = files_below(folder / name, self.suffixes, self.reject)
            if not files and folder == self.split_folder("train"):
                chosen = self.options.class_names
                needless = "it from --data.dataset.class_names" if chosen else "the folder"
                raise UsageError(
                    f"class {name} has no {self.noun}: put some into {folder / name}, or remove "
                    f"{needless}."
                )
            paths += files
            labels += [label] * len(files)
        if not paths:
            raise UsageError(f"{folder} holds no {self.noun}.")
        return paths, torch.tensor(labels, dtype=torch.int64)


def files_below(folder: Path, suffixes: tuple[str, ...], reject: Reject) -> list[Path]:
    """All files with these suffixes (in lower case) below a folder at any depth, sorted.

    Hidden ones are ignored; `reject` is called for other suffixes and for what cannot be read.
    """
    files = []
    for path in regular_files(folder, reject):
        if path.name.lower().endswith(suffixes):
            files.append(path)
        else:
            reject(str(path), f"is not one of the kinds {', '.join(suffixes)}")
    return files
