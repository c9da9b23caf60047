"""What the `export` commands share: our own names as safetensors, and folders that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datamodules.files import replacing
from tasks.errors import UsageError


def write_safetensors(net: Any, facts: dict[str, Any], path: Path) -> str:
    """Our names; the header holds the network's options and the data's facts as JSON. Returns how to read it."""
    from safetensors.torch import save_file

    header = {"config": json.dumps(asdict(net.config)), "facts": json.dumps(facts)}
    with replacing(path) as partial:
        save_file({name: value.contiguous() for name, value in net.state_dict().items()}, partial, header)
    return "read it with safetensors.torch.load_file('{file}')"


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
