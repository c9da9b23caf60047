"""Text to token numbers and back: kinds of tokenizers, their training, and tokenizers that others trained."""

from datamodules.tokenizers.control import CONTROL, ControlIds, Frame
from datamodules.tokenizers.kinds import KINDS, TokenizerConfig, TokenizerName, TruncateName
from datamodules.tokenizers.tokenizer import Built, Tokenizer

__all__ = [
    "CONTROL",
    "KINDS",
    "Built",
    "ControlIds",
    "Frame",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerName",
    "TruncateName",
]
