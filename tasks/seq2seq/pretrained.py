"""Encoder-decoders that others trained, or an earlier run: their sizes, tokenizers and weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datamodules.tokenizers import PairTokenizer, PairTokenizerConfig, Tokenizer
from datamodules.utils.files import read_object
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from modules.pretrained.seq2seq import load_weights, to_tessera
from modules.pretrained.seq2seq_configs import config_from_huggingface
from tasks.checkpoints.contents import build_seq2seq as build
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.checkpoints.pretrained import (
    CKPT_PATH,
    OPTION,
    Settings,
    checkpoint_of,
    folder_state,
    local_folder,
    read_settings,
    same_tokenizer,
    tokenizer_file,
    without_rates,
)
from tasks.checkpoints.reading import KEY, net_weights
from tasks.checkpoints.weights import State
from tasks.cli.parsing import Options
from tasks.errors import UsageError, usage_errors
from tasks.seq2seq.architectures import fitted
from tasks.seq2seq.rules import folder_generation, start_token

TASKS = ("seq2seq",)  # whose checkpoints hold an encoder-decoder
SIDES = ("source", "target")
FRAMES = (
    "start",
    "begin",
    "prompt",
)  # what a network learned of the control tokens and words around texts
PIECES = "spiece.model"  # T5's tokenizer where there is no tokenizer.json
TARGET = "target_tokenizer"  # the folder of the target's own tokenizer in an export


def pretrained_options(source: str) -> Options:
    """The network and the tokenizers that go with pretrained weights; a checkpoint decides on no rates of dropout.

    Args:
        source: a checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.

    Raises:
        UsageError: no such model, folder or checkpoint, or one that is not an encoder-decoder of ours.
        DataError: the hub cannot be reached.
    """
    if source.endswith(".ckpt"):
        saved = checkpoint_of(source, TASKS)[KEY]
        facts, net = saved["facts"], without_rates(saved["net"])
        paths = (
            tokenizer_file(source, {"tokenizer": facts[f"{side}_tokenizer"]}) for side in SIDES
        )
        options = _files(*paths) | {name: facts["tokenizer_options"][name] for name in FRAMES}
    else:
        folder = local_folder(source)
        config, tokenizer = read_folder(folder)
        folder_state(folder, converted, meta=True)
        net = asdict(config)
        options = {name: getattr(tokenizer, name) for name in ("file", "target_file", *FRAMES)}
    return {"model": {"net": net}, "data": {"tokenizer": options}}


def _files(source: Path, target: Path) -> Options:
    """Options that name the files of both tokenizers."""
    return {"file": str(source), "target_file": None if target == source else str(target)}


def read_folder(folder: Path, option: str = OPTION) -> tuple[Seq2SeqConfig, PairTokenizerConfig]:
    """Sizes of the model in a folder of Hugging Face's layout, and its tokenizers; `option` is what named it.

    Raises:
        UsageError: there is no such model, or no tokenizer.
        DataError: a tokenizer cannot be read.
    """
    (family, config), settings = read_settings(
        folder, lambda found: (config_from_huggingface(found), found), option
    )
    usual = settings.get(
        "eos_token_id" if family == "bart" else "pad_token_id"
    )  # in older files of BART and T5
    start = start_token(folder, settings, usual)
    if (folder / "source.spm").is_file():
        return config, PairTokenizerConfig(
            **_files(folder / "source.spm", folder / "target.spm"), start=start
        )
    if (folder / PIECES).is_file() and not (folder / "tokenizer.json").is_file():
        return config, PairTokenizerConfig(**_files(folder / PIECES, folder / PIECES), start=start)
    files = _files(folder, folder / TARGET if (folder / TARGET).is_dir() else folder)
    return config, PairTokenizerConfig(
        **files, start=start, begin=opens(Tokenizer.from_file(folder))
    )


def opens(tokenizer: Tokenizer) -> bool:
    """Whether its file puts [BOS] before a text."""
    from tokenizers import Tokenizer as Backend

    content = json.loads(tokenizer.to_json())
    content.pop("control", None)
    return bool(Backend.from_str(json.dumps(content)).encode("").ids[:1] == [tokenizer.ids.bos])


def load_pretrained(net: Seq2Seq, source: str, facts: Mapping[str, Any]) -> None:
    """Load pretrained weights into `net`, all of them.

    Args:
        net: The network.
        source: As in `pretrained_options`.
        facts: Of the data, with their tokenizers.

    Raises:
        UsageError: the weights do not fit the network, or a tokenizer is another one.
    """
    if source.endswith(".ckpt"):
        checkpoint = checkpoint_of(source, TASKS)
        theirs, state = PairTokenizer.from_facts(checkpoint[KEY]["facts"]), net_weights(checkpoint)
    else:
        folder = local_folder(source)
        theirs, state = tokenizers(read_folder(folder)[1]), folder_state(folder, converted)
    for side in SIDES:
        same_tokenizer(source, getattr(theirs, side), {"tokenizer": facts[f"{side}_tokenizer"]})
    with usage_errors(f"--model.pretrained {source}"):
        load_weights(net, state)


def tokenizers(config: PairTokenizerConfig) -> PairTokenizer:
    """Those of files."""
    return PairTokenizer.for_texts(list, list, config)


def converted(settings: Settings, weights: State) -> State:
    """Weights of Hugging Face under our names."""
    family, config = config_from_huggingface(settings)
    return to_tessera(family, weights, config)


def published(source: str) -> tuple[Seq2Seq, dict[str, Any], FolderGeneration]:
    """A model of `hf/<model>`, or of a folder of Hugging Face's layout, as it is, what `TranslationData.facts` say, and
    what the folder asks of generation.

    Raises:
        UsageError: there is no such model, or it is no encoder-decoder of ours.
        DataError: it is damaged, or the hub cannot be reached.
    """
    folder = local_folder(source, CKPT_PATH)
    config, options = read_folder(folder, CKPT_PATH)
    facts = {
        **tokenizers(options).facts(),
        "tokenizer_options": asdict(options),
        "max_length": config.max_length,
        "languages": languages(folder),
    }
    state = folder_state(folder, converted, CKPT_PATH)
    with usage_errors(source):
        net = build(fitted(config, facts))
        load_weights(net, state)
    return (
        net,
        facts,
        folder_generation(folder, read_settings(folder, dict, CKPT_PATH), net.vocabulary),
    )


def languages(folder: Path) -> list[str]:
    """Source and target, such as en and de, where a Marian model says so; else none."""
    file = folder / "tokenizer_config.json"
    try:
        said = read_object(file) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error}): download the model again") from error
    pair = [
        name for name in (said.get("source_lang"), said.get("target_lang")) if isinstance(name, str)
    ]
    return pair if len(pair) == 2 else []
