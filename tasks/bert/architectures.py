"""Which encoder to build: presets, sizes that fit the data, and pretrained weights."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from pytorch_lightning.utilities import rank_zero_only
from torch import nn

from datamodules.tokenizers import Tokenizer, TokenizerConfig, stored_truncation
from datamodules.utils.files import read_object
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import FAMILIES, HEADS
from modules.pretrained.weights import load_weights
from tasks.checkpoints.pretrained import (
    ModelFolder,
    checkpoint_options,
    distinct,
    model_options,
    pretrained_weights,
)
from tasks.checkpoints.weights import PRETRAINED, fill_config, load_pretrained_weights
from tasks.errors import UsageError, usage_errors
from tasks.options import Options, merge_options
from tasks.problems import external_targets
from tasks.text import fill_vocabulary

Net = TypeVar("Net", bound=nn.Module)
TASKS = ("mlm", "bert")  # whose checkpoints hold an encoder
DEFAULT_LENGTH = 128  # of --data.max_length


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
            "use the tokenizer that the network was trained with, and no other --model.net.pad_id"
        )
    if config.next_sentence and not metadata.get("next_sentence"):
        raise UsageError("--model.net.next_sentence true needs --data.next_sentence true: add it")
    return fill_config(replace(config, pad_id=pad_id), sizes)


def pretrained_options(source: str) -> Options:
    """Returns the network and the tokenizer of `--model.pretrained SOURCE` as options.

    Fewer learned positions than the default length of texts also shorten the texts.
    """
    if source.endswith(".ckpt"):
        options = checkpoint_options(source, TASKS, num_classes=None, next_sentence=False)
    else:
        folder = ModelFolder(source, FAMILIES)
        options = model_options(folder.path, asdict(replace(folder.config, num_classes=None)))
    net = options["model"]["net"]
    if net["position"] == "learned" and net["max_length"] < DEFAULT_LENGTH:
        return merge_options(options, {"data": {"max_length": net["max_length"]}})
    return options


def with_weights(folder: ModelFolder) -> tuple[BertClassifier | BertMaskedLM, dict[str, Any]]:
    """Builds the network of a folder of Hugging Face's, and metadata as in a checkpoint.

    It is a classifier, or else a masked language model. Raises `UsageError` if there is no head, or
    not a name for each class.
    """
    what = f"{folder.option} {folder.source}"
    tokenizer = Tokenizer.from_file(folder.path)
    kept = stored_truncation(folder.path)
    config = replace(folder.config, pad_id=tokenizer.special_id("pad"))
    metadata = {
        "tokenizer": tokenizer.to_json(),
        "tokenizer_options": asdict(TokenizerConfig(file=str(folder.path), truncate=kept)),
        "vocabulary": tokenizer.vocab_size,
        "pad_id": config.pad_id,
        "max_length": min(config.max_length, tokenizer_length(folder.path)),
    }
    is_classifier = config.num_classes is not None
    net = BertClassifier(config) if is_classifier else BertMaskedLM(config)
    with usage_errors(what):
        missing = load_weights(net, folder.weights(), HEADS)
    has_rows = any("classifier" in name for name in folder.state())
    if is_classifier and has_rows and any(name.startswith("head.linear") for name in missing):
        raise UsageError(
            f"{what}: config.json has {config.num_classes} classes, but the classifier of its "
            "weights has another number: correct id2label"
        )
    if missing:
        raise UsageError(
            f"{what}: the file holds the encoder only ({missing[0]} is missing): load a model that "
            "was saved for classification or masked language modelling"
        )
    if not is_classifier:
        return net, metadata
    names = folder.class_names() or [str(row) for row in range(config.num_classes)]
    names = distinct(names, range(len(names)))
    if len(names) != config.num_classes:
        raise UsageError(
            f"{what}: config.json names {len(names)} classes, but the classifier has "
            f"{config.num_classes}: correct id2label"
        )
    return net, {**metadata, "class_names": names, **external_targets(folder.problem_type())}


def tokenizer_length(folder: Path) -> float:
    """To how many tokens the tokenizer in a folder truncates texts; inf: it does not."""
    path = folder / "tokenizer_config.json"
    with suppress(OSError, ValueError):
        length = read_object(path).get("model_max_length")
        if isinstance(length, int) and length > 0:
            return length
    return math.inf


def load_pretrained(
    build: Callable[[], Net], source: str, metadata: Mapping[str, Any], reset: tuple[str, ...] = ()
) -> Net:
    """Builds a network with pretrained weights; says which parts of heads are initialised anew.

    Args:
        build: Builds a `BertClassifier` or `BertMaskedLM`, once the weights fit their config.
        source: See `--model.pretrained`.
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
