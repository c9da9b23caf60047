"""Errors that users see: of the right kind, one sentence, with the names that matter."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], *names: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects an error of this kind whose one sentence holds these names."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    for name in names:
        assert name in message, message
