"""Base of the sources of samples with classes, and their options."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from datamodules.sources.base import HubOptions, Source, shortened
from datamodules.utils.errors import UsageError
from datamodules.utils.splits import stratified_split


@dataclass(frozen=True)
class SourceOptions(HubOptions):
    """What to know about a data set that its files do not say.

    Args:
        label_column: Column with the classes; None: label, labels or the first `ClassLabel`.
        val_fraction: Fraction of the training samples of each class that is held out if the data
            have no validation split.
        split_seed: Seed of that split; independent of the seed of training, so that runs can be
            compared.
        class_names: Names in the order of the labels; None: as the data say.
    """

    label_column: str | None = None
    val_fraction: float = 0.1
    split_seed: int = 0
    class_names: list[str] | None = None


class Split(Protocol):
    """Samples of one split with a class for each."""

    @property
    def labels(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def select(self, index: Any) -> Any: ...


S = TypeVar("S", bound=Split)


class LabelledSource(Source, Generic[S]):
    """Base: subclasses have class names, and read the samples of a split."""

    checkpoint_classes: list[str] | None = None  # used without a training split

    @property
    def class_names(self) -> list[str]:
        """Names in the order of the labels."""
        raise NotImplementedError

    def records(self, split: str) -> S | None:
        """Samples of "train", "val" or "test"; None if the data have no such split."""
        raise NotImplementedError

    def split(self, split: str) -> S:
        """The samples of "train", "val" or "test".

        Without a validation split, it is `val_fraction` of each class of the training split;
        without a test split, the validation split is tested, with a warning. Raises `UsageError` if
        there is no training split, or it is too small to hold samples out.
        """
        found = self.records(split)
        if found is not None and (split != "train" or self.has("val")):
            return found
        if split == "test":
            rank_zero_warn("The data have no test split: the validation split is tested instead.")
            return self.split("val")
        train = found if split == "train" else self.records("train")
        if train is None:
            raise UsageError(f"{self.origin} has no training split.")
        options = self.options
        first, second = stratified_split(train.labels, options.val_fraction, options.split_seed)
        if len(second) == 0:
            raise UsageError(
                f"there are too few training {self.noun} to hold some out: add a validation split."
            )
        return train.select(first if split == "train" else second)

    # Classes.

    def checked_class_names(self) -> list[str]:
        """The class names as the options call them.

        Raises:
            UsageError: The options name another number of classes, or there are fewer than two.
        """
        names = self.class_names
        given = self.options.class_names or names
        if len(given) != len(names):
            raise UsageError(
                f"class_names lists {len(given)} classes, the data have {len(names)}: "
                f"{shortened(names)}."
            )
        if len(given) < 2:
            raise UsageError(
                f"the data have one class only ({shortened(given)}): classification needs two."
            )
        return given

    def require_classes(self, expected: list[str]) -> None:
        """Compares the classes with those of a checkpoint. Raises `UsageError` if they differ."""
        names = self.checked_class_names()
        if names != expected:
            raise UsageError(
                f"the data have {len(names)} classes ({shortened(names)}), the checkpoint "
                f"{len(expected)} ({shortened(expected)}): use the data that it was trained for."
            )
