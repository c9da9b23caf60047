"""What tasks on texts share: sizes that fit the tokenizer, figures of their steps, and what their run folders keep."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torchmetrics import MeanMetric

from datamodules.tokenizers import Tokenizer
from datamodules.utils.files import write_text
from tasks.base import Task
from tasks.cli.parsing import merged
from tasks.errors import UsageError

Config = TypeVar("Config")
TRAINED_BY = (
    "kind",
    "vocabulary",
    "min_frequency",
    "lowercase",
)  # the options that training a tokenizer goes by


class TextTask(Task):
    """A task whose data have a tokenizer; arguments as `Task`."""

    train_names = (*Task.train_names, "padding")

    @staticmethod
    def check_options(options: Any, typed: Collection[str], named: Collection[str]) -> None:
        """Refuse what would train a tokenizer beside a file of one, unless it is in a config.

        Raises:
            UsageError: names the option, and the sizes of both vocabularies.
        """
        asked, pretrained = options.data.tokenizer, options.model.pretrained
        name = next((name for name in TRAINED_BY if f"--data.tokenizer.{name}" in typed), None)
        if name is not None and asked.file is not None:
            origin = (
                f"that of --model.pretrained {pretrained}"
                if pretrained
                else f"the file {asked.file}"
            )
            raise UsageError(
                f"--data.tokenizer.{name} {asked[name]} (vocabulary {asked.vocabulary}) cannot go with a tokenizer "
                f"that is there already, {origin} ({Tokenizer.from_file(asked.file).vocab_size} tokens): leave it out"
            )

    def resolved(self) -> dict[str, Any]:
        """The run's options with what the data decided filled in, the tokenizer among it."""
        return merged(super().resolved(), {"data": {"tokenizer": self.facts["tokenizer_options"]}})

    def keep_files(self, folder: Path) -> None:
        """Write `tokenizer.json`."""
        write_text(folder / "tokenizer.json", self.facts["tokenizer"])

    def on_train_epoch_end(self) -> None:
        """Log the fraction of the epoch's tokens that are padding, over all ranks."""
        tokens, padded = self.datamodule.count_tokens()
        fraction = 1 - tokens / padded
        self.log("train/padding", fraction, sync_dist=True, batch_size=padded)


def with_vocabulary(config: Config, facts: Mapping[str, Any], name: str = "vocabulary") -> Config:
    """A network's configuration with its number of tokens filled in.

    Args:
        config: As asked for; pretrained tables may have a few rows more than the tokenizer has tokens.
        facts: Of the data: the number of tokens, and `max_length`, in tokens.
        name: Of the number of tokens, in both.

    Raises:
        UsageError: the tokenizer has more tokens than the network, or texts are longer than it can read.
    """
    asked: Any = config
    tokens, known, most = facts[name], getattr(asked, name), asked.max_length
    if (known or tokens) < tokens:
        raise UsageError(
            f"the tokenizer has {tokens} tokens and the network {known}: use the tokenizer that the network was "
            f"trained with, or leave --model.net.{name} out"
        )
    if asked.position == "learned" and most is not None and facts["max_length"] > most:
        raise UsageError(
            f"--data.max_length {facts['max_length']} is more than the {most} learned positions of the network: lower "
            "it, or, where the network has none as yet, raise --model.net.max_length"
        )
    return replace(asked, **{name: known or tokens})


class MeanOf(MeanMetric):
    """Mean of one of the figures that a step gives.

    Args:
        name: Of the figure.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.figure = name

    def update(self, figures: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Adds a batch's mean, which stands for so many guesses."""
        super().update(figures[self.figure], counts[self.figure])
