"""How models of Hugging Face begin, end and choose tokens: their `generation_config.json`, read and written."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modules.translation import Rules
from tasks.errors import UsageError
from tasks.seq2seq.architectures import Ends

FILE = "generation_config.json"
FORCED = {"marian": 0, "bart": 2}  # the end at the limit, in folders without that file whose config.json leaves it out
UNUSUAL = {  # what `generate` would do besides, and where it does nothing
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "repetition_penalty": 1.0,
    "sequence_bias": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
Settings = Mapping[str, Any]


def read_generation(folder: Path, settings: Settings) -> Settings:
    """The settings by which `generate` writes: the file, or else what the `config.json` says of it.

    Raises:
        UsageError: The file cannot be read.
    """
    file = folder / FILE
    if not file.is_file():
        return {"forced_eos_token_id": FORCED.get(str(settings.get("model_type"))), **settings}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{file} is not readable: fetch or write it again, or leave it out") from error


def start_token(folder: Path, settings: Settings, usual: int | None) -> int | None:
    """The token that a decoder begins with; `usual` where nothing says."""
    found = (read_generation(folder, settings), settings)
    return next((value for one in found if (value := one.get("decoder_start_token_id")) is not None), usual)


def published_ends(folder: Path, facts: Settings, vocabulary: int) -> Ends:
    """How the model in a folder writes with `generate`; says what is left out of that.

    Args:
        folder: Of Hugging Face's layout.
        facts: Of its tokenizers.
        vocabulary: Number of tokens of the model.

    Raises:
        UsageError: It bans phrases, or names tokens that the model does not have.
    """
    found = read_generation(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")))
    stop = _numbers(found.get("eos_token_id")) or (facts["end"],)
    phrases = found.get("bad_words_ids") or []
    if any(len(phrase) != 1 for phrase in phrases):
        raise UsageError(f"{folder} bans phrases of several tokens (bad_words_ids), which is not supported: drop them")
    banned = [token for (token,) in phrases if token not in stop]
    first, last = (_numbers(found.get(f"forced_{end}_token_id")) for end in ("bos", "eos"))
    if strange := [token for token in (*stop, *banned, *first, *last) if not 0 <= token < vocabulary]:
        raise UsageError(f"{folder / FILE} names token {strange[0]}, but the model has {vocabulary}: correct it")
    ignored = [
        f"{name} {found[name]}" for name, usual in UNUSUAL.items() if found.get(name, usual) not in (usual, None)
    ]
    if ignored:
        print(f"{folder} asks for {', '.join(ignored)}, which is not done here", file=sys.stderr)
    rules = Rules(bool(found.get("renormalize_logits")), first, last)
    return {"start": facts["start"], "stop": [*stop], "banned": banned, "rules": rules}


def generation_settings(ends: Ends) -> dict[str, Any]:
    """What a `generation_config.json` says of bans and forced tokens."""
    rules = ends["rules"]
    settings: dict[str, Any] = {}
    for name, tokens in (("forced_bos_token_id", rules.first), ("forced_eos_token_id", rules.last)):
        settings |= {name: tokens[0] if len(tokens) == 1 else [*tokens]} if tokens else {}
    bans = {"bad_words_ids": [[token] for token in ends["banned"]]} if ends["banned"] else {}
    return {**settings, **bans, "renormalize_logits": rules.renormalise}


def _numbers(value: int | list[int] | None) -> tuple[int, ...]:
    """One number, several, or none."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
