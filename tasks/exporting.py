"""What the `export` commands share: our own names as safetensors, and folders that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datamodules.files import replacing
from tasks.errors import UsageError


def write_safetensors(net: Any, facts: dict[str, Any], path: Path) -> str:
    """Our names; the header holds the network's options and the data's facts as JSON. Returns how to read it."""
    from safetensors.torch import save_file

    header = {"config": json.dumps(asdict(net.config)), "facts": json.dumps(facts)}
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, path, header)
    return "read it with safetensors.torch.load_file('{file}')"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes its name at the end; where writing fails, it vanishes, folders made for it too."""
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as partial:
            yield partial
    except BaseException:
        for folder in made:
            with suppress(OSError):  # something else is in it by now
                folder.rmdir()
        raise


@contextmanager
def made_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name at the end, or vanishes where filling it fails.

    Raises:
        UsageError: there is something else of that name.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: give another --output")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
