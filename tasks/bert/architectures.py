"""Which encoder to build: presets by name, or what goes with pretrained weights; and loading those weights."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pytorch_lightning.utilities import rank_zero_only
from torch import nn

from modules.models.bert import BERT_PRESETS, BertConfig
from modules.pretrained.bert import load_weights, to_tessera
from modules.pretrained.bert_configs import config_from_huggingface
from tasks.checkpoints.pretrained import (
    Settings,
    checkpoint_options,
    folder_options,
    folder_state,
    local_folder,
    pretrained_state,
    read_settings,
)
from tasks.checkpoints.weights import State, filled
from tasks.cli.parsing import Options
from tasks.errors import UsageError, usage_errors
from tasks.text import with_vocabulary

TASKS = ("mlm", "bert")  # whose checkpoints hold an encoder


def presets() -> dict[str, Options]:
    """The named sizes as options; tokens and classes come from the data."""
    return {name: asdict(config) for name, config in BERT_PRESETS.items()}


def fitted(
    config: BertConfig, facts: Mapping[str, Any], pretrained: str | None = None, **found: Any
) -> BertConfig:
    """The configuration for data with these facts.

    Args:
        config: As asked for.
        facts: Of the data: `vocabulary`, the number of tokens, `padding`, the number of that token, `max_length`, in
            tokens, and whether there are pairs of texts, `next_sentence`.
        pretrained: Where weights come from that decided the configuration; None: weights are new.
        found: What else the data decide.

    Raises:
        UsageError: the tokenizer has more tokens than the network or pads with another one, texts are longer than it
            can read, or what was asked for contradicts the data.
    """
    config = with_vocabulary(config, facts)
    padding = facts.get("padding", config.padding)  # older checkpoints do not say
    if config.padding != padding and (pretrained or config.padding != BertConfig.padding):
        raise UsageError(
            f"the tokenizer pads with token {padding} and the network with token {config.padding}: use the tokenizer "
            "that the network was trained with, or leave --model.net.padding out"
        )
    if config.next_sentence and not facts.get("next_sentence"):
        raise UsageError(
            "--model.net.next_sentence true needs pairs of texts: add --data.next_sentence true to pretraining, or "
            "leave it out"
        )
    return filled(replace(config, padding=padding), found)


def pretrained_options(source: str) -> Options:
    """The network and the tokenizer that go with pretrained weights; a checkpoint decides on no rates of dropout.

    Args:
        source: a checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.

    Raises:
        UsageError: no such model, folder or checkpoint, or one that is not an encoder of ours.
        DataError: the hub cannot be reached.
    """
    if source.endswith(".ckpt"):
        return checkpoint_options(source, TASKS, num_classes=None, next_sentence=False)
    folder = local_folder(source)
    _, config = read_settings(folder, config_from_huggingface)
    folder_state(folder, converted, meta=True)
    return folder_options(folder, asdict(replace(config, num_classes=None)))


def load_pretrained(
    net: nn.Module, source: str, facts: Mapping[str, Any], fresh: tuple[str, ...] = ()
) -> None:
    """Load pretrained weights into `net`; parts that they lack or that have another size start anew, and are named.

    Args:
        net: A `BertClassifier` or `BertMaskedLM`.
        source: As in `pretrained_options`.
        facts: Of the data, with their `tokenizer`.
        fresh: Parts of the network that are to start anew.

    Raises:
        UsageError: the encoder's weights do not fit the network, or its tokenizer is another one.
    """
    state = pretrained_state(source, TASKS, facts, converted)
    state = {name: value for name, value in state.items() if not name.startswith(fresh)}
    with usage_errors(f"--model.pretrained {source}"):
        left = load_weights(net, state)
    if anew := sorted({name.partition(".")[0] for name in left}):
        rank_zero_only(print)(f"--model.pretrained {source}: starts anew with {' and '.join(anew)}")


def converted(settings: Settings, weights: State) -> State:
    """Weights of Hugging Face under our names."""
    family, config = config_from_huggingface(settings)
    return to_tessera(family, weights, config)
