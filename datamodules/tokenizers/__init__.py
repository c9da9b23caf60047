"""Text to token numbers and back: kinds of tokenizers, their training, and tokenizers that others trained."""

from datamodules.tokenizers.control import CONTROL, ControlIds, Frame
from datamodules.tokenizers.kinds import KINDS, TokenizerConfig, TokenizerName, TruncateName
from datamodules.tokenizers.pairs import PairTokenizer, PairTokenizerConfig
from datamodules.tokenizers.tokenizer import Built, Tokenizer

__all__ = [
    "CONTROL",
    "KINDS",
    "Built",
    "ControlIds",
    "Frame",
    "PairTokenizer",
    "PairTokenizerConfig",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerName",
    "TruncateName",
]
