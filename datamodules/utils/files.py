"""Files: only regular ones are read, and each is written whole or not at all."""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

# `datasets` and the hub put these beside the data.
DATASETS_FILES = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
IGNORED_NAMES = ("thumbs.db", "desktop.ini", *DATASETS_FILES)  # and all that begins with a dot
MISSING = "does not exist"  # the fault of a path where nothing is
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
STALE_AFTER = 3600  # seconds without a write: then a process that was killed left the file


def open_regular(path: str | os.PathLike, follow: bool = True, append: bool = False) -> BinaryIO:
    """Opens a regular file to read bytes, or also to append (it may then be missing).

    Never waits for a pipe, and never reads a device. Raises `OSError` if it is not a regular file,
    or with `follow` False a symbolic link.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if append else os.O_RDONLY
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", *([] if follow else ["O_NOFOLLOW"])):
        flags |= getattr(os, name, 0)  # not every system has all of them
    try:
        number = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "Is a symbolic link", str(path)) from error
        raise
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = "Is a directory" if stat.S_ISDIR(mode) else "Not a regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, kind, str(path))
    return os.fdopen(number, "a+b" if append else "rb")


def natural_key(name: str) -> Any:
    """The key that sorts names by the numbers in them: line 5 before line 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", name))]


def try_lock(file: BinaryIO) -> bool:
    """Locks a file that is open to append; False if another process has locked it.

    The lock ends when the file is closed, or the process ends, however that happens. Where there
    are no locks (Windows, some file systems), nothing is locked, and the result is True.
    """
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def read_bytes(path: str | os.PathLike, follow: bool = True) -> bytes:
    """The content of a regular file; see `open_regular`."""
    with open_regular(path, follow) as file:
        return file.read()


def printable(path: str | os.PathLike) -> str:
    r"""A path for messages; bytes that are not UTF-8 are written as \xe9."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def did_you_mean(path: Path) -> str:
    """The nearest name in the folder of a path where nothing is, as part of a message; or ""."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, 1, cutoff=0.7)
    return f" (did you mean {printable(path.with_name(near[0]))}?)" if near else ""


def path_fault(path: str | os.PathLike) -> str | None:
    """What is wrong with what should be a file; None for a regular file, or a link to one."""
    is_link = os.path.islink(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "is a broken link" if is_link else MISSING
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if stat.S_ISDIR(mode):
        return "is a link to a folder, which is not followed" if is_link else "is a folder"
    return None if stat.S_ISREG(mode) else "is not a regular file"


def may_hold(path: str | None, saved: str | None) -> bool:
    """Whether a path may be, or be a folder around, one that was saved, perhaps in another folder.

    A saved relative path that does not exist here may be any of its name.
    """
    if path is None or saved is None:
        return path == saved
    saved_path = Path(saved).resolve()
    if Path(path).resolve() in (saved_path, *saved_path.parents):
        return True
    is_elsewhere = not Path(saved).is_absolute() and not saved_path.exists()
    return is_elsewhere and Path(path).exists() and Path(path).name == Path(saved).name


def regular_files(
    folder: Path,
    reject: Callable[[str, str], None],
    wanted: Callable[[Path], bool] = lambda path: True,
) -> list[Path]:
    """All regular files below a folder at any depth, and links to them, sorted; no hidden ones.

    Links to folders are followed if they lie directly in `folder` and are called as a split.
    `reject` is called with a name and what is wrong with it, for folders that cannot be read, other
    links to folders, wanted files that are not regular, and names that are not UTF-8.
    """
    from datamodules.utils.splits import split_of  # imports torch, which the CLI's screens do not

    files = []
    faults = []

    def add_unreadable(error: OSError) -> None:
        faults.append((printable(error.filename), f"cannot be read ({error.strerror})"))

    for root, folders, names in os.walk(folder, onerror=add_unreadable, followlinks=True):
        folders[:] = [name for name in folders if not is_ignored_folder(name)]
        links = [name for name in folders if Path(root, name).is_symlink()]
        refused = [name for name in links if Path(root) != folder or not split_of(Path(name))]
        folders[:] = [name for name in folders if name not in refused]
        paths = [Path(root, name) for name in refused]
        for name in names:
            is_hidden = name.startswith(".") or name.lower() in IGNORED_NAMES
            is_hidden |= name.startswith("cache-") and name.endswith(".arrow")  # of `datasets.map`
            if not is_hidden and wanted(Path(root, name)):
                paths.append(Path(root, name))
        for path in paths:
            fault = path_fault(path) or name_fault(path.relative_to(folder))
            if fault is None:
                files.append(path)
            else:
                faults.append((printable(path), fault))
    for name, fault in sorted(faults):
        reject(name, fault)
    return sorted(files)


def is_ignored_folder(name: str) -> bool:
    """Whether a folder is hidden, or that of macOS in archives."""
    return name.startswith(".") or name == "__MACOSX"


def name_fault(path: str | os.PathLike) -> str | None:
    """What is wrong with the name of a file; None if it is UTF-8."""
    return None if printable(path) == os.fspath(path) else "has a name that is not UTF-8"


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The object in a JSON file.

    Raises `OSError` as in `open_regular`; `ValueError` as in `parse_object`.
    """
    return parse_object(read_bytes(path).decode("utf-8"))


def parse_object(text: str) -> dict[str, Any]:
    """The object in a JSON text.

    Raises `ValueError` if it is not JSON, not an object, or nested too deep.
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object with entries")
    return found


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write, which replaces `path` at the end, or is removed after an error.

    A symbolic link at `path` is replaced, not followed. Temporary files of processes that were
    killed are removed. Raises `OSError` if the folder is missing or cannot be written; what was at
    `path` stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # another process may be quicker
        for leftover in path.parent.glob(f".{escape(path.name)}.*.tmp"):
            if leftover == partial or time.time() - leftover.lstat().st_mtime > STALE_AFTER:
                leftover.unlink()
    try:
        with errors_naming(path, partial):
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):  # gone, or its name was refused
            partial.unlink()


@contextmanager
def errors_naming(path: Path, partial: Path) -> Iterator[None]:
    """Errors about `partial`, or a file in it, name `path`, or that file in it, instead.

    That of a full disk, which names no file, names `path`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_FULL:
            raise OSError(error.errno, error.strerror, str(path)) from error
        found = Path(str(error.filename))
        if not found.is_relative_to(partial):
            raise
        renamed = str(path / found.relative_to(partial))
        raise OSError(error.errno, error.strerror, renamed) from error


def write_text(path: Path, text: str) -> None:
    """Writes a small file; file names in it that are not UTF-8 keep their bytes."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="surrogateescape")
