"""`python -m tasks.seq2seq export`: a checkpoint's weights for other programs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.tokenizers import PairTokenizer
from datamodules.utils.files import write_text
from modules.pretrained.seq2seq import matching_family
from tasks.checkpoints.exporting import (
    TextFormat,
    export_text_model,
    save_tokenizer,
    set_special_tokens,
)
from tasks.seq2seq.decoding import DecodingTokens, generation_settings
from tasks.seq2seq.pretrained import TARGET_FOLDER
from tasks.seq2seq.translator import load_model


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, config and tokenizers for `from_pretrained`, as a Marian,
            BART or T5 model; a tokenizer for targets alone is in its folder `target_tokenizer`;
            safetensors: a file with our own names, config and the data's metadata in the header.
        output: Folder or file to write; null puts it beside the checkpoint.
    """
    model = load_model(ckpt_path)
    convert = partial(to_huggingface, special_tokens=special_tokens(model.metadata))
    write_more = partial(write_tokenizers, tokens=model.tokens)
    export_text_model(model.net, model.metadata, ckpt_path, format, output, convert, write_more)


def special_tokens(metadata: dict[str, Any]) -> dict[str, int]:
    """Returns the special tokens by their roles in a config.json."""
    tokens = {
        "decoder_start": metadata["start"],
        "bos": PairTokenizer.from_metadata(metadata).target.special_ids.bos,
        "eos": metadata["end"],
        "pad": metadata["padding"],
    }
    return {role: number for role, number in tokens.items() if number is not None}


def to_huggingface(
    net: Any, special_tokens: dict[str, int]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns `config.json` and weights of the first family with such a model.

    Raises:
        ValueError: None has one; says why.
    """
    family = matching_family(net.config)
    state = family.weights_to_external(net.state_dict(), net.config)
    return family.config_to_external(net.config, special_tokens), state


def write_tokenizers(metadata: dict[str, Any], folder: Path, tokens: DecodingTokens) -> None:
    """Writes tokenizers, and a `generation_config.json` that equals `translate`."""
    pair = PairTokenizer.from_metadata(metadata)
    sides = {folder: pair.source}
    if not pair.joint:
        sides[folder / TARGET_FOLDER] = pair.target
    for place, tokenizer in sides.items():
        place.mkdir(exist_ok=True)
        content = json.loads(tokenizer.to_json())
        bos = [tokenizer.special_id("bos")] if pair.config.begin else []
        set_special_tokens(content, tokenizer, bos, [tokenizer.special_id("eos")])
        save_tokenizer(content, tokenizer, metadata["max_length"], place)
    settings = {
        **{f"{role}_token_id": number for role, number in special_tokens(metadata).items()},
        **generation_settings(tokens),
        "max_new_tokens": metadata["max_length"],
        "num_beams": 5,
    }
    write_text(folder / "generation_config.json", json.dumps(settings, indent=2))
