"""Packages that are not installed, and what installs them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires

from datamodules.utils.errors import UsageError

DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}  # of modules with another name


@contextmanager
def requires_extra(name: str) -> Iterator[None]:
    """Turn a failed import of a package of an extra into a `UsageError` that names the extra.

    with requires_extra("hub"):
        from datasets import load_dataset
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = f'"tessera[{name}]"'
        if not is_installed():
            extra = f'-e ".[{name}]" in the folder of Tessera\'s pyproject.toml'
        raise UsageError(f"{error.name} is not installed: pip install {extra}") from error


def is_installed() -> bool:
    """Whether pip knows Tessera; if not, it would look for another project of this name."""
    try:
        requires("tessera")
    except PackageNotFoundError:
        return False
    return True


def core_requirement(module: str) -> str | None:
    """What Tessera requires to have a module, such as "wandb>=0.22"; None if it does not.

    >>> core_requirement("torch.nn").partition(">=")[0], core_requirement("my_module")
    ('torch', None)
    """
    package = module.partition(".")[0]
    name = DISTRIBUTIONS.get(package, package).replace("_", "-")
    if not is_installed():
        return None
    for requirement in requires("tessera") or []:
        found = re.split(r"[^\w-]", requirement.replace("_", "-"))[0]
        if found.lower() == name and "extra ==" not in requirement:
            return requirement
    return None
