"""How models of Hugging Face begin, end and choose tokens: their `generation_config.json`, read and written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.checkpoints.generation_config import FolderGeneration, read_generation
from tasks.seq2seq.architectures import Ends

FORCED = {"marian": 0, "bart": 2}  # the end at the limit, in folders without that file whose config.json leaves it out
Settings = Mapping[str, Any]


def folder_generation(folder: Path, settings: Settings, vocabulary: int = 0) -> FolderGeneration:
    """What the folder of a model asks of `generate`; arguments and errors as in `read_generation`."""
    return read_generation(
        folder, settings, vocabulary, forced_eos_token_id=FORCED.get(str(settings.get("model_type")))
    )


def start_token(folder: Path, settings: Settings, usual: int | None) -> int | None:
    """The token that a decoder begins with; `usual` where nothing says."""
    found = (folder_generation(folder, settings).asked.decoder_start_token_id, settings.get("decoder_start_token_id"))
    return next((token for token in found if token is not None), usual)


def generation_settings(ends: Ends) -> dict[str, Any]:
    """What a `generation_config.json` says of bans and forced tokens."""
    rules = ends["rules"]
    settings: dict[str, Any] = {}
    for name, tokens in (("forced_bos_token_id", rules.first), ("forced_eos_token_id", rules.last)):
        settings |= {name: tokens[0] if len(tokens) == 1 else [*tokens]} if tokens else {}
    bans = {"bad_words_ids": [[token] for token in ends["banned"]]} if ends["banned"] else {}
    return {**settings, **bans, "renormalize_logits": rules.renormalise}
