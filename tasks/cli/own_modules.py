"""Modules of the user, which `TESSERA_TRUST` names: they may add blocks, data and callbacks."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tasks.cli.app import TRUST
from tasks.errors import UsageError

OWN_MODULES = [name.strip() for name in os.environ.get(TRUST, "").split(",") if name.strip()]


def is_module_name(name: str) -> bool:
    """Whether a name has the form package.module."""
    return all(part.isidentifier() for part in name.split("."))


def import_own_modules() -> None:
    """Imports the modules, also those in the current folder if `tessera` was called.

    Raises `UsageError` if there is no such module, or it replaces a block of Tessera: checkpoints
    would be read with another block wherever the module is not named.
    """
    if not OWN_MODULES:
        return
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    known = {option: dict(family) for option, family in families().items()}
    for name in OWN_MODULES:
        if name.endswith(".py") or not is_module_name(name):
            raise UsageError(
                f"{TRUST} names {name}, which is not a module name: give a name such as "
                "my_blocks for my_blocks.py, and add its folder to PYTHONPATH if it is elsewhere"
            )
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module was found, but not one that it imports
            raise UsageError(
                f"{TRUST} names {name}, but there is no such module in the current folder or on "
                f"PYTHONPATH: add its folder to PYTHONPATH, or unset {TRUST}"
            ) from error
        for option, family in families().items():
            for entry, block in known[option].items():
                if family.get(entry) is not block:
                    raise UsageError(
                        f"{TRUST}: {name} replaces the {option} {entry}, which Tessera has: choose "
                        "a new name"
                    )


def families() -> dict[str, Mapping[str, Any]]:
    """The dictionaries of blocks, by the option that chooses an entry."""
    from modules.heads import POOLERS
    from modules.models import images, seq2seq
    from modules.patch_embedding import STEMS
    from modules.pooling import POOLINGS
    from modules.position import POSITIONS
    from modules.transformer import VARIANTS
    from modules.windows import RELATIVE_BIASES

    return {
        **VARIANTS,
        "pooler": POOLERS,
        "stem": STEMS,
        "pool": POOLINGS,
        "position": POSITIONS,
        "relative_bias": RELATIVE_BIASES,
        "architecture of images": images.ARCHITECTURES,
        "architecture of translators": seq2seq.ARCHITECTURES,
    }
