"""Text for language models: a stream of documents, as windows or packed documents."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources import DOCUMENTS, CorpusOptions, Documents, DocumentSource, open_source
from datamodules.tokenized import TokenizedData
from datamodules.tokenizers import BoundaryTokens, TokenizerConfig
from datamodules.tokens.packing import PackedDocuments, RandomWindows, Rows, Windows
from datamodules.tokens.token_cache import tokenised_documents
from datamodules.tokens.token_file import TokenFile
from datamodules.utils.errors import DataError, UsageError, require_same


@dataclass(frozen=True)
class CorpusLoading:
    """How batches reach the model.

    Args:
        eval_batch_size: Rows per batch in validation and test.
        seed: Seed of the order of the training rows, and of where windows begin.
    """

    eval_batch_size: int = 32
    seed: int = 0


class CorpusData(TokenizedData):
    """Batches of text to predict, for language models.

    {"tokens": int64 (B, T), "targets": int64 (B, T), -100 at padding, "bytes": int64 (B,), the
    UTF-8 bytes of the text that a row's targets stand for}.

    With packed documents also "documents": int64 (B, T), the same number for tokens of one
    document, -1 at padding, and "positions": int64 (B, T), in the document. A document's bytes are
    divided evenly among its tokens. Evaluation takes every target of a split once, in a fixed
    order; its bytes add up to those of the text, except those of a first token without a special
    token before it: nothing predicts it.

    If there are several documents, special tokens mark the beginning and end of each, as far as
    the tokenizer has them: [BOS] and [EOS], or one between documents. A single document has none.

    Args:
        source: Format of the data; null: as the path shows, or reference without a path; reference:
            that of the Python language, no download; txt: plain text (.txt, .md); csv, jsonl: CSV,
            TSV or JSON Lines with a text in each row; hub: a data set of the hub with a column of
            texts, or Parquet files. Labels beside the texts are not read.
        path: File or folder to read, or a data set of the hub.
        packing: How rows are cut; windows: adjacent stretches of the whole text, from another
            offset in each epoch; documents: as many as fit into a row, without attention between
            them; longer ones are split.
        batch_size: Training rows per step and device.
        max_length: Tokens T of a row; `validate` and `test` also take other lengths than that of
            the training.
        dataset: Options of the data set (not the data set itself): hub id, column, validation
            fraction.
        tokenizer: How to train one from the beginning of the training text, or a file of one.
        loading: Size of evaluation batches, and seed of the order.
    """

    sources = DOCUMENTS
    source: DocumentSource
    noun = "rows"
    loading_section = "loading."
    splits_samples = True
    any_length = True

    def __init__(
        self,
        source: Literal["reference", "txt", "csv", "jsonl", "hub"] | str | None = None,
        path: str | None = None,
        packing: Literal["windows", "documents"] = "windows",
        batch_size: int = 32,
        max_length: int = 256,
        dataset: CorpusOptions = CorpusOptions(),
        tokenizer: TokenizerConfig = TokenizerConfig("bpe", vocabulary=4096, lowercase=False),
        loading: CorpusLoading = CorpusLoading(),
        **shared: Any,
    ) -> None:
        super().__init__(
            batch_size, max_length, tokenizer, loading.eval_batch_size, loading.seed, **shared
        )
        if packing not in ("windows", "documents"):
            raise UsageError(f"--data.packing is {packing}, but must be windows or documents.")
        if max_length < 2:
            raise UsageError(f"--data.max_length is {max_length}, but must be at least 2.")
        self.source = open_source(DOCUMENTS, source, path, dataset, skip_bad=self.skip_bad)
        self.packing = packing
        self.drop_last = packing == "windows"  # documents: the last step may be smaller
        self.options = dataset
        self.loading = loading
        self._is_tokenizer_given = tokenizer.file is not None  # a text must then fit it

    # The tokenizer.

    def training_texts(self) -> list[str]:
        """The beginning of the training text."""
        return self.source.split("train").sample(int(self.options.sample * 1e6))

    @property
    def pad_id(self) -> int:
        """Id of the padding token: [PAD], or if there is none, any."""
        ids = self.tokenizer.special_ids
        return next(
            (token_id for token_id in (ids.pad, ids.eos, ids.bos) if token_id is not None), 0
        )

    @cached_property
    def marks_documents(self) -> bool:
        """Whether special tokens mark documents: if there are several to train on."""
        if "marks_documents" in self._metadata:
            return bool(self._metadata["marks_documents"])
        return self.source.statistics("train" if self.source.has("train") else "test").documents > 1

    def measure_metadata(self) -> dict[str, Any]:
        """As in the base class, and marks_documents (bool) and packing."""
        own = {"marks_documents": self.marks_documents, "packing": self.packing}
        return {**super().measure_metadata(), **own}

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        super().set_metadata(metadata)
        self._is_tokenizer_given = True

    # Splits.

    def setup(self, stage: str) -> None:
        """As in the base class; a run resumes with rows of the same length."""
        if stage == "fit" and self._metadata:
            require_same("max_length", self.max_length, self._metadata["max_length"])
        super().setup(stage)

    def load(self, split: str) -> RandomWindows | Rows:
        if split == "predict":
            raise UsageError("there is nothing to predict here: use `generate` with a checkpoint.")
        file = self.token_file(split)
        random_windows = split == "train" and self.packing == "windows"
        min_tokens = self.max_length + 1 if random_windows else 2
        if len(file.tokens) < min_tokens:
            raise UsageError(
                f"the {split} split of {self.origin} has {len(file.tokens):,} tokens, and at least "
                f"{min_tokens:,} are needed: give more text"
                + (", or lower --data.max_length." if random_windows else ".")
            )
        if self.packing == "documents":
            return PackedDocuments(file, self.max_length, self.pad_id)
        if random_windows:
            return RandomWindows(file, self.max_length, self.seed)
        return Windows(file, self.max_length, self.pad_id)

    def token_file(self, split: str) -> TokenFile:
        """The tokens of a split, from the cache if they are there; raises as `tokenise`."""
        return self.tokenise(self.source.split(split), f"the {split} split")

    def tokenise(self, documents: Documents, title: str) -> TokenFile:
        """The tokens of some documents, from the cache if they are there.

        Args:
            documents: The text.
            title: What messages call it.

        Raises:
            DataError: A character-level tokenizer that was given lacks a character of the text, and
                bad texts are not skipped; else it becomes [UNK], with a warning.
        """
        boundary = self.tokenizer.boundary_tokens if self.marks_documents else BoundaryTokens()
        file = tokenised_documents(documents, self.tokenizer, boundary, title)
        if file.unknown:
            self._report_unknown(f"{title} of {self.origin}", documents, file)
        return file

    def _report_unknown(self, where: str, documents: Documents, file: TokenFile) -> None:
        count = f"{file.unknown:,} of {len(file.tokens):,} tokens became [UNK] in {where}"
        if not self.tokenizer.is_character_level:
            is_own = self.tokenizer_config.file is None
            advice = ": a tokenizer of the kind bpe has none" if is_own else ""
            rank_zero_warn(f"{count}{advice}.")
            return
        letter = self.tokenizer.first_unknown_character(piece.text for piece in documents)
        named = f"the character {letter!r} (U+{ord(letter):04X})" if letter else "a character"
        if self._is_tokenizer_given and not self.skip_bad:
            raise DataError(
                f"{named} in {where} is not in the tokenizer's vocabulary of "
                f"{self.tokenizer.vocab_size}: use a text of the same characters, or read such "
                "characters as [UNK] with --data.skip_bad true."
            )
        advice = "the model learns nothing of them"
        if not self._is_tokenizer_given and (self.tokenizer_config.min_frequency or 0) > 1:
            advice = "--data.tokenizer.min_frequency 1 learns rare ones, too"
        rank_zero_warn(f"{count}, such as {named}: {advice}.")

    def count_tokens(self) -> tuple[float, float]:
        """As in the base class, but summed over all ranks, among which the rows are split."""
        dataset = self.dataset("train")
        padded = len(dataset) * self.max_length
        return (dataset.num_targets if isinstance(dataset, PackedDocuments) else padded), padded

    def training_key(self) -> str:
        """As in the base class."""
        return self.source.split("train").digest

    def batch_layout(self, world_size: int) -> dict[str, Any]:
        """As in the base class, with what decides what a row is."""
        return super().batch_layout(world_size) | {
            "packed": self.packing == "documents",
        }
