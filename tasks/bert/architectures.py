"""Which encoder to build: presets, sizes that fit the data, and pretrained weights."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pytorch_lightning.utilities import rank_zero_only
from torch import nn

from modules.models.bert import BertConfig
from modules.pretrained.bert import FAMILIES, HEADS
from tasks.checkpoints.pretrained import (
    ModelFolder,
    checkpoint_options,
    model_options,
    pretrained_weights,
)
from tasks.checkpoints.weights import PRETRAINED, fill_config, load_pretrained_weights
from tasks.errors import UsageError
from tasks.options import Options
from tasks.text import fill_vocabulary

Net = TypeVar("Net", bound=nn.Module)
TASKS = ("mlm", "bert")  # whose checkpoints hold an encoder


def fit_to_data(
    config: BertConfig, metadata: Mapping[str, Any], pretrained: str | None = None, **sizes: Any
) -> BertConfig:
    """Returns a config with the sizes of the data.

    Args:
        config: As asked for.
        metadata: Of the data: `vocabulary`, `pad_id`, `max_length` in tokens, `next_sentence`.
        pretrained: Where the weights come from that decided the config; None: weights are new.
        sizes: Other sizes of the data.
    """
    config = fill_vocabulary(config, metadata)
    pad_id = metadata["pad_id"]
    if config.pad_id != pad_id and (pretrained or config.pad_id != BertConfig.pad_id):
        raise UsageError(
            f"the tokenizer pads with token {pad_id} and the network with token {config.pad_id}: "
            "use the tokenizer that the network was trained with, or leave --model.net.pad_id out"
        )
    if config.next_sentence and not metadata.get("next_sentence"):
        raise UsageError("--model.net.next_sentence true needs --data.next_sentence true: add it")
    return fill_config(replace(config, pad_id=pad_id), sizes)


def pretrained_options(source: str) -> Options:
    """Returns the network and the tokenizer of `--model.pretrained SOURCE` as options."""
    if source.endswith(".ckpt"):
        return checkpoint_options(source, TASKS, num_classes=None, next_sentence=False)
    folder = ModelFolder(source, FAMILIES)
    return model_options(folder.path, asdict(replace(folder.config, num_classes=None)))


def load_pretrained(
    build: Callable[[], Net], source: str, metadata: Mapping[str, Any], reset: tuple[str, ...] = ()
) -> Net:
    """Builds a network with pretrained weights; says which parts of heads are initialised anew.

    Args:
        build: Builds a `BertClassifier` or `BertMaskedLM`, once the weights fit their config.
        source: As of `--model.pretrained`.
        metadata: Of the data, with their `tokenizer`.
        reset: Parts of the network not to load.
    """
    state = pretrained_weights(source, TASKS, metadata, FAMILIES)
    state = {name: value for name, value in state.items() if not name.startswith(reset)}
    net = build()
    missing = load_pretrained_weights(net, source, state, HEADS)
    if missing:
        parts = ", ".join(sorted({name.partition(".")[0] for name in missing}))
        rank_zero_only(print)(f"{PRETRAINED} {source}: initialised anew: {parts}")
    return net
