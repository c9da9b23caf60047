"""What tasks on text share: vocabulary, tokenizer files, padding, and mean metrics."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torchmetrics import MeanMetric

from datamodules.tokenized import TokenizedData
from datamodules.utils.files import write_text
from tasks.base import Task
from tasks.checkpoints.reading import best_checkpoint
from tasks.errors import TOO_LONG, UsageError
from tasks.options import merge_options

Config = TypeVar("Config")
# Of a new tokenizer.
TRAINING_OPTIONS = ("kind", "vocabulary", "min_frequency", "lowercase", "joint")


class TextTask(Task):
    """A task whose data have a tokenizer.

    Args:
        pretrained: Weights and tokenizer to start from; a checkpoint (.ckpt) or run folder,
            `hf/<model>` of the Hugging Face hub, or a local folder like it; null: random weights.
        kwargs: Those of `Task`.
    """

    def __init__(self, pretrained: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pretrained = None if pretrained is None else best_checkpoint(pretrained)

    @staticmethod
    def check_options(
        options: Any, on_command_line: Collection[str], given: Collection[str]
    ) -> None:
        """Refuses options for training a tokenizer if a trained one is given."""
        if options.data.tokenizer.file is None:  # that of pretrained weights is filled in, too
            return
        origin = options.data.tokenizer.file
        if options.model.pretrained:
            origin = f"--model.pretrained {options.model.pretrained}"
        for name in TRAINING_OPTIONS:
            option = f"--data.tokenizer.{name}"
            if option in on_command_line:
                raise UsageError(
                    f"{option} is for a new tokenizer, but {origin} has one: leave it out"
                )

    @property
    def max_positions(self) -> int | None:
        """Tokens that pretrained learned positions allow; None without such positions."""
        config: Any = getattr(self, "net_config", None)
        is_learned = getattr(config, "position", None) == "learned"
        return config.max_length if self.pretrained is not None and is_learned else None

    def train_metrics(self) -> list[str]:
        return [*super().train_metrics(), "padding"]

    def resolved_options(self) -> dict[str, Any]:
        tokenizer = self.metadata["tokenizer_options"]
        return merge_options(super().resolved_options(), {"data": {"tokenizer": tokenizer}})

    def save_files(self, folder: Path) -> None:
        write_text(folder / "tokenizer.json", self.metadata["tokenizer"])

    def on_train_epoch_end(self) -> None:
        """Logs the fraction of padding in the epoch's batches, over all ranks."""
        if not isinstance(self.datamodule, TokenizedData):  # nobody has counted
            return
        tokens, total = self.datamodule.count_tokens()
        # `batch_size` weights the ranks in the mean.
        self.log("train/padding", 1 - tokens / total, sync_dist=True, batch_size=round(total))


def fill_vocabulary(
    config: Config, metadata: Mapping[str, Any], name: str = "vocabulary"
) -> Config:
    """Returns a network's config whose vocabulary size, if null, is that of the data.

    Args:
        config: Of a network; its embedding may have more rows than the tokenizer has tokens.
        metadata: Of the data, with its vocabulary size and `max_length` in tokens.
        name: Of the vocabulary size in `config` and in `metadata`.
    """
    net: Any = config
    tokens = metadata[name]
    vocabulary = getattr(net, name) or tokens
    if vocabulary < tokens:
        raise UsageError(
            f"the tokenizer has {tokens} tokens and the network {vocabulary}: use the tokenizer "
            f"that the network was trained with, or leave --model.net.{name} out"
        )
    length = metadata["max_length"]
    limit = net.max_length
    if net.position == "learned" and limit is not None and length > limit:
        raise UsageError(
            f"--data.max_length {length} exceeds the {limit} {TOO_LONG}: "
            "lower it, or raise --model.net.max_length of a new network"
        )
    return replace(net, **{name: vocabulary})


class MeanOf(MeanMetric):
    """Mean over all targets of the value that a step returns under `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.value_name = name

    def update(self, means: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Adds the mean over a batch, weighted by its number of targets."""
        super().update(means[self.value_name], counts[self.value_name])
