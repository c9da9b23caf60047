"""Packages that only an extra of `pyproject.toml` installs."""

from collections.abc import Iterator
from contextlib import contextmanager

from datamodules.utils.errors import UsageError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a failed import of a package of an extra into a `UsageError` that names the extra.

    with extra("hub"):
        from datasets import load_dataset
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f'{error.name} is not installed: pip install "tessera[{name}]"') from error
