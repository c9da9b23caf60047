"""A folder of image files, one folder for each class."""

from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from datamodules.errors import UsageError
from datamodules.records import Records, file_records, image_files
from datamodules.sources.base import SPLITS, Source


class Folder(Source):
    """The user's own images: `train/CLASS/*.jpg`, at any depth below CLASS; val/ and test/ likewise, where given."""

    @cached_property
    def root(self) -> Path:
        """The folder, which holds train/."""
        want = "a folder with train/CLASS/*.jpg"
        if self.path is None:
            raise UsageError(f"the source folder needs --data.path: {want}.")
        root = Path(self.path)
        if not root.is_dir():
            raise UsageError(f"{root} {'is a file' if root.exists() else 'does not exist'}: --data.path takes {want}.")
        return root

    def _split_folder(self, split: str) -> Path | None:
        return next((self.root / name for name in SPLITS[split] if (self.root / name).is_dir()), None)

    @cached_property
    def class_names(self) -> list[str]:
        folder = self._split_folder("train")
        if self.options.class_names or folder is None and self.known_names:
            return self.options.class_names or self.known_names or []
        if folder is None:
            raise UsageError(
                f"{self.root} has no folder train/: put images into train/CLASS/, one folder for each class."
            )
        names = self._class_folders(folder)
        if not names:
            raise UsageError(f"{folder} has no class folders: put images into train/CLASS/, one folder for each class.")
        return names

    def has(self, split: str) -> bool:
        return self._split_folder(split) is not None

    @staticmethod
    def _class_folders(folder: Path) -> list[str]:
        return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))

    def records(self, split: str) -> Records | None:
        folder = self._split_folder(split)
        if folder is None:
            return None
        names = self.class_names
        unknown = sorted(set(self._class_folders(folder)) - set(names))
        if unknown:
            near = get_close_matches(unknown[0], names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; the classes are {', '.join(names[:10])}."
            raise UsageError(f"{folder / unknown[0]} is not one of the {len(names)} classes{hint}")
        paths, labels = [], []
        for label, name in enumerate(names):
            files = image_files(folder / name, self.skip_bad, self.skipped) if (folder / name).is_dir() else []
            if not files and split == "train":
                raise UsageError(f"class {name} is empty: put images into {folder / name}, or remove the folder.")
            paths += files
            labels += [label] * len(files)
        if not paths:
            raise UsageError(f"{folder} holds no images.")
        return file_records(paths, labels)
