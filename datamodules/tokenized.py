"""What all datamodules of tokens share: the tokenizer, what a model must know of it, and splits, each loaded once."""

from dataclasses import asdict
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader

from datamodules.base import ResumableDataModule
from datamodules.sources import Source
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import UsageError


class TokenizedData(ResumableDataModule):
    """Base: subclasses set `source`, say which texts the tokenizer learns from, and load a split.

    Args:
        batch_size: Training samples per step and device.
        max_length: Tokens of a sample at most, special tokens among them.
        tokenizer: What to train one with, from the training texts, or a file of one.
        eval_batch_size: Samples per batch in validation, test and prediction.
        seed: Of the order of the samples.
        skip_bad: Leave out texts that cannot be used, and count them, instead of stopping at the first.

    Raises:
        UsageError: An option is out of range.
    """

    source: Source[Any]

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        tokenizer: TokenizerConfig,
        eval_batch_size: int,
        seed: int,
        skip_bad: bool = False,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, 0, seed)
        self.max_length, self.config, self.skip_bad = max_length, tokenizer, skip_bad
        self._facts: dict[str, Any] = {}
        self._datasets: dict[str, Any] = {}

    # What subclasses say.

    def load(self, split: str) -> Any:
        """Reads and tokenises a split: "train", "val", "test" or "predict"."""
        raise NotImplementedError

    def training_texts(self) -> Any:
        """The texts that the tokenizer is trained from."""
        raise NotImplementedError

    # What the model must know of the data, and what a checkpoint may tell instead.

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's, a file's, or one trained from the training texts."""
        return self.make_tokenizer()

    def make_tokenizer(self) -> Any:
        """A file's, or one trained from the training texts."""
        texts = [] if self.config.file is not None else self.training_texts()
        return Tokenizer.load_or_train(texts, self.config)

    def stored_tokenizer(self, facts: dict[str, Any]) -> Any:
        """A checkpoint's."""
        return Tokenizer.from_json(facts["tokenizer"], self.config.truncate)

    @property
    def padding(self) -> int:
        """Number of the token that fills a batch up."""
        return self.tokenizer.special_id("pad")

    def facts(self) -> dict[str, Any]:
        """Primitives that a checkpoint keeps.

        Returns:
            tokenizer (content of its tokenizer.json), tokenizer_options, vocabulary (its size), padding (number of its
            padding token), max_length (tokens).
        """
        if not self._facts:
            self._facts = {
                "tokenizer": self.tokenizer.to_json(),
                "tokenizer_options": self._tokenizer_options(),
                "vocabulary": self.tokenizer.vocab_size,
                "padding": self.padding,
                "max_length": self.max_length,
            }
        return self._facts

    def _tokenizer_options(self) -> dict[str, Any]:
        """The tokenizer's options; beside a file, what that file says instead of what it would be trained with."""
        options = asdict(self.config)
        if self.config.file is not None:
            own = self.tokenizer
            options |= {
                "kind": own.kind,
                "vocabulary": own.vocab_size,
                "min_frequency": None,
                "lowercase": None,
            }
        return options

    def adopt(self, facts: dict[str, Any]) -> None:
        """Takes the facts of a checkpoint: prediction then needs no data set, and other data must agree with them.

        Raises:
            UsageError: Another length or another tokenizer was asked for.
        """
        if self.max_length != facts["max_length"]:
            raise UsageError(
                f"max_length is {self.max_length}, the checkpoint was trained with {facts['max_length']}: leave it out."
            )
        asked, theirs = asdict(self.config), self.stored_tokenizer(facts)
        for name, value in facts["tokenizer_options"].items():
            if not name.endswith("file") and asked[name] != value:
                raise UsageError(
                    f"--data.tokenizer.{name} {asked[name]} (vocabulary {asked['vocabulary']}) does not fit the "
                    f"checkpoint, whose tokenizer of {theirs.vocab_size} tokens was made with {name} {value}: leave it out."
                )
        known = (
            None,
            facts["tokenizer_options"]["file"],
        )  # that file may be another one by now, or gone
        if self.config.file not in known:
            own = self.make_tokenizer()
            if own.digest != theirs.digest:
                raise UsageError(
                    f"the tokenizer {self.config.file} ({own.vocab_size} tokens) is not the checkpoint's ({theirs.vocab_size} "
                    "tokens): leave --data.tokenizer.file out."
                )
        self.tokenizer = theirs  # in place of the cached property's
        self._facts, self._datasets = dict(facts), {}

    @property
    def origin(self) -> str:
        """Where the texts were read from: a path, a hub id, or "embedded"."""
        return self.source.origin

    @property
    def skipped(self) -> list[str]:
        """Texts left out because of `skip_bad`, so far."""
        return sorted(set(self.source.skipped))

    # Splits: read and tokenised when first asked for, so that the test texts stay untouched until the test.

    def prepare_data(self) -> None:
        """Downloads and tokenises (one process; the others find the tokens on disk); to predict takes no data set."""
        stage = (
            self.trainer.state.fn.value
            if self.trainer is not None and self.trainer.state.fn is not None
            else None
        )
        if stage != "predict":
            self.source.prepare()
        if stage is not None:
            self.setup(stage)

    def setup(self, stage: str) -> None:
        """Reads the splits of a stage: "fit", "validate", "test" or "predict"."""
        splits = {
            "fit": ("train", "val"),
            "validate": ("val",),
            "test": ("test",),
            "predict": ("predict",),
        }[stage]
        new = [self.dataset(split) for split in splits if split not in self._datasets]
        self.loaded(new)
        if stage != "predict":
            self.facts()

    def loaded(self, datasets: list[Any]) -> None:
        """Told of the splits that were just read, such as to say what they lost."""

    def dataset(self, split: str) -> Any:
        """A split, read and tokenised once."""
        if split not in self._datasets:
            self._datasets[split] = self.load(split)
        return self._datasets[split]

    def train_batches(self) -> int:
        """Batches of a training epoch on this rank, without making a loader; the same in every epoch."""
        return len(self.train_sampler(self.dataset("train")))

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.dataset("train"))

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("val"))

    def test_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("test"))

    def predict_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("predict"))
