"""Tokenizers of two languages, and the control tokens around a text and its translation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from datamodules.tokenizers.kinds import TokenizerConfig, TokenizerName
from datamodules.tokenizers.tokenizer import Tokenizer
from datamodules.utils.cache import Texts, content_key
from datamodules.utils.errors import UsageError


@dataclass(frozen=True)
class PairTokenizerConfig(TokenizerConfig):
    """Tokenizers to train for two languages, or files of them.

    Args:
        joint: One tokenizer for both languages, trained from both (Sennrich 2016, 3.2); false: one for each, by the
            same options.
        target_file: A file as `file`, for the target where that is not cut by the source's; there is no training then.
        start: Number of the token that a decoder begins with; null: [BOS]. Marian and T5 begin with their padding,
            BART with [EOS].
        begin: Put [BOS] before each text, too, in source and target, as BART does.
        prompt: Text before each source that names the task, such as T5's "translate English to German: ".

    Raises:
        UsageError: An option is out of range.
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
                "the tokenizer's target_file needs a file for the source: give both, or train both."
            )

    def single(self, **changes: Any) -> TokenizerConfig:
        """The options of one of the tokenizers."""
        own = asdict(self)
        return TokenizerConfig(
            **{field.name: own[field.name] for field in fields(TokenizerConfig)} | changes
        )


class PairTokenizer:
    """The tokenizers of a source and a target language; the same one twice where they are joint.

    A source is `text [EOS]`, a target `start text [EOS]`, of which a decoder reads all but the last and writes all but
    the first; with `begin` there is a [BOS] before both texts.

    Args:
        source, target: What cuts the texts.
        config: What else there is to know.

    Raises:
        UsageError: A tokenizer lacks a control token that is needed here.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer, config: PairTokenizerConfig) -> None:
        self.source, self.target, self.config = source, target, config
        self.start = target.control("bos") if config.start is None else config.start
        self.end = target.control("eos")
        self._heads = [[side.control("bos")] if config.begin else [] for side in (source, target)]
        if not 0 <= self.start < target.size:
            raise UsageError(
                f"the tokenizer's start is {self.start}, but must be one of its {target.size} tokens."
            )
        self._source_end = source.control("eos")

    @classmethod
    def for_texts(
        cls,
        sides: Callable[[], Sequence[Texts]],
        joined: Callable[[], Texts],
        config: PairTokenizerConfig,
    ) -> "PairTokenizer":
        """Those of the files, where given; else trained, once: they are cached.

        Args:
            sides: Gives the texts of the source and those of the target.
            joined: Gives both as one.
            config: What to train.

        Raises:
            UsageError, DataError: As `Tokenizer.for_texts`.
        """
        if config.file is not None:
            source = Tokenizer.for_texts([], config.single())
            other = config.target_file
            return cls(
                source,
                Tokenizer.for_texts([], config.single(file=other)) if other else source,
                config,
            )
        if config.joint:
            both = Tokenizer.for_texts(joined(), config.single())
            return cls(both, both, config)
        first, second = (Tokenizer.for_texts(texts, config.single()) for texts in sides())
        return cls(first, second, config)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "PairTokenizer":
        """From the facts of `datamodules.translation.TranslationData`, which a checkpoint keeps.

        Raises:
            DataError: They hold no tokenizer.
        """
        config = PairTokenizerConfig(**facts["tokenizer_options"])
        first, second = facts["source_tokenizer"], facts["target_tokenizer"]
        source = Tokenizer.from_json(first, config.truncate)
        return cls(
            source,
            source if first == second else Tokenizer.from_json(second, config.truncate),
            config,
        )

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of them.

        Returns:
            source_tokenizer, target_tokenizer (contents of their tokenizer.json), source_vocabulary, target_vocabulary
            (their sizes), source_padding, padding, start, end (numbers of the tokens that fill up a source, fill up a
            target, begin and end a target).
        """
        own = self.source.to_json()
        return {
            "source_tokenizer": own,
            "target_tokenizer": own if self.joint else self.target.to_json(),
            "source_vocabulary": self.source.size,
            "target_vocabulary": self.target.size,
            "source_padding": self.source.control("pad"),
            "padding": self.target.control("pad"),
            "start": self.start,
            "end": self.end,
        }

    @property
    def joint(self) -> bool:
        """Whether one tokenizer cuts both sides."""
        return self.source is self.target

    @property
    def kind(self) -> TokenizerName | None:
        """The kind of the source's."""
        return self.source.kind

    @property
    def size(self) -> int:
        """Number of the target's tokens."""
        return self.target.size

    @property
    def digest(self) -> str:
        """Hash of everything that decides how texts are cut."""
        return content_key(self.source.digest, self.target.digest)

    def control(self, role: str) -> int:
        """Number of a control token of the target's, such as "pad"; as `Tokenizer.control`."""
        return self.target.control(role)

    # Text to numbers, and back.

    @property
    def added(self) -> int:
        """Control tokens around a text, in the source and in what a decoder reads or writes of a target."""
        return 1 + self.config.begin

    def frame_source(self, ids: Sequence[int], max_length: int) -> list[int]:
        """A source of at most `max_length` tokens; a longer text is cut."""
        return [*self._heads[0], *self.source.cut(ids, max_length - self.added), self._source_end]

    def frame_target(self, ids: Sequence[int], max_length: int) -> list[int]:
        """A target of which a decoder reads and writes at most `max_length` tokens: one more; a longer text is cut."""
        return [
            self.start,
            *self._heads[1],
            *self.target.cut(ids, max_length - self.added),
            self.end,
        ]

    def sources(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], list[bool]]:
        """Texts to translate as token numbers with control tokens, and of each whether it was cut.

        Raises:
            UsageError: A text holds what is no character.
        """
        lists = self.source.encode_batch([self.config.prompt + text for text in texts])
        rows = [self.frame_source(ids, max_length) for ids in lists]
        return rows, [len(ids) + self.added > max_length for ids in lists]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a target's token numbers, without control tokens except for [UNK]."""
        return self.target.decode(ids)
