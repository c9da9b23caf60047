"""Text for language models: a stream of documents, tokenised once, in windows or packed documents."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pytorch_lightning.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from datamodules.sources import CorpusOptions, Documents, DocumentSource, document_source
from datamodules.tokenized import TokenizedData
from datamodules.tokenizers import BoundaryTokens, TokenizerConfig
from datamodules.tokens.packing import PackedDocuments, RandomWindows, Rows, Windows
from datamodules.tokens.token_cache import tokenised_documents
from datamodules.tokens.token_file import TokenFile
from datamodules.utils.batching import ResumableBatchSampler, StreamBatchSampler
from datamodules.utils.errors import DataError, UsageError


@dataclass(frozen=True)
class CorpusLoading:
    """How batches reach the model.

    Args:
        eval_batch_size: Rows per batch in validation and test.
        seed: Of the order of the training rows, and of where windows begin.
    """

    eval_batch_size: int = 32
    seed: int = 0


class CorpusData(TokenizedData):
    """Batches of text to go on with: {"tokens": int64 (B, T), "targets": int64 (B, T), -100 where none is counted,
    "bytes": int64 (B,), the UTF-8 bytes of the text that a row's targets stand for}.

    With packed documents also "documents": int64 (B, T), the same number for tokens of one document, -1 at padding, and
    "coords": int64 (B, T), places in the document. A document's bytes are shared out evenly among its tokens.
    Evaluation takes every target of a split once, in order; its bytes add up to those of the text, but for a first
    token that is text itself: nothing foresees it.

    Where there is more than one document, control tokens mark where each begins and ends, as far as the tokenizer has
    them: [BOS] and [EOS], or one between documents. A single document has none.

    Args:
        source: reference: that of the Python language, no download; files: plain text, JSON Lines or tables; hub: a
            data set of the hub with a column of texts.
        path: File or folder to read, or the id of a data set of the hub.
        packing: windows: stretches of the text as a whole, which in each epoch lie side by side from another place on;
            documents: as many as fit into a row, each seen alone; longer ones are parted.
        batch_size: Training rows per step and device.
        max_length: Tokens T of a row.
        dataset: What the files do not say: hub id, column, validation share.
        tokenizer: What to train one with, from the beginning of the training text, or a file of one.
        loading: Size of evaluation batches, seed of the order.

    Raises:
        UsageError: An option is out of range, or the data are not where it says.
        DataError: A text cannot be used, a file cannot be read, or the hub cannot be reached.
    """

    source: DocumentSource

    def __init__(
        self,
        source: Literal["reference", "files", "hub"] = "reference",
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
            raise UsageError(f"packing is {packing}, but must be windows or documents.")
        if max_length < 2:
            raise UsageError(f"max_length is {max_length}, but must be at least 2.")
        self.source = document_source(source, path, dataset, self.skip_bad)
        self.packing, self.options, self.loading = packing, dataset, loading
        self._given = (
            tokenizer.file is not None
        )  # the tokenizer: a text must fit it, not the other way round

    # The tokenizer.

    def training_texts(self) -> list[str]:
        """The beginning of the training text."""
        return self.source.split("train").sample(int(self.options.sample * 1e6))

    @property
    def padding(self) -> int:
        """Number of the token that fills a row up: [PAD], or where there is none, any."""
        ids = self.tokenizer.special_ids
        return next((number for number in (ids.pad, ids.eos, ids.bos) if number is not None), 0)

    @cached_property
    def marks_documents(self) -> bool:
        """Whether control tokens mark where a document begins and ends: if there is more than one to train on."""
        if "marks_documents" in self._facts:
            return bool(self._facts["marks_documents"])
        return self.source.survey("train" if self.source.has("train") else "test").documents > 1

    def facts(self) -> dict[str, Any]:
        """As in the base class, and marks_documents (bool): whether control tokens begin and end a document."""
        if not self._facts:
            self._facts = {**super().facts(), "marks_documents": self.marks_documents}
        return self._facts

    def adopt(self, facts: dict[str, Any]) -> None:
        super().adopt(facts)
        self._given = True

    # Splits.

    def load(self, split: str) -> RandomWindows | Rows:
        if split == "predict":
            raise UsageError(
                "there is nothing to predict here: generate text from a checkpoint instead."
            )
        file = self.file(split)
        least = self.max_length + 1 if split == "train" and self.packing == "windows" else 2
        if len(file.tokens) < least:
            raise UsageError(
                f"the {split} split of {self.origin} has {len(file.tokens):,} tokens, which is not even a window of "
                f"{least:,}: give more text, or lower --data.max_length."
            )
        if self.packing == "documents":
            return PackedDocuments(file, self.max_length, self.padding)
        if split == "train":
            return RandomWindows(file, self.max_length, self.seed)
        return Windows(file, self.max_length, self.padding)

    def file(self, split: str) -> TokenFile:
        """The tokens of a split, from disk where they have been there before; raises as `tokens`."""
        return self.tokens(self.source.split(split), f"the {split} split")

    def tokens(self, documents: Documents, name: str) -> TokenFile:
        """The tokens of some documents, which messages call by this name; from disk where they have been there before.

        Raises:
            DataError: The text has a character that the vocabulary of a given character tokenizer lacks, unless bad
                texts are skipped; else it is [UNK], which is said.
        """
        frame = self.tokenizer.boundary_tokens if self.marks_documents else BoundaryTokens()
        file = tokenised_documents(documents, self.tokenizer, frame, name)
        if file.unknown:
            self._tell_unknown(f"{name} of {self.origin}", documents, file)
        return file

    def _tell_unknown(self, where: str, documents: Documents, file: TokenFile) -> None:
        share = f"{file.unknown:,} of {len(file.tokens):,} tokens in {where} are [UNK]"
        if not self.tokenizer.is_character_level:
            rank_zero_warn(f"{share}: a tokenizer of the kind bpe has none.")
            return
        letter = self.tokenizer.first_unknown_character(piece.text for piece in documents)
        named = f"the character {letter!r} (U+{ord(letter):04X})" if letter else "a character"
        if self._given and not self.skip_bad:
            raise DataError(
                f"{named} in {where} is not in the tokenizer's vocabulary of {self.tokenizer.vocab_size}: use a text of the "
                "same characters, or take such as [UNK] with --data.skip_bad true."
            )
        rare = not self._given and (self.config.min_frequency or 0) > 1
        advice = (
            "--data.tokenizer.min_frequency 1 learns rare ones, too"
            if rare
            else "the model learns nothing of them"
        )
        rank_zero_warn(f"{share}, such as {named}: {advice}.")

    def padding_share(self) -> float:
        """Share of the cells of a training epoch that are padding."""
        dataset = self.dataset("train")
        return dataset.padding_share() if isinstance(dataset, Rows) else 0.0

    def cells(self) -> tuple[float, int]:
        """What share of the cells holds a token, of 1; rows are as long on any number of ranks."""
        return 1 - self.padding_share(), 1

    # Batches.

    def train_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of training: the rows of a step are the same on any number of ranks. An epoch takes every packed
        row, so that its last step may be smaller; where it has fewer rows than ranks, it borrows from the one before.
        """
        world_size, rank = self.train_ranks(dataset)
        enough = len(dataset) >= self.batch_size * world_size
        drop_last = enough and (
            self.packing == "windows" or self.batch_size == 1
        )  # else ranks might go without
        return StreamBatchSampler(
            len(dataset), self.batch_size, self.seed, True, drop_last, rank, world_size
        )

    def train_dataloader(self) -> DataLoader:
        loader, dataset = super().train_dataloader(), self.dataset("train")
        if isinstance(dataset, RandomWindows):
            dataset.sampler = loader.sampler  # type: ignore[assignment]
        return loader

    def counted(self, world_size: int) -> dict[str, int]:
        """As in the base class, with what decides what a row is."""
        rows = {
            "packed": int(self.packing == "documents"),
            "content": self.dataset("train").file.checksum,
        }
        return super().counted(world_size) | rows
