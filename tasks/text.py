"""What tasks on text share: vocabulary, tokenizer files, padding, and means of metrics."""

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
TRAINING_OPTIONS = ("kind", "vocabulary", "min_frequency", "lowercase")  # of a tokenizer


class TextTask(Task):
    """A task whose data have a tokenizer; arguments as `Task`."""

    train_names = (*Task.train_names, "padding")

    @staticmethod
    def check_options(options: Any, typed: Collection[str], named: Collection[str]) -> None:
        """Refuses typed options of training a tokenizer if there is one already.

        Raises:
            UsageError: Names the option, and the sizes of both vocabularies.
        """
        config = options.data.tokenizer
        name = next(
            (name for name in TRAINING_OPTIONS if f"--data.tokenizer.{name}" in typed), None
        )
        if name is None or config.file is None:
            return
        origin = f"the file {config.file}"
        if options.model.pretrained:
            origin = f"that of --model.pretrained {options.model.pretrained}"
        raise UsageError(
            f"--data.tokenizer.{name} {config[name]} (vocabulary {config.vocabulary}) cannot go "
            f"with a tokenizer that is there already, {origin} "
            f"({Tokenizer.from_file(config.file).vocab_size} tokens): leave it out"
        )

    def resolved(self) -> dict[str, Any]:
        """Returns the run's options with those that the data decided, the tokenizer included."""
        return merged(
            super().resolved(), {"data": {"tokenizer": self.metadata["tokenizer_options"]}}
        )

    def keep_files(self, folder: Path) -> None:
        """Writes `tokenizer.json`."""
        write_text(folder / "tokenizer.json", self.metadata["tokenizer"])

    def on_train_epoch_end(self) -> None:
        """Logs the fraction of padding among the tokens of an epoch, over all ranks."""
        tokens, padded = self.datamodule.count_tokens()
        # The batch size is the weight of a rank in the mean.
        self.log("train/padding", 1 - tokens / padded, sync_dist=True, batch_size=padded)


def fill_vocabulary(
    config: Config, metadata: Mapping[str, Any], name: str = "vocabulary"
) -> Config:
    """Returns a network's config with the vocabulary size of the data.

    Args:
        config: As asked for; a pretrained table may have more rows than the tokenizer has tokens.
        metadata: Of the data: the vocabulary size, and `max_length`, in tokens.
        name: Of the vocabulary size, in both.

    Raises:
        UsageError: The tokenizer has more tokens than the network, or texts are longer than it
            reads.
    """
    net: Any = config
    tokens = metadata[name]
    known = getattr(net, name) or tokens
    if known < tokens:
        raise UsageError(
            f"the tokenizer has {tokens} tokens and the network {known}: use the tokenizer that "
            f"the network was trained with, or leave --model.net.{name} out"
        )
    length = metadata["max_length"]
    limit = net.max_length
    if net.position == "learned" and limit is not None and length > limit:
        raise UsageError(
            f"--data.max_length {length} is more than the {limit} learned positions of the "
            "network: lower it, or raise --model.net.max_length of a new network"
        )
    return replace(net, **{name: known})


class MeanOf(MeanMetric):
    """Mean of one of the values that a step returns.

    Args:
        name: Of the value.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.value_name = name

    def update(self, means: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Adds a batch's mean, weighted by its number of targets."""
        super().update(means[self.value_name], counts[self.value_name])
