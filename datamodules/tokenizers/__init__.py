"""Text to token ids and back: training tokenizers, and reading those from elsewhere."""

from datamodules.tokenizers.config import (
    PairTokenizerConfig,
    TokenizerConfig,
    TokenizerName,
    TruncateName,
    truncation,
)
from datamodules.tokenizers.pairs import PairTokenizer
from datamodules.tokenizers.special_tokens import SPECIAL_TOKENS, BoundaryTokens, SpecialTokenIds
from datamodules.tokenizers.tokenizer import ModelInputs, Tokenizer
from datamodules.tokenizers.tokenizer_config import stored_truncation, truncation_settings

__all__ = [
    "SPECIAL_TOKENS",
    "BoundaryTokens",
    "ModelInputs",
    "PairTokenizer",
    "PairTokenizerConfig",
    "SpecialTokenIds",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerName",
    "TruncateName",
    "stored_truncation",
    "truncation",
    "truncation_settings",
]
