"""The choice of a source: by its name, or by the files at the path."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from datamodules.sources.base import (
    Source,
    accepted_paths,
    local_path,
    missing_path,
    sources_at,
)
from datamodules.sources.readers.folders import ClassFolders
from datamodules.sources.readers.formats import uncompressed_suffix
from datamodules.utils.errors import UsageError
from datamodules.utils.files import MISSING, path_fault, printable

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
T = TypeVar("T", bound=Source)


def open_source(
    sources: Mapping[str, type[T]], name: str | None, path: str | None, options: Any, **more: Any
) -> T:
    """The source of a datamodule.

    Args:
        sources: Those of the task, by name.
        name: See `choose_source`.
        path: File, folder, or id of a data set of the hub.
        options: A `HubOptions`, or a class with more.
        **more: Other arguments of the source.

    Raises:
        UsageError: As `choose_source`.
    """
    path = None if path is None else str(path)  # also of a pathlib.Path
    name = choose_source(sources, name, path, options)
    if name == "hub" and is_hub_id(path, sources):
        options = replace(options, name=path, local=None)
        path = None
    source = sources[name](path, options, **more)
    source.name = name
    source.alternatives = sources
    return source


def choose_source(
    sources: Mapping[str, type[Source]], name: str | None, path: str | None, options: Any
) -> str:
    """The name of the source to read; if `name` is None, as the path shows.

    Without a path, `options` may name a data set of the hub, or its copy below TESSERA_DATA; else
    it is the embedded data. Images in the folder of one class only are read without classes by
    tasks that need none. Raises `UsageError` if there is no source of that name, or the path shows
    none or several.
    """
    if name is not None:
        if name not in sources:
            raise UsageError(
                f"--data.source is {name}, but must be one of {', '.join(sources)}; for one of "
                "your own, set TESSERA_TRUST to its module."
            )
        return name
    path = None if path is None else str(path)
    where = local_path(path, options)
    if is_hub_id(path, sources) or (where is None and options.name is not None):
        return "hub"
    if where is not None:
        name = source_at(sources, where)
        kind = sources[name]
        if "images" in sources and issubclass(kind, ClassFolders):
            return "images" if kind(str(where), options).is_one_class else name
        return name
    return next(name for name, source in sources.items() if source.embedded)


def is_hub_id(path: str | None, sources: Mapping[str, type[Source]]) -> bool:
    """Whether a path is not a file, but can be the id of a data set, such as stanfordnlp/imdb."""
    if path is None or not HUB_ID.fullmatch(path) or Path(path).parent.is_dir():
        return False
    suffix = uncompressed_suffix(Path(path))
    return not any(suffix in source.suffixes for source in sources.values())


def source_at(sources: Mapping[str, type[Source]], path: Path) -> str:
    """The name of the one source that reads what lies at `path`; else raises `UsageError`."""
    found = sources_at(sources, path)
    if len(found) == 1:
        return next(iter(found))
    if found:
        files = " and ".join(printable(path / file) for file in found.values())
        names = " or ".join(found)
        raise UsageError(f"{files} are of several kinds: set --data.source {names}.")
    for kind in sources.values():
        if issubclass(kind, ClassFolders) and (message := kind.missing_class_folders(path)):
            raise UsageError(message)
    fault = "is of no known kind"
    if path.is_dir():
        fault = "holds no files of a known kind"
    elif not path.is_file():
        fault = str(path_fault(path))
    if fault == MISSING:
        raise UsageError(missing_path(path, sources, "--data.path"))
    raise UsageError(f"{printable(path)} {fault}: --data.path takes {accepted_paths(sources)}")
