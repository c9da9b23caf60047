"""A translation model for inference: of a checkpoint, or of Hugging Face."""

from pathlib import Path
from typing import Any, NamedTuple

from datamodules.tokenizers.pairs import PairTokenizer
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.seq2seq.architectures import build_seq2seq
from tasks.seq2seq.decoding import DecodingTokens, decoding_tokens
from tasks.seq2seq.pretrained import load_folder


class TranslationModel(NamedTuple):
    """A translation model for inference.

    Args:
        net: The network, in evaluation mode.
        tokenizer: Of both languages.
        metadata: Of the data that it was trained on.
        tokens: Special tokens of decoding.
        generation: Settings of its folder; None: it is a checkpoint of ours.
    """

    net: Seq2Seq
    tokenizer: PairTokenizer
    metadata: dict[str, Any]
    tokens: DecodingTokens
    generation: FolderGeneration | None = None

    @classmethod
    def of(
        cls, net: Seq2Seq, metadata: dict[str, Any], generation: FolderGeneration | None = None
    ) -> "TranslationModel":
        """Returns a network with the tokenizers of its metadata, and the settings of its folder."""
        tokenizer = PairTokenizer.from_metadata(metadata)
        tokens = decoding_tokens(tokenizer, generation)
        return cls(net.eval(), tokenizer, metadata, tokens, generation)


def load_model(source: str) -> TranslationModel:
    """Loads a checkpoint of `fit`, `hf/<model>`, or a folder of Hugging Face's layout."""
    if source.startswith("hf/") or Path(source).is_dir():
        return TranslationModel.of(*load_folder(source))
    checkpoint = read_checkpoint(source, "seq2seq")
    saved = checkpoint[KEY]
    net = build_seq2seq(load_config(Seq2SeqConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    return TranslationModel.of(net, saved["metadata"])
