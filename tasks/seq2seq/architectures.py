"""Which encoder-decoder to build: presets by name, sizes that fit the data; and models to use."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from datamodules.tokenizers.pairs import PairTokenizer
from modules.generation.translation import Rules
from modules.models.seq2seq import SEQ2SEQ_PRESETS, Seq2Seq, Seq2SeqConfig
from tasks.checkpoints.contents import build_seq2seq as build
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
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
    config = with_vocabulary(with_vocabulary(config, facts, "source_vocabulary"), facts, "target_vocabulary")
    tokenizer = PairTokenizer.from_facts(facts)
    if config.tying in ("all", "inputs") and tokenizer.source.vocabulary != tokenizer.target.vocabulary:
        raise UsageError(
            f"--model.net.tying {config.tying} shares one table between source and target, whose tokenizers number "
            "their tokens otherwise: set --model.net.tying target, or use one tokenizer for both "
            "(--data.tokenizer.joint true)"
        )
    return replace(config, max_length=max(config.max_length or 0, facts["max_length"]))


class Ends(TypedDict):
    """What `modules.generation.translation.translate` must know of the control tokens."""

    start: int
    stop: list[int]
    banned: list[int]
    rules: Rules


def writing(tokenizer: PairTokenizer) -> Ends:
    """Tokens that translations begin with, end with, and never have inside: padding, which some models mistake."""
    pad = tokenizer.target.control("pad")
    return {"start": tokenizer.start, "stop": [tokenizer.end], "banned": [pad], "rules": Rules()}


def published_ends(found: FolderGeneration, facts: Mapping[str, Any]) -> Ends:
    """How a model of Hugging Face's layout writes with `generate`.

    Args:
        found: What its folder asks.
        facts: Of its tokenizers.

    Raises:
        UsageError: It bans phrases, or names tokens that the model does not have.
    """
    first, last = found.tokens("forced_bos_token_id"), found.tokens("forced_eos_token_id")
    rules = Rules(bool(found.asked.renormalize_logits), first, last)
    stop = [*found.stop] or [facts["end"]]
    return {"start": facts["start"], "stop": stop, "banned": [*found.banned], "rules": rules}


class Model(NamedTuple):
    """A translator to use.

    Args:
        net: The network, in evaluation mode.
        tokenizer: Those of both languages, and what they put around a text.
        facts: Of the data that it was trained on.
        ends: How its texts begin and end.
        generation: What its folder asks of options; None: it is one of ours.
    """

    net: Seq2Seq
    tokenizer: PairTokenizer
    facts: dict[str, Any]
    ends: Ends
    generation: FolderGeneration | None = None

    @classmethod
    def of(cls, net: Seq2Seq, facts: dict[str, Any], generation: FolderGeneration | None = None) -> "Model":
        """A network with the tokenizers of its facts; it writes as one of ours, unless its folder says otherwise."""
        tokenizer = PairTokenizer.from_facts(facts)
        ends = published_ends(generation, facts) if generation else writing(tokenizer)
        return cls(net.eval(), tokenizer, facts, ends, generation)


def load_model(source: str) -> Model:
    """The translator of a checkpoint of `fit`, of `hf/<model>`, or of a folder of Hugging Face's layout.

    Raises:
        UsageError: there is no such model, or it is no encoder-decoder.
        RunError, DataError: it is damaged, or the hub cannot be reached.
    """
    if source.startswith("hf/") or Path(source).is_dir():
        from tasks.seq2seq.pretrained import published

        return Model.of(*published(source))
    checkpoint = read_checkpoint(source, "seq2seq")
    saved = checkpoint[KEY]
    net = build(load_config(Seq2SeqConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    return Model.of(net, saved["facts"])
