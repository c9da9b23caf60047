"""Which tokenizers to train, or to read from files."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from datamodules.tokenizers.special_tokens import SPECIAL_TOKENS
from datamodules.utils.errors import UsageError

TokenizerName = Literal["whitespace", "word", "character", "bpe", "wordpiece"]
TruncateName = Literal["head", "tail", "both"]
KEPT_PARTS = {"head": "the head", "tail": "the tail", "both": "head and tail"}


def truncation(what: str, limit: int, kept: TruncateName) -> str:
    """The message that texts were truncated to `limit` tokens.

    >>> truncation("3 of 20 texts", 128, "head")
    '3 of 20 texts: truncated to 128 tokens, keeping the head'
    """
    return f"{what}: truncated to {limit:,} tokens, keeping {KEPT_PARTS[kept]}"


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer to train, or a file of one.

    Args:
        kind: Kind of tokenizer; whitespace: words separated by spaces; word: words and runs of
            punctuation; character: single characters; bpe: byte-level BPE, for which nothing is
            unknown (Radford 2019); wordpiece: pieces of words (Schuster 2012, Devlin 2019). With a
            file, this and the next three options are what that file says, or null if it does not
            say.
        vocabulary: Largest number of tokens, the 7 special tokens included.
        min_frequency: Words, pieces or characters that occur less often are not learned.
        lowercase: Whether A and a are the same; wordpiece then drops accents, too.
        file: A `tokenizer.json`, or a folder in Hugging Face's layout, to use instead of training
            one.
        truncate: What is kept of a text that is too long: its head, its tail, or half of each.
    """

    kind: TokenizerName | None = "wordpiece"
    vocabulary: int = 16_000
    min_frequency: int | None = 2
    lowercase: bool | None = True
    file: str | None = None
    truncate: TruncateName = "head"

    def __post_init__(self) -> None:
        if self.file is None and None in (self.kind, self.min_frequency, self.lowercase):
            raise UsageError(
                "--data.tokenizer.kind, min_frequency or lowercase is null: set it, or give a file."
            )
        kinds = get_args(TokenizerName)
        if self.kind not in (None, *kinds):
            raise UsageError(
                f"--data.tokenizer.kind is {self.kind}, but must be one of {', '.join(kinds)}."
            )
        if self.vocabulary <= len(SPECIAL_TOKENS):
            raise UsageError(
                f"--data.tokenizer.vocabulary is {self.vocabulary}, but must be more than its "
                f"{len(SPECIAL_TOKENS)} special tokens."
            )
        if self.min_frequency is not None and self.min_frequency < 1:
            raise UsageError(
                f"--data.tokenizer.min_frequency is {self.min_frequency}, but must be at least 1."
            )


@dataclass(frozen=True)
class PairTokenizerConfig(TokenizerConfig):
    """Tokenizers to train for two languages, or files of them.

    Args:
        joint: One tokenizer for both languages, trained from both (Sennrich 2016, 3.2); false: one
            for each, with the same options.
        target_file: File like `file`, for the target if it has a tokenizer of its own; no tokenizer
            is then trained.
        start: Id of the token that a decoder begins with; null: [BOS]. Marian and T5 begin with
            their padding, BART with [EOS].
        begin: Put [BOS] before each text of source and target, as BART does.
        prompt: Text before each source that names the task, such as T5's "translate English to
            German: ".
    """

    kind: TokenizerName | None = "bpe"
    vocabulary: int = 8000
    lowercase: bool | None = False
    joint: bool = True
    target_file: str | None = None
    start: int | None = None
    begin: bool = False
    prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_file is not None and self.file is None:
            raise UsageError(
                "--data.tokenizer.target_file needs --data.tokenizer.file for the source: give "
                "both, or train both."
            )

    def single(self) -> TokenizerConfig:
        """The options of one of the two tokenizers."""
        return TokenizerConfig(
            **{field.name: getattr(self, field.name) for field in fields(TokenizerConfig)}
        )
