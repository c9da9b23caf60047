"""What pretrained image models have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from datamodules.vision.decoding import InterpolationName
from modules.config import require
from modules.models.images import ImageConfig
from modules.pretrained.weights import CLASSIFIERS
from modules.schema import check_value
from tasks.checkpoints.weights import State
from tasks.errors import usage_errors
from tasks.options import Options
from tasks.problems import external_targets


class Pretrained(ABC):
    """Weights that an option names, and what is known about their model.

    Args:
        source, option: See `find_model`.

    Attributes:
        is_described: Whether all of `config` is known; otherwise options must say what shapes do
            not tell.
        new_parts: Beginnings of names of weights that may be missing, or of another shape.
        class_names: Class of each row of the classifier; None: not known.
        titles: Unique readable names of the classes; None: as `class_names`.
        normalisation: `mean` and `std`, each with a number for each channel; {}: not known.
        resizing: `interpolation` and `crop_pct`; {}: not known.
        targets: The metadata of `tasks.problems.external_targets`; of a checkpoint also those of
            its training images.
        data: Options `--data` of its training; {}: not known.
        unknown_arguments: Of its config.json, which our networks do not have.
    """

    is_described = True
    new_parts: tuple[str, ...] = CLASSIFIERS
    class_names: list[str] | None = None
    titles: list[str] | None = None
    normalisation: dict[str, list[float]]
    unknown_arguments: Sequence[str] = ()

    def __init__(self, source: str, option: str) -> None:
        self.source = source
        self.option = option
        self.normalisation = {}
        self.resizing: Options = {}
        self.data: Options = {}
        self.targets = external_targets("single_label_classification")

    @property
    def named(self) -> str:
        """The option and the source, for messages."""
        return f"{self.option} {self.source}"

    @property
    def preprocessing(self) -> Options:
        """What is known of how its images are prepared, as options `--data.dataset`."""
        return {**self.normalisation, **self.resizing}

    @abstractmethod
    def config(self) -> ImageConfig:
        """Returns the config of the model; `num_classes` is null if there is no classifier."""

    def image_metadata(self) -> Options:
        """Size, channels and, if it is known, preprocessing of the images, as in a checkpoint."""
        config = self.config()
        sizes = {"channels": config.channels, "image_size": config.image_size}
        return {**sizes, **self.preprocessing}

    @abstractmethod
    def read(self) -> State:
        """Returns the weights under their own names."""

    @abstractmethod
    def convert(self, state: State, config: ImageConfig) -> State:
        """As `weights`, from what `read` returned; raises `ValueError` if they do not fit."""

    @cached_property
    def state(self) -> State:
        """What `read` returned."""
        return self.read()

    def weights(self, config: ImageConfig) -> State:
        """Returns weights under our names, positions resized to the sizes of `config`.

        A classifier for another number of classes is left out. Raises `UsageError` if they do not
        fit `config`, `DataError` if they cannot be downloaded or are damaged.
        """
        saved = self.config()
        with self.errors(" does not fit the network"):
            require(
                saved.architecture == config.architecture,
                f"architecture is {saved.architecture}, but that of the network is "
                f"{config.architecture}.",
            )
        state = self.state
        with self.errors(" does not fit the network"):
            if config.stack.order == "mixer":
                check_grid(saved, config)
            return self.convert(state, config)

    def errors(self, what: str = "") -> AbstractContextManager[None]:
        """Turns a `ValueError` about the source into a `UsageError`; `what` follows its name."""
        return usage_errors(f"{self.named}{what}")


def checked_resizing(interpolation: Any, crop_pct: Any) -> Options:
    """Returns both by name; raises `ValueError` if one is of another type or out of range."""
    check_value(InterpolationName, interpolation, "interpolation")
    check_value(float, crop_pct, "crop_pct")
    require(0 < crop_pct <= 1, f"crop_pct is {crop_pct}, but must be above 0 and at most 1.")
    return {"interpolation": interpolation, "crop_pct": crop_pct}


def check_grid(saved: ImageConfig, config: ImageConfig) -> None:
    """Raises `ValueError` unless a Mixer has as many patches as before."""
    had, wanted = ("x".join(map(str, one.grid)) for one in (saved, config))
    require(
        had == wanted,
        f"a Mixer mixes the {had} patches that it was trained with, but "
        f"--model.net.image_size {config.image_size} and --model.net.patch_size "
        f"{config.patch_size} make {wanted}: give images of {saved.image_size} pixels, or patches "
        "larger by as much as the images.",
    )
