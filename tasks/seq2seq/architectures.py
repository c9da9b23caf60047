"""Which encoder-decoder to build: presets by name, and sizes that fit the data."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from datamodules.tokenizers.pairs import PairTokenizer
from modules.models.seq2seq import SEQ2SEQ_PRESETS, Seq2SeqConfig
from tasks.cli.parsing import Options
from tasks.errors import UsageError
from tasks.text import with_vocabulary


def presets() -> dict[str, Options]:
    """The named sizes as options; tokens and lengths come from the data."""
    return {name: asdict(config) for name, config in SEQ2SEQ_PRESETS.items()}


def fitted(config: Seq2SeqConfig, facts: Mapping[str, Any]) -> Seq2SeqConfig:
    """The configuration for data with these facts: `source_vocabulary`, `target_vocabulary`, `max_length` (tokens).

    The length is that of the data where it is not given, and grows to it where positions need no learning.

    Raises:
        UsageError: a tokenizer has more tokens than the network, texts are longer than it has learned positions, or
            one table is to be shared by two tokenizers that number their tokens otherwise.
        ValueError: one table is to be shared by vocabularies of two sizes.
    """
    config = with_vocabulary(
        with_vocabulary(config, facts, "source_vocabulary"), facts, "target_vocabulary"
    )
    tokenizer = PairTokenizer.from_facts(facts)
    if config.tying in ("all", "inputs") and tokenizer.source.vocab != tokenizer.target.vocab:
        raise UsageError(
            f"--model.net.tying {config.tying} shares one table between source and target, whose tokenizers number "
            "their tokens otherwise: set --model.net.tying target, or use one tokenizer for both "
            "(--data.tokenizer.joint true)"
        )
    return replace(config, max_length=max(config.max_length or 0, facts["max_length"]))
