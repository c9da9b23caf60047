"""Errors that users see; `tasks.errors` adds that of a run."""

from typing import Any


class UsageError(ValueError):
    """A request that cannot be met as it is; one sentence with what to change. Exit code 2."""


class DataError(RuntimeError):
    """A sound request that failed: a corrupt file, no network, a full disk. Exit code 1."""


def require_same(option: str, given: Any, stored: Any) -> None:
    """Raises `UsageError` if `--data.<option>` is set (not None) and is not a checkpoint's."""
    if given not in (None, stored):
        raise UsageError(
            f"--data.{option} is {given}, the model was trained with {stored}: leave it out."
        )
