"""Which encoder-decoder to build: presets, and sizes that fit the data."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from datamodules.tokenizers.pairs import PairTokenizer
from modules.models.seq2seq import ARCHITECTURES, Seq2Seq, Seq2SeqConfig
from tasks.errors import UsageError
from tasks.text import fill_vocabulary


def fit_to_data(config: Seq2SeqConfig, metadata: Mapping[str, Any]) -> Seq2SeqConfig:
    """Returns a config with the vocabularies and `max_length`, in tokens, of the data.

    A longer length that is given stays, if positions are not learned.

    Raises:
        UsageError: A tokenizer has more tokens than the network, texts are longer than its learned
            positions, or two different tokenizers are to share one table.
    """
    config = fill_vocabulary(config, metadata, "source_vocabulary")
    config = fill_vocabulary(config, metadata, "target_vocabulary")
    tokenizer = PairTokenizer.from_metadata(metadata)
    same = tokenizer.source.vocab == tokenizer.target.vocab
    if config.tying in ("all", "inputs") and not same:
        raise UsageError(
            f"--model.net.tying {config.tying} shares one table between source and target, whose "
            "tokenizers number their tokens differently: set --model.net.tying target, or use one "
            "tokenizer for both (--data.tokenizer.joint true)"
        )
    return replace(config, max_length=max(config.max_length or 0, metadata["max_length"]))


def build_seq2seq(config: Seq2SeqConfig) -> Seq2Seq:
    """Builds the network of a config whose sizes are filled in."""
    return ARCHITECTURES[config.architecture](config)
