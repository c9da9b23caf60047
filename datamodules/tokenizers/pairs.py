"""Tokenizers of two languages, and the special tokens around a text and its translation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datamodules.tokenizers.config import PairTokenizerConfig, TokenizerName
from datamodules.tokenizers.tokenizer import Tokenizer
from datamodules.utils.cache import Texts, content_key
from datamodules.utils.errors import UsageError


class PairTokenizer:
    """The tokenizers of a source and a target language; one for both if they are joint.

    A source is `text [EOS]`, a target `start text [EOS]`, of which a decoder reads all but the last
    token and predicts all but the first; with `begin` there is a [BOS] before both texts. Raises
    `UsageError` if a tokenizer lacks one of these special tokens.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer, config: PairTokenizerConfig) -> None:
        self.source = source
        self.target = target
        self.config = config
        self.decoder_start_id = target.special_id("bos") if config.start is None else config.start
        if not 0 <= self.decoder_start_id < target.vocab_size:
            raise UsageError(
                f"--data.tokenizer.start is {config.start}, but must be one of its "
                f"{target.vocab_size} tokens."
            )
        self.eos_id = target.special_id("eos")
        self._source_eos_id = source.special_id("eos")
        self._source_prefix = [source.special_id("bos")] if config.begin else []
        self._target_prefix = [target.special_id("bos")] if config.begin else []

    @classmethod
    def load_or_train(
        cls,
        sides: Callable[[], Sequence[Texts]],
        joined: Callable[[], Texts],
        config: PairTokenizerConfig,
    ) -> "PairTokenizer":
        """From files, if given; else trained from these texts, or cached before.

        `sides` returns the texts of the source and those of the target, `joined` both as one.
        Raises as `Tokenizer.load_or_train`.
        """
        if config.file is not None:
            source = target = Tokenizer.from_file(config.file, config.truncate)
            if config.target_file is not None:
                target = Tokenizer.from_file(config.target_file, config.truncate)
        elif config.joint:
            source = target = Tokenizer.load_or_train(joined(), config.single())
        else:
            source, target = (Tokenizer.load_or_train(texts, config.single()) for texts in sides())
        return cls(source, target, config)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "PairTokenizer":
        """From the metadata of `datamodules.translation.TranslationData`, which a checkpoint keeps.

        Raises `DataError` if they hold no tokenizer.
        """
        config = PairTokenizerConfig(**metadata["tokenizer_options"])
        source = target = Tokenizer.from_json(metadata["source_tokenizer"], config.truncate)
        if metadata["target_tokenizer"] != metadata["source_tokenizer"]:
            target = Tokenizer.from_json(metadata["target_tokenizer"], config.truncate)
        return cls(source, target, config)

    def metadata(self) -> dict[str, Any]:
        """What a checkpoint keeps of them.

        Returns:
            source_tokenizer, target_tokenizer (contents of their tokenizer.json),
            source_vocabulary, target_vocabulary (their sizes), source_padding, pad_id, start, end
            (ids of the tokens that pad a source, pad a target, begin and end a target).
        """
        return {
            "source_tokenizer": self.source.to_json(),
            "target_tokenizer": self.target.to_json(),
            "source_vocabulary": self.source.vocab_size,
            "target_vocabulary": self.target.vocab_size,
            "source_padding": self.source.special_id("pad"),
            "pad_id": self.target.special_id("pad"),
            "start": self.decoder_start_id,
            "end": self.eos_id,
        }

    @property
    def joint(self) -> bool:
        """Whether source and target have the same tokenizer."""
        return self.source is self.target

    @property
    def kind(self) -> TokenizerName | None:
        """The kind of the source's tokenizer."""
        return self.source.kind

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target's tokenizer."""
        return self.target.vocab_size

    @property
    def digest(self) -> str:
        """Hash of everything that decides how texts are split."""
        return content_key(self.source.digest, self.target.digest)

    def special_id(self, role: str) -> int:
        """Id of a special token of the target, such as "pad"; as `Tokenizer.special_id`."""
        return self.target.special_id(role)

    @property
    def num_special_tokens(self) -> int:
        """Special tokens around a source, and in what a decoder reads or predicts of a target."""
        return 1 + self.config.begin

    def build_source(self, ids: Sequence[int], max_length: int) -> list[int]:
        """A source of at most `max_length` tokens, with special tokens."""
        text = self.source.truncate(ids, max_length - self.num_special_tokens)
        return [*self._source_prefix, *text, self._source_eos_id]

    def build_target(self, ids: Sequence[int], max_length: int) -> list[int]:
        """A target of which a decoder reads and predicts `max_length` tokens at most: one more."""
        text = self.target.truncate(ids, max_length - self.num_special_tokens)
        return [self.decoder_start_id, *self._target_prefix, *text, self.eos_id]

    def encode_sources(
        self, texts: Sequence[str], max_length: int
    ) -> tuple[list[list[int]], list[bool]]:
        """Ids of texts to translate, with special tokens, and whether each was truncated.

        Raises `UsageError` if a text has lone surrogates.
        """
        lists = self.source.encode_batch([self.config.prompt + text for text in texts])
        sources = [self.build_source(ids, max_length) for ids in lists]
        return sources, [len(ids) + self.num_special_tokens > max_length for ids in lists]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a target's token ids, without special tokens except for [UNK]."""
        return self.target.decode(ids)
