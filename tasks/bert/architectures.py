"""Which encoder to build: presets by name, or what goes with pretrained weights; and loading those weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_only
from torch import nn

from datamodules.cache import cache_folder, content_key, unwritable
from datamodules.files import replacing
from datamodules.tokenizers import Tokenizer
from modules.bert import BERT_PRESETS, BertConfig
from modules.pretrained.bert import load_weights, to_tessera
from modules.pretrained.bert_configs import config_from_huggingface
from tasks.base import filled
from tasks.checkpoints import KEY, Checkpoint, net_weights, read_checkpoint
from tasks.errors import DataError, UsageError, refusals
from tasks.parsing import Options
from tasks.weights import read_weights

FILES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.txt", "vocab.json", "merges.txt"),  # of tokenizers from before tokenizer.json
)
# Each run chooses these for itself: what suits pretraining on much text overfits few labels.
RATES = ("dropout", "mlp_dropout", "attention_dropout", "drop_path", "head_dropout", "pooler_dropout")


def presets() -> dict[str, Options]:
    """The named sizes as options; tokens and classes come from the data."""
    return {name: asdict(config) for name, config in BERT_PRESETS.items()}


def fitted(config: BertConfig, facts: Mapping[str, Any], pretrained: str | None = None, **found: Any) -> BertConfig:
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
    tokens = facts["vocabulary"]
    vocabulary = config.vocabulary or tokens  # pretrained tables may have a few rows more than the tokenizer
    if vocabulary < tokens:
        raise UsageError(
            f"the tokenizer has {tokens} tokens and the network {vocabulary}: use the tokenizer that the network was "
            "trained with, or leave --model.net.vocabulary out"
        )
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
    if config.position == "learned" and facts["max_length"] > config.max_length:
        raise UsageError(
            f"--data.max_length {facts['max_length']} is more than the {config.max_length} learned positions of the "
            "network: lower it, or raise --model.net.max_length"
        )
    return filled(replace(config, vocabulary=vocabulary, padding=padding), found)


def pretrained_options(source: str) -> Options:
    """The network and the tokenizer that go with pretrained weights; a checkpoint decides on no rates of dropout.

    Args:
        source: a checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.

    Raises:
        UsageError: no such model, folder or checkpoint, or one that is not an encoder of ours.
        DataError: the hub cannot be reached.
    """
    if source.endswith(".ckpt"):
        saved = encoder_checkpoint(source)[KEY]
        net = without_rates({**saved["net"], "num_classes": None, "next_sentence": False})
        return {"model": {"net": net}, "data": {"tokenizer": {"file": str(tokenizer_file(source, saved["facts"]))}}}
    folder = local_folder(source)
    _, config = read_config(folder)
    net = asdict(replace(config, num_classes=None))
    return {"model": {"net": net}, "data": {"tokenizer": {"file": str(folder)}}}


def without_rates(net: Options) -> Options:
    """Options of a network without the rates of dropout, for which a preset, a config or the defaults then stand."""
    nested = {name: without_rates(value) for name, value in net.items() if isinstance(value, dict)}
    return {name: value for name, value in {**net, **nested}.items() if name not in RATES}


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
        same_tokenizer(source, Tokenizer.from_json(checkpoint[KEY]["facts"]["tokenizer"]), facts)
        state = net_weights(checkpoint)
    else:
        folder = local_folder(source)
        same_tokenizer(source, Tokenizer.from_file(folder), facts)
        family, config = read_config(folder)
        with refusals(f"--model.pretrained {source}"):
            state = to_tessera(family, read_weights(str(folder / "model.safetensors")), config)
    state = {name: value for name, value in state.items() if not name.startswith(fresh)}
    with refusals(f"--model.pretrained {source}"):
        left = load_weights(net, state)
    if anew := sorted({name.partition(".")[0] for name in left}):
        rank_zero_only(print)(f"--model.pretrained {source}: {' and '.join(anew)} start anew")


def encoder_checkpoint(source: str) -> Checkpoint:
    """The checkpoint, if it is of a task with an encoder."""
    checkpoint = read_checkpoint(source)
    if (task := checkpoint[KEY]["task"]) not in ("bert", "mlm"):
        raise UsageError(f"--model.pretrained {source} is of task '{task}': give one of mlm or bert")
    return checkpoint


def same_tokenizer(source: str, theirs: Tokenizer, facts: Mapping[str, Any]) -> None:
    """Refuse data whose tokenizer cuts texts otherwise than the one that the weights were trained with."""
    own = Tokenizer.from_json(facts["tokenizer"])
    if own.digest != theirs.digest:  # not their texts: another version of the package may write the same otherwise
        raise UsageError(
            f"the tokenizer of the data ({own.size} tokens) is not that of {source} ({theirs.size} tokens): leave "
            "--data.tokenizer out, it comes with the weights"
        )


def tokenizer_file(source: str, facts: Mapping[str, Any]) -> Path:
    """A file with the tokenizer of a checkpoint: the run folder's own, else one in the cache.

    Raises:
        DataError: The cache cannot be written.
    """
    beside = Path(source).resolve().parent.parent / "tokenizer.json"
    if beside.is_file() and beside.read_bytes() == facts["tokenizer"].encode():
        return beside
    path = cache_folder("tokenizers") / f"{content_key(facts['tokenizer'])}.tokenizer.json"
    try:
        with replacing(path) as partial:
            partial.write_bytes(facts["tokenizer"].encode())
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def read_config(folder: Path) -> tuple[str, BertConfig]:
    """Family and sizes from a Hugging Face folder's `config.json`."""
    try:
        return config_from_huggingface(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{folder} has no readable config.json: give a folder of Hugging Face's layout") from error
    except ValueError as error:
        raise UsageError(f"--model.pretrained {folder}: {error}") from error


def local_folder(source: str) -> Path:
    """The folder with the model's files, downloaded where it is on the hub.

    Raises:
        UsageError: no such folder, or none with weights as safetensors.
        DataError: it could not be downloaded.
    """
    if source.startswith("hf/"):
        folder = downloaded(source.removeprefix("hf/"))
    elif Path(source).is_dir():
        folder = Path(source).resolve()
    else:
        raise UsageError(
            f"--model.pretrained {source}: no such folder; give a checkpoint (.ckpt), a folder with config.json, "
            "model.safetensors and tokenizer.json, or hf/<model>"
        )
    if not (folder / "model.safetensors").is_file():
        raise UsageError(
            f"--model.pretrained {source} has no model.safetensors: choose a model that has, or write this one anew "
            "with save_pretrained(FOLDER) of transformers and give that FOLDER"
        )
    return folder


def downloaded(model: str) -> Path:
    """The folder with the files of a model on the hub.

    Raises:
        DataError: it could not be downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except Exception as error:  # of the download: urllib's, huggingface_hub's
        raise DataError(
            f"hf/{model} could not be downloaded ({type(error).__name__}): fetch config.json, model.safetensors and "
            "tokenizer.json elsewhere and give their folder as --model.pretrained FOLDER"
        ) from error
