"""Generation needs no gradients."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
