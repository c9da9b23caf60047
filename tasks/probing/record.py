"""probe.json: what a probe found, and of what."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from datamodules.utils.files import read_object, write_text
from tasks.options import Options


def write_record(folder: Path, about: Options, results: Sequence[Options]) -> str:
    """Writes probe.json, and returns what to say of another probe whose files it replaces, or "".

    Args:
        folder: Where the files of the probe are.
        about: Model, data and options of the probe.
        results: What it found.
    """
    path = folder / "probe.json"
    earlier: Options = {}
    with suppress(OSError, ValueError):
        earlier = read_object(path)
    write_text(path, json.dumps({**about, "results": results}, indent=1) + "\n")
    changed = [f"{name} {earlier.get(name)}" for name in about if earlier.get(name) != about[name]]
    if not (earlier and changed):
        return ""
    return f" (they replace those of another probe: {', '.join(changed)})"
