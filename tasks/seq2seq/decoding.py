"""Special tokens of decoding: those that begin and end a translation, and banned ones."""

from pathlib import Path
from typing import Any, TypedDict

from datamodules.tokenizers.pairs import PairTokenizer
from modules.generation.translation import DecodingRules
from modules.pretrained.settings import Settings
from tasks.checkpoints.generation_config import FolderGeneration, read_generation

# The token forced at the length limit if a folder's files do not name it.
FORCED_EOS = {"marian": 0, "bart": 2}


class DecodingTokens(TypedDict):
    """Arguments of `modules.generation.translation.translate` about special tokens."""

    start: int
    stop: list[int]
    banned: list[int]
    rules: DecodingRules


def decoding_tokens(
    tokenizer: PairTokenizer, generation: FolderGeneration | None = None
) -> DecodingTokens:
    """Returns the special tokens of a model.

    Args:
        tokenizer: Of the model.
        generation: Settings of its folder, followed as `generate` of transformers does; None: it is
            a checkpoint of ours, for which only padding is banned.
    """
    if generation is None:
        stop = [tokenizer.eos_id]
        banned = [tokenizer.target.special_id("pad")]
        rules = DecodingRules()
    else:
        stop = [*generation.stop] or [tokenizer.eos_id]
        banned = [*generation.banned]
        rules = DecodingRules(
            bool(generation.settings.renormalize_logits),
            generation.tokens("forced_bos_token_id"),
            generation.tokens("forced_eos_token_id"),
        )
    start = tokenizer.decoder_start_id
    return {"start": start, "stop": stop, "banned": banned, "rules": rules}


def folder_generation(folder: Path, config: Settings, vocabulary: int = 0) -> FolderGeneration:
    """Returns the generation settings of a folder; arguments as in `read_generation`."""
    forced = FORCED_EOS.get(str(config.get("model_type")))
    return read_generation(folder, config, vocabulary, forced_eos_token_id=forced)


def decoder_start(folder: Path, config: Settings, default: int | None) -> int | None:
    start = folder_generation(folder, config).settings.decoder_start_token_id
    if start is None:
        start = config.get("decoder_start_token_id")
    return default if start is None else start


def generation_settings(tokens: DecodingTokens) -> dict[str, Any]:
    """Returns the entries of a `generation_config.json` about banned and forced tokens."""
    rules = tokens["rules"]
    settings: dict[str, Any] = {"renormalize_logits": rules.renormalize}
    for name, forced in (
        ("forced_bos_token_id", rules.forced_bos),
        ("forced_eos_token_id", rules.forced_eos),
    ):
        if forced:
            settings[name] = forced[0] if len(forced) == 1 else [*forced]
    if tokens["banned"]:
        settings["bad_words_ids"] = [[token] for token in tokens["banned"]]
    return settings
