"""What pretrained image models have in common."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from modules.models.vit import ViTConfig
from tasks.checkpoints.weights import State
from tasks.errors import usage_errors
from tasks.problems import external_targets


class Pretrained(ABC):
    """Weights that an option names, and what is known about their model.

    Args:
        source, option: As of `find_model`.

    Attributes:
        is_described: Whether all of `config` is known; otherwise options must say what shapes do
            not tell.
        class_names: Class of each row of the classifier; None: not known.
        titles: Unique readable names of the classes; None: as `class_names`.
        normalisation: `mean` and `std`, each with a number for each channel; {}: not known.
        targets: The metadata of `tasks.problems.external_targets`.
    """

    is_described = True
    class_names: list[str] | None = None
    titles: list[str] | None = None
    normalisation: dict[str, list[float]]

    def __init__(self, source: str, option: str) -> None:
        self.source = source
        self.option = option
        self.normalisation = {}
        self.targets = external_targets("single_label_classification")

    @abstractmethod
    def config(self) -> ViTConfig:
        """Returns the config of the model; `num_classes` is null if there is no classifier."""

    @abstractmethod
    def read(self) -> State:
        """Returns the weights under their own names."""

    @abstractmethod
    def convert(self, state: State, config: ViTConfig) -> State:
        """As `weights`, from what `read` returned; raises `ValueError` if they do not fit."""

    @cached_property
    def state(self) -> State:
        """What `read` returned."""
        return self.read()

    def weights(self, config: ViTConfig) -> State:
        """Returns weights under our names, positions resized to the image size of `config`.

        A classifier for another number of classes is left out. Raises `UsageError` if they do not
        fit `config`, `DataError` if they cannot be downloaded or are damaged.
        """
        state = self.state
        with self.errors(" does not fit the network"):
            return self.convert(state, config)

    def errors(self, what: str = "") -> AbstractContextManager[None]:
        """Turns a `ValueError` about the source into a `UsageError`; `what` follows its name."""
        return usage_errors(f"{self.option} {self.source}{what}")


def distinct(names: Sequence[str], marks: Sequence[Any]) -> list[str]:
    """Returns names of classes, with its mark appended to each repeated name.

    >>> distinct(["cat", "crane", "crane"], [0, 1, 2])
    ['cat', 'crane (1)', 'crane (2)']
    """
    counts = Counter(names)  # two classes of ImageNet are called crane
    return [
        name if counts[name] == 1 else f"{name} ({mark})"
        for name, mark in zip(names, marks, strict=True)
    ]
