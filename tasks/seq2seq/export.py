"""`python -m tasks.seq2seq export`: a checkpoint's weights for other programs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.tokenizers import PairTokenizer
from datamodules.utils.files import write_text
from modules.pretrained.seq2seq import from_tessera
from modules.pretrained.seq2seq_configs import config_to_huggingface, suited_family
from tasks.checkpoints.exporting import TextFormat, export_texts, save_tokenizer, write_frame
from tasks.seq2seq.pretrained import TARGET
from tasks.seq2seq.rules import Ends, generation_settings
from tasks.seq2seq.translator import load_model


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, configuration and tokenizers, for `from_pretrained`, as a Marian, BART or T5
            model; a tokenizer for targets alone is in its folder `target_tokenizer`; safetensors: a file with our own
            names, configuration and the data's facts in the header.
        output: Folder or file to write; null puts it beside the checkpoint.
    """
    model = load_model(ckpt_path)
    translate = partial(to_huggingface, special=special_tokens(model.facts))
    beside = partial(write_tokenizers, ends=model.ends)
    export_texts(model.net, model.facts, ckpt_path, format, output, translate, beside)


def special_tokens(facts: dict[str, Any]) -> dict[str, int]:
    """Ids of special tokens, by the roles that a config.json has."""
    begin = PairTokenizer.from_facts(facts).target.special_ids.bos
    known = {
        "decoder_start": facts["start"],
        "bos": begin,
        "eos": facts["end"],
        "pad": facts["padding"],
    }
    return {role: number for role, number in known.items() if number is not None}


def to_huggingface(net: Any, special: dict[str, int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Content of `config.json` and the weights by their names.

    Raises:
        ValueError: they have no such model; says why.
    """
    family = suited_family(net.config)
    return config_to_huggingface(family, net.config, special), from_tessera(
        family, net.state_dict(), net.config
    )


def write_tokenizers(facts: dict[str, Any], folder: Path, ends: Ends) -> None:
    """The tokenizers, and a `generation_config.json` with which `generate` makes what `translate` does."""
    pair = PairTokenizer.from_facts(facts)
    sides = (
        {folder: pair.source} if pair.joint else {folder: pair.source, folder / TARGET: pair.target}
    )
    for place, tokenizer in sides.items():
        place.mkdir(exist_ok=True)
        content = json.loads(tokenizer.to_json())
        head = [tokenizer.special_id("bos")] if pair.config.begin else []
        write_frame(content, tokenizer, head, [tokenizer.special_id("eos")])
        save_tokenizer(content, tokenizer, facts["max_length"], place)
    settings = {
        **{f"{role}_token_id": number for role, number in special_tokens(facts).items()},
        **generation_settings(ends),
        "max_new_tokens": facts["max_length"],
        "num_beams": 5,
    }
    write_text(folder / "generation_config.json", json.dumps(settings, indent=2))
