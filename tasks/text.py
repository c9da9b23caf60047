"""What tasks on text share: vocabulary, tokenizer files, padding, and mean metrics."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torchmetrics import MeanMetric

from datamodules.utils.files import write_text
from tasks.base import Task
from tasks.cli.parsing import merged
from tasks.errors import UsageError

Config = TypeVar("Config")
TOKENIZER_TRAINING = ("kind", "vocabulary", "min_frequency", "lowercase")  # options of it


class TextTask(Task):
    """A task whose data have a tokenizer; arguments as `Task`."""

    train_names = (*Task.train_names, "padding")

    @staticmethod
    def check_options(options: Any, typed: Collection[str], named: Collection[str]) -> None:
        """Refuses options for training a tokenizer if one is given."""
        origin = options.data.tokenizer.file
        if options.model.pretrained:
            origin = f"--model.pretrained {options.model.pretrained}"
        for name in TOKENIZER_TRAINING:
            option = f"--data.tokenizer.{name}"
            if option in typed and options.data.tokenizer.file is not None:
                raise UsageError(
                    f"{option} is for training a tokenizer, but {origin} has one: leave it out"
                )

    def resolved(self) -> dict[str, Any]:
        """Returns the run's options with those that the data determine, the tokenizer's too."""
        return merged(
            super().resolved(), {"data": {"tokenizer": self.metadata["tokenizer_options"]}}
        )

    def keep_files(self, folder: Path) -> None:
        """Writes `tokenizer.json`."""
        write_text(folder / "tokenizer.json", self.metadata["tokenizer"])

    def on_train_epoch_end(self) -> None:
        """Logs the fraction of padding in the epoch's batches, over all ranks."""
        tokens, padded = self.datamodule.count_tokens()
        # `batch_size` weights the ranks in the mean.
        self.log("train/padding", 1 - tokens / padded, sync_dist=True, batch_size=padded)


def fill_vocabulary(
    config: Config, metadata: Mapping[str, Any], name: str = "vocabulary"
) -> Config:
    """Returns a network's config with the vocabulary size of the data.

    Args:
        config: Of a network; its embedding may have more rows than the tokenizer has tokens.
        metadata: Of the data: the vocabulary size and `max_length`.
        name: Of the vocabulary size, in both.

    Raises:
        UsageError: The tokenizer has more tokens than the network, or texts are longer than its
            learned positions.
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
    """Mean over all targets of the value that a step returns under this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.value_name = name

    def update(self, means: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Adds the mean over a batch, weighted by its number of targets."""
        super().update(means[self.value_name], counts[self.value_name])
