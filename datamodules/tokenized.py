"""What all datamodules of tokens share: a tokenizer, and what a checkpoint keeps of it."""

from dataclasses import asdict
from functools import cached_property
from typing import Any

from datamodules.base import SPLITS_OF_STAGE, ResumableDataModule
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import UsageError, require_same


class TokenizedData(ResumableDataModule):
    """Base: subclasses set `source`, and define `load`, `training_texts` and `count_tokens`.

    Args:
        batch_size: Training samples per step and device.
        max_length: Maximum number of tokens, special tokens included.
        tokenizer: How to train one from the training texts, or a file of one.
        eval_batch_size: Samples per batch in validation, test and prediction.
        seed: Seed of the order of the samples.
        skip_bad: Skip and count texts that cannot be used; else the first one stops the run.
    """

    any_length = False  # whether a model may be evaluated at another length than in training

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        tokenizer: TokenizerConfig,
        eval_batch_size: int,
        seed: int,
        skip_bad: bool = False,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers=0, seed=seed)
        self.max_length = max_length
        self.tokenizer_config = tokenizer
        self.skip_bad = skip_bad

    def training_texts(self) -> Any:
        """The texts that the tokenizer is trained from."""
        raise NotImplementedError

    def count_tokens(self) -> tuple[float, float]:
        """Tokens of this rank in the current training epoch, without padding and with it."""
        raise NotImplementedError

    def padding_fraction(self) -> float:
        """Fraction of this rank's tokens in the current training epoch that are padding."""
        tokens, total = self.count_tokens()
        return 1 - tokens / total

    def warn_truncated(self, datasets: list[Any]) -> None:
        """Warns of samples that were truncated in splits that were just loaded."""

    # Tokenizer and metadata.

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint if there is one, else as `make_tokenizer`."""
        return self.make_tokenizer()

    def make_tokenizer(self) -> Any:
        """Reads the tokenizer from its file, or trains it from the training texts."""
        texts = [] if self.tokenizer_config.file is not None else self.training_texts()
        return Tokenizer.load_or_train(texts, self.tokenizer_config)

    def stored_tokenizer(self, metadata: dict[str, Any]) -> Any:
        """The tokenizer in a checkpoint's metadata."""
        return Tokenizer.from_json(metadata["tokenizer"], self.tokenizer_config.truncate)

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.special_id("pad")

    def measure_metadata(self) -> dict[str, Any]:
        """Metadata that a checkpoint keeps: texts, numbers, None and dicts of them.

        Returns:
            tokenizer (content of its tokenizer.json), tokenizer_options, vocabulary (its size),
            pad_id (of its padding token), max_length (tokens).
        """
        return {
            "tokenizer": self.tokenizer.to_json(),
            "tokenizer_options": self._tokenizer_options(),
            "vocabulary": self.tokenizer.vocab_size,
            "pad_id": self.pad_id,
            "max_length": self.max_length,
        }

    def _tokenizer_options(self) -> dict[str, Any]:
        """The tokenizer's options; null for those that a tokenizer file does not tell."""
        options = asdict(self.tokenizer_config)
        if self.tokenizer_config.file is not None:
            options["kind"] = self.tokenizer.kind
            options["vocabulary"] = self.tokenizer.vocab_size
            options["min_frequency"] = options["lowercase"] = None
        return options

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Uses the metadata of a checkpoint: prediction then needs no data set.

        Raises `UsageError` if the options name another length (unless `any_length`) or another
        tokenizer.
        """
        if not self.any_length:
            require_same("max_length", self.max_length, metadata["max_length"])
        options = asdict(self.tokenizer_config)
        stored = self.stored_tokenizer(metadata)
        for name, value in metadata["tokenizer_options"].items():
            is_file = name.endswith("file")  # its content is compared below
            if not is_file and options[name] != value:
                raise UsageError(
                    f"--data.tokenizer.{name} {options[name]} (vocabulary {options['vocabulary']}) "
                    f"does not fit the checkpoint, whose tokenizer of {stored.vocab_size} tokens "
                    f"was made with {name} {value}: leave it out."
                )
        stored_file = metadata["tokenizer_options"]["file"]
        file = self.tokenizer_config.file
        if file not in (None, stored_file):  # the stored file may be gone
            given = self.make_tokenizer()
            if given.digest != stored.digest:
                raise UsageError(
                    f"the tokenizer {file} ({given.vocab_size} tokens) is not the checkpoint's "
                    f"({stored.vocab_size} tokens): leave --data.tokenizer.file out."
                )
        self.tokenizer = stored  # in place of the cached property's
        self._metadata = dict(metadata)
        self._datasets = {}

    # Splits.

    def prepare_data(self) -> None:
        """Downloads and tokenises on one process; the others find the tokens on disk."""
        stage = None
        if self.trainer is not None and self.trainer.state.fn is not None:
            stage = self.trainer.state.fn.value
        if stage == "predict":  # nothing is kept on disk
            return
        self.source.prepare()
        if stage is not None:
            self.setup(stage)

    def setup(self, stage: str) -> None:
        """As in the base class; warns of samples that are truncated, once for each split."""
        new = [split for split in SPLITS_OF_STAGE[stage] if split not in self._datasets]
        super().setup(stage)
        self.warn_truncated([self.dataset(split) for split in new])
