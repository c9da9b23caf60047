"""How models of Hugging Face begin, end and choose tokens: their `generation_config.json`, read and written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from datamodules.tokenizers.pairs import PairTokenizer
from modules.generation.translation import DecodingRules
from tasks.checkpoints.generation_config import FolderGeneration, read_generation

FORCED = {
    "marian": 0,
    "bart": 2,
}  # the end at the limit, in folders without that file whose config.json leaves it out
Settings = Mapping[str, Any]


class Ends(TypedDict):
    """What `modules.generation.translation.translate` must know of the special tokens."""

    start: int
    stop: list[int]
    banned: list[int]
    rules: DecodingRules


def writing(tokenizer: PairTokenizer) -> Ends:
    """Tokens that translations begin with, end with, and never have inside: padding, which some models mistake."""
    pad = tokenizer.target.special_id("pad")
    return {
        "start": tokenizer.decoder_start_id,
        "stop": [tokenizer.eos_id],
        "banned": [pad],
        "rules": DecodingRules(),
    }


def published_ends(found: FolderGeneration, facts: Mapping[str, Any]) -> Ends:
    """How a model of Hugging Face's layout writes with `generate`.

    Args:
        found: What its folder asks.
        facts: Of its tokenizers.

    Raises:
        UsageError: It bans phrases, or names tokens that the model does not have.
    """
    first, last = found.tokens("forced_bos_token_id"), found.tokens("forced_eos_token_id")
    rules = DecodingRules(bool(found.asked.renormalize_logits), first, last)
    stop = [*found.stop] or [facts["end"]]
    return {"start": facts["start"], "stop": stop, "banned": [*found.banned], "rules": rules}


def folder_generation(folder: Path, settings: Settings, vocabulary: int = 0) -> FolderGeneration:
    """What the folder of a model asks of `generate`; arguments and errors as in `read_generation`."""
    return read_generation(
        folder,
        settings,
        vocabulary,
        forced_eos_token_id=FORCED.get(str(settings.get("model_type"))),
    )


def start_token(folder: Path, settings: Settings, usual: int | None) -> int | None:
    """The token that a decoder begins with; `usual` where nothing says."""
    found = (
        folder_generation(folder, settings).asked.decoder_start_token_id,
        settings.get("decoder_start_token_id"),
    )
    return next((token for token in found if token is not None), usual)


def generation_settings(ends: Ends) -> dict[str, Any]:
    """What a `generation_config.json` says of bans and forced tokens."""
    rules = ends["rules"]
    settings: dict[str, Any] = {}
    for name, tokens in (
        ("forced_bos_token_id", rules.forced_bos),
        ("forced_eos_token_id", rules.forced_eos),
    ):
        settings |= {name: tokens[0] if len(tokens) == 1 else [*tokens]} if tokens else {}
    bans = {"bad_words_ids": [[token] for token in ends["banned"]]} if ends["banned"] else {}
    return {**settings, **bans, "renormalize_logits": rules.renormalize}
