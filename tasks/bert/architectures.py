"""Which encoder to build: presets by name, or what goes with pretrained weights; and loading those weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from datamodules.cache import cache_folder, content_key
from datamodules.files import replacing
from modules.bert import BERT_PRESETS, BertConfig
from modules.pretrained.bert import load_weights, to_tessera
from modules.pretrained.bert_configs import config_from_huggingface
from tasks.base import filled
from tasks.checkpoints import KEY, Checkpoint, net_weights, read_checkpoint
from tasks.errors import DataError, UsageError, refusals
from tasks.parsing import Options
from tasks.weights import read_weights

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def presets() -> dict[str, Options]:
    """The named sizes as options; tokens and classes come from the data."""
    return {name: asdict(config) for name, config in BERT_PRESETS.items()}


def fitted(config: BertConfig, facts: Mapping[str, Any], **found: Any) -> BertConfig:
    """The configuration for data with these facts.

    Args:
        config: As asked for.
        facts: Of the data: `vocabulary`, the number of tokens, and `max_length`, in tokens.
        found: What else the data decide.

    Raises:
        UsageError: the tokenizer has more tokens than the network, texts are longer than it can read, or a number that
            was asked for contradicts the data.
    """
    tokens = facts["vocabulary"]
    vocabulary = config.vocabulary or tokens  # pretrained tables may have a few rows more than the tokenizer
    if vocabulary < tokens:
        raise UsageError(
            f"the tokenizer has {tokens} tokens and the network {vocabulary}: use the tokenizer that the network was "
            "trained with, or leave --model.net.vocabulary out"
        )
    if config.position == "learned" and facts["max_length"] > config.max_length:
        raise UsageError(
            f"--data.max_length {facts['max_length']} is more than the {config.max_length} learned positions of the "
            "network: lower it, or raise --model.net.max_length"
        )
    return filled(replace(config, vocabulary=vocabulary), found)


def pretrained_options(source: str) -> Options:
    """The network and the tokenizer that go with pretrained weights.

    Args:
        source: a checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.

    Raises:
        UsageError: no such model, folder or checkpoint, or one that is not an encoder of ours.
        DataError: the hub cannot be reached.
    """
    if source.endswith(".ckpt"):
        saved = encoder_checkpoint(source)[KEY]
        net = {**saved["net"], "num_classes": None, "next_sentence": False}
        return {"model": {"net": net}, "data": {"tokenizer": {"file": str(tokenizer_file(source, saved["facts"]))}}}
    folder = local_folder(source)
    _, config = read_config(folder)
    net = asdict(replace(config, num_classes=None))
    return {"model": {"net": net}, "data": {"tokenizer": {"file": str(folder)}}}


def load_pretrained(net: nn.Module, source: str, facts: Mapping[str, Any], fresh: tuple[str, ...] = ()) -> None:
    """Load pretrained weights into `net`; parts that they lack or that have another size start anew, and are named.

    Args:
        net: A `BertClassifier` or `BertMaskedLM`.
        source: As in `pretrained_options`.
        facts: Of the data, with their `tokenizer`.
        fresh: Parts of the network that are to start anew.

    Raises:
        UsageError: the encoder's weights do not fit the network, or its tokenizer is another one.
    """
    if source.endswith(".ckpt"):
        checkpoint = encoder_checkpoint(source)
        same_tokenizer(source, checkpoint[KEY]["facts"], facts)
        state = net_weights(checkpoint)
    else:
        folder = local_folder(source)
        family, config = read_config(folder)
        with refusals(f"--model.pretrained {source}"):
            state = to_tessera(family, read_weights(str(folder / "model.safetensors")), config)
    state = {name: value for name, value in state.items() if not name.startswith(fresh)}
    with refusals(f"--model.pretrained {source}"):
        left = load_weights(net, state)
    if anew := sorted({name.partition(".")[0] for name in left}):
        print(f"--model.pretrained {source}: {' and '.join(anew)} start anew")


def encoder_checkpoint(source: str) -> Checkpoint:
    """The checkpoint, if it is of a task with an encoder."""
    checkpoint = read_checkpoint(source)
    if (task := checkpoint[KEY]["task"]) not in ("bert", "mlm"):
        raise UsageError(f"--model.pretrained {source} is of task '{task}': give one of mlm or bert")
    return checkpoint


def same_tokenizer(source: str, saved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse data whose tokenizer is not the one that the weights were trained with."""
    if saved["tokenizer"] != facts["tokenizer"]:
        raise UsageError(
            f"the tokenizer of the data ({facts['vocabulary']} tokens) is not that of {source} "
            f"({saved['vocabulary']} tokens): leave --data.tokenizer out, it comes with the weights"
        )


def tokenizer_file(source: str, facts: Mapping[str, Any]) -> Path:
    """A file with the tokenizer of a checkpoint: the run folder's own, else one in the cache."""
    beside = Path(source).resolve().parent.parent / "tokenizer.json"
    if beside.is_file() and beside.read_text() == facts["tokenizer"]:
        return beside
    path = cache_folder("tokenizers") / f"{content_key(facts['tokenizer'])}.tokenizer.json"
    with replacing(path) as partial:
        partial.write_text(facts["tokenizer"], encoding="utf-8")
    return path


def read_config(folder: Path) -> tuple[str, BertConfig]:
    """Family and sizes from a Hugging Face folder's `config.json`."""
    try:
        return config_from_huggingface(json.loads((folder / "config.json").read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{folder} has no readable config.json: give a folder of Hugging Face's layout") from error
    except ValueError as error:
        raise UsageError(f"--model.pretrained {folder}: {error}") from error


def local_folder(source: str) -> Path:
    """The folder with the model's files, downloaded where it is on the hub.

    Raises:
        UsageError: no such folder.
        DataError: it could not be downloaded.
    """
    if not source.startswith("hf/"):
        if not Path(source).is_dir():
            raise UsageError(
                f"--model.pretrained {source}: no such folder; give a checkpoint (.ckpt), a folder with config.json, "
                "model.safetensors and tokenizer.json, or hf/<model>"
            )
        return Path(source).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source.removeprefix("hf/"), allow_patterns=list(FILES)))
    except Exception as error:  # of the download: urllib's, huggingface_hub's
        raise DataError(
            f"{source} could not be downloaded ({type(error).__name__}): fetch config.json, model.safetensors and "
            "tokenizer.json elsewhere and give their folder as --model.pretrained FOLDER"
        ) from error
