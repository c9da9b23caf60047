"""A translator to use: of a checkpoint, or of a model of Hugging Face."""

from pathlib import Path
from typing import Any, NamedTuple

from datamodules.tokenizers.pairs import PairTokenizer
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tasks.checkpoints.contents import build_seq2seq as build
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.seq2seq.pretrained import published
from tasks.seq2seq.rules import Ends, published_ends, writing


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
    def of(
        cls, net: Seq2Seq, facts: dict[str, Any], generation: FolderGeneration | None = None
    ) -> "Model":
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
        return Model.of(*published(source))
    checkpoint = read_checkpoint(source, "seq2seq")
    saved = checkpoint[KEY]
    net = build(load_config(Seq2SeqConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    return Model.of(net, saved["facts"])
