"""Folders of files, one folder for each class."""

import os
import re
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from datamodules.sources.base import shortened, unknown_splits
from datamodules.sources.labelled import LabelledSource, S
from datamodules.sources.readers.formats import COMPRESSION, Reject
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import (
    is_ignored_folder,
    name_fault,
    path_fault,
    printable,
    regular_files,
)
from datamodules.utils.splits import SPLITS, split_of

SPLIT_FOLDERS = frozenset(chain.from_iterable(SPLITS.values()))
HELD_OUT = re.compile(r"[-_.](valid(ation)?|val|dev|test)[-_.]")  # in names of files
SPELLINGS = {"training": "train", "testing": "test"}  # other names of splits


class ClassFolders(LabelledSource[S]):
    """Base of sources that are files in `train/CLASS/`, at any depth; likewise val/ and test/.

    Without a folder of a split, the folders of the classes are those of the training split.
    """

    unused_options = {"name", "subset", "label_column", "image_column", "text_column"}
    table = "a table with the texts and labels, such as train.csv"  # that holds classes, too
    no_classes: tuple[str, ...] = ()  # names of folders that are not classes
    needs_train = False  # whether the folders of the classes must lie in that of a split

    @classmethod
    def reads(cls, file: Path) -> bool:
        is_in_split = file.parts[0] in SPLIT_FOLDERS
        depth = 3 if is_in_split and file.parts[0] not in cls.no_classes else 2
        is_placed = len(file.parts) >= depth and (is_in_split or not cls.needs_train)
        return is_placed and file.suffix.lower() in cls.suffixes

    @classmethod
    def missing_class_folders(cls, path: Path) -> str | None:
        """The message about files that lie in no folder of a class; None: there are none."""
        noun = cls.noun.removesuffix("s")
        if not path.is_dir():
            if not path.is_file() or path.suffix.lower() not in cls.suffixes:
                return None
            fault = f"is one {noun} without a class: give a folder with {cls.example}"
        else:
            files = regular_files(path, lambda *_: None, lambda f: f.suffix.lower() in cls.suffixes)
            if not files:
                return None
            plural = "s" * (len(files) != 1)
            fault = f"holds {len(files):,} {noun}{plural} but no class folders: put the "
            fault += f"{cls.noun} of each class into a folder of its own, {cls.example}"
        return f"{printable(path)} {fault}; or give {cls.table}."

    @cached_property
    def root(self) -> Path:
        """The folder that holds train/, or the folders of the classes."""
        return self.require_path(f"a folder with {self.example}", folder=True)

    @cached_property
    def split_folders(self) -> dict[str, Path]:
        """The folder of each split that the data have. Raises `UsageError` if there are two.

        Other spellings, such as Train or testing, count if each folder is a split with folders of
        classes: else one may be a class, such as Train beside Bus.
        """
        paths = [self.root / name for name in self._names(self.root)]
        folders = {path.name: path for path in paths if path.is_dir()}
        renamed = {SPELLINGS.get(name.lower(), name.lower()): folders[name] for name in folders}
        are_splits = len(renamed) == len(folders) and renamed.keys() <= SPLIT_FOLDERS
        is_respelled = are_splits and renamed.keys() != folders.keys()
        if is_respelled and all(self._class_folders(path) for path in folders.values()):
            folders = renamed
        found = {}
        for split, names in SPLITS.items():
            named = [folders[name] for name in names if name in folders]
            filled = {path.resolve(): path for path in named if self._class_folders(path)}
            if len(filled) > 1:
                first, second, *_ = filled.values()
                raise UsageError(f"{first} and {second} are both of the {split} split: join them.")
            if named:
                found[split] = named[0]
        if not found and not self.needs_train:
            return {"train": self.root}
        others = [path for path in folders.values() if path.name not in SPLIT_FOLDERS]
        others = [path for path in others if path not in found.values() and self._holds_some(path)]
        if others:
            listed = shortened([f"{path.name}/" for path in others])
            self.warn_once(
                f"{self.root}: {listed} belong to no split and are left out: name folders of "
                "splits train, val or test."
            )
        return found

    def _holds_some(self, folder: Path) -> bool:
        """Whether a folder holds a file of the kinds that are read, at any depth."""
        return any(
            name.lower().endswith(self.suffixes) for *_, names in os.walk(folder) for name in names
        )

    def split_folder(self, split: str) -> Path | None:
        """The folder of a split, if there is one."""
        return self.split_folders.get(split)

    @cached_property
    def class_names(self) -> list[str]:
        if self.options.class_names:
            return list(self.options.class_names)
        folder = self.split_folder("train")
        names = self._class_folders(folder) if folder is not None else []
        tested = self.tested_classes
        if tested and set(names) <= set(tested):
            return tested
        if not names:
            fault = f"{folder} has no class folders"
            if folder is None:
                beside = "".join(f", only {path.name}/" for path in self.split_folders.values())
                fault = f"{self.root} has no folder train/{beside}"
            raise UsageError(
                f"{fault}: put {self.noun} into {self.root / 'train/CLASS'}/, one folder for each "
                f"class{self.suggest_source(self.root)}."
            )
        return names

    def has(self, split: str) -> bool:
        return self.split_folder(split) is not None

    @property
    def is_one_class(self) -> bool:
        """Whether all training samples lie in the folder of one class."""
        folder = self.split_folder("train")
        if folder is None:
            return False
        found = [path for path in folder.iterdir() if not is_ignored_folder(path.name)]
        return sum(path.is_dir() for path in found) == 1

    @property
    def more_classes(self) -> str:
        return (
            f"put the {self.noun} of each class into a folder of its own in "
            f"{self.split_folder('train')}, or name another with {self.path_option} that holds "
            "such folders"
        )

    def _names(self, folder: Path) -> list[str]:
        """What a folder holds, sorted, without what is ignored."""
        try:
            return sorted(name for name in os.listdir(folder) if not is_ignored_folder(name))
        except OSError as error:
            advice = "allow it, or remove the folder"
            raise DataError(f"{folder} cannot be read ({error.strerror}): {advice}.") from error

    def _class_folders(self, folder: Path) -> list[str]:
        classes = []
        for name in self._names(folder):
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
            raise UsageError(self._unknown_class(folder, unknown[0]))
        paths = []
        labels = []
        for label, name in enumerate(names):
            files = []
            if (folder / name).is_dir():
                files = files_below(folder / name, self.suffixes, self.reject)
            if not files and self.needs_every_class and folder == self.split_folder("train"):
                chosen = self.options.class_names
                needless = "the folder"
                if chosen:
                    needless = "it from --data.dataset.class_names and from the other splits"
                raise UsageError(
                    f"class {name} has no {self.noun}: put some into {folder / name}, or remove "
                    f"{needless}."
                )
            paths += files
            labels += [label] * len(files)
        if not paths:
            raise UsageError(f"{folder} holds no {self.noun}: add some, or remove the folder.")
        return paths, torch.tensor(labels, dtype=torch.int64)

    def _unknown_class(self, folder: Path, name: str) -> str:
        """What is wrong with a class folder of a split, and what to do."""
        names = self.class_names
        train = self.split_folder("train")
        similar = get_close_matches(name, names, 1)
        advice = [f"rename it to {similar[0]}"] if similar else []
        if folder == train:
            advice.append("for a new training add it to --data.dataset.class_names")
        elif train is not None:
            advice.append(f"put training {self.noun} into {train / name}")
        fault = f"is not one of the {len(names)} classes ({shortened(names)})"
        return f"{folder / name} {fault}: {', '.join([*advice, 'or remove it'])}."


def files_below(folder: Path, suffixes: tuple[str, ...], reject: Reject) -> list[Path]:
    """All files with these suffixes (in lower case) below a folder at any depth, sorted.

    Hidden ones are ignored; `reject` is called for other suffixes and for what cannot be read.
    """
    return of_kinds(regular_files(folder, reject), suffixes, reject)


def of_kinds(paths: list[Path], suffixes: tuple[str, ...], reject: Reject) -> list[Path]:
    """The paths with these suffixes; `reject` is called for others."""
    files = []
    for path in paths:
        if path.name.lower().endswith(suffixes):
            files.append(path)
        else:
            reject(str(path), f"is not one of the kinds {', '.join(suffixes)}")
    return files


def files_by_split(root: Path, suffixes: tuple[str, ...], reject: Reject) -> dict[str, list[Path]]:
    """A file, or those with these suffixes below a folder at any depth, by split.

    The first part of a path that is called as a split, with or without more after a dash or a dot,
    says which one it is of, if there are any called train; files of no split are then left out,
    with a warning. Else all is training data. Hidden files are ignored; `reject` is called for
    other suffixes and for what cannot be read. Raises `UsageError` if there are no files.
    """
    if not root.is_dir():
        if not root.name.lower().endswith(suffixes):
            raise UsageError(f"{root} is not one of the kinds {', '.join(suffixes)}.")
        return {"train": [root]}
    paths = regular_files(root, reject)
    named: dict[str | None, list[Path]] = {}
    for path in paths:
        named.setdefault(split_of(path.relative_to(root)), []).append(path)
    if not any(path.name.lower().endswith(suffixes) for path in named.get("train", [])):
        named = {"train": paths}
        texts = [path for path in paths if path.name.lower().endswith(suffixes)]
        held_out = [str(path) for path in texts if HELD_OUT.search(path.name.lower())]
        if held_out:
            rank_zero_warn(
                f"{root}: no file is called train, so all files are one split, also "
                f"{shortened(held_out)}. If these are other splits, rename the files so that the "
                "name of the split comes first, as in train.txt, valid.txt and test.txt."
            )
    others = named.pop(None, [])
    if others:
        rank_zero_warn(unknown_splits(root, others, len(paths)))
    found = {str(split): of_kinds(named[split], suffixes, reject) for split in named}
    for files in found.values():
        known = set(files)
        for path in files:
            if path.suffix.lower() in COMPRESSION and path.with_suffix("") in known:
                raise UsageError(f"{path} is {path.stem} again, compressed: remove one of them.")
    if not any(found.values()):
        raise UsageError(f"{root} holds no {', '.join(suffixes)} files.")
    return {split: files for split, files in found.items() if files}
