"""Special tokens of decoding: where translations start, end, and what they never contain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from datamodules.tokenizers.pairs import PairTokenizer
from modules.generation.translation import DecodingRules
from tasks.checkpoints.generation_config import FolderGeneration, read_generation

# The token forced at the length limit, in folders without generation_config.json whose config.json
# leaves it out.
FORCED_EOS = {"marian": 0, "bart": 2}
Settings = Mapping[str, Any]


class DecodingTokens(TypedDict):
    """Arguments of `modules.generation.translation.translate` about special tokens."""

    start: int
    stop: list[int]
    banned: list[int]
    rules: DecodingRules


def decoding_tokens(tokenizer: PairTokenizer) -> DecodingTokens:
    """Returns the tokens of a model of ours; padding is banned, some models generate it."""
    padding = tokenizer.target.special_id("pad")
    return {
        "start": tokenizer.decoder_start_id,
        "stop": [tokenizer.eos_id],
        "banned": [padding],
        "rules": DecodingRules(),
    }


def folder_decoding_tokens(
    generation: FolderGeneration, metadata: Mapping[str, Any]
) -> DecodingTokens:
    """Returns the tokens that `generate` of transformers uses for a folder.

    Args:
        generation: Settings of the folder.
        metadata: Of its tokenizers.

    Raises:
        UsageError: The folder bans phrases, or names tokens that the model does not have.
    """
    first = generation.tokens("forced_bos_token_id")
    last = generation.tokens("forced_eos_token_id")
    return {
        "start": metadata["start"],
        "stop": [*generation.stop] or [metadata["end"]],
        "banned": [*generation.banned],
        "rules": DecodingRules(bool(generation.settings.renormalize_logits), first, last),
    }


def folder_generation(folder: Path, config: Settings, vocabulary: int = 0) -> FolderGeneration:
    """Reads the generation settings of a folder; arguments and errors as in `read_generation`."""
    forced = FORCED_EOS.get(str(config.get("model_type")))
    return read_generation(folder, config, vocabulary, forced_eos_token_id=forced)


def decoder_start(folder: Path, config: Settings, default: int | None) -> int | None:
    """Returns the token that a decoder starts with."""
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
