"""What every source of labelled images offers, and the options they share."""

from dataclasses import dataclass

from datamodules.records import Records

SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class DatasetOptions:
    """What to know about a data set that its files do not say.

    Args:
        name: Id on the Hugging Face hub, for the source "hub", such as uoft-cs/cifar10.
        local: Folder below the one that the environment variable TESSERA_DATA names, read instead of the hub.
        image_column: Column with the images; None: the first that holds images.
        label_column: Column with the classes; None: label, labels or the first of a class type.
        channels: Colour channels that images are converted to, 1 or 3; None: as the data are.
        val_fraction: Share of the training images, in each class, set aside where the data have no validation split.
        split_seed: Of the draw of that share; kept apart from the seed of training, so that runs can be compared.
        class_names: Names in the order of the labels; None: as the data say.
        mean: Of each channel, in [0, 1]; None: measured on the training images.
        std: Standard deviation of each channel, likewise.
    """

    name: str | None = None
    local: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    channels: int | None = None
    val_fraction: float = 0.1
    split_seed: int = 0
    class_names: list[str] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


class Source:
    """Base: a source knows its class names and gives the records of a split.

    Args:
        path: Folder that the user named, or None.
        options: See `DatasetOptions`.
        skip_bad: Pass over files that are not images.
    """

    def __init__(self, path: str | None, options: DatasetOptions, skip_bad: bool = False) -> None:
        self.path, self.options, self.skip_bad = path, options, skip_bad
        self.skipped: list[str] = []
        self.known_names: list[str] | None = None  # from a checkpoint; for data that hold no training split

    @property
    def origin(self) -> str:
        """Where the images were read from."""
        return self.path or "embedded"

    def prepare(self) -> None:
        """Downloads what is missing; called on one process only."""

    @property
    def class_names(self) -> list[str]:
        """Names in the order of the labels."""
        raise NotImplementedError

    def has(self, split: str) -> bool:
        """Whether the data have this split of their own."""
        raise NotImplementedError

    def records(self, split: str) -> Records | None:
        """Of "train", "val" or "test"; None where the data have no such split."""
        raise NotImplementedError
