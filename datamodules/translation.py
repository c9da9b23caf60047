"""Texts and their translations: read, tokenised once, and batched by both lengths."""

from contextlib import suppress
from typing import Any, Literal

import torch

from datamodules.sources import (
    PARALLEL,
    ParallelOptions,
    ParallelSource,
    TextSamples,
    choose_source,
    open_source,
)
from datamodules.sources.parallel import language_pair
from datamodules.text import Sequences, TextData, TextLoading, TokenRows
from datamodules.tokenizers import PairTokenizer, PairTokenizerConfig
from datamodules.tokens.packing import IGNORE_INDEX
from datamodules.tokens.token_cache import tokenised
from datamodules.utils.cache import content_key, text_digest
from datamodules.utils.errors import DataError, UsageError, require_same


class PairTokens:
    """Tokenised pairs.

    Args:
        tables: Tokens of the sources and of the targets, without special tokens.
        tokenizer, multiple: Of the datamodule.
        max_length: Tokens of either side at most.
        texts: The pairs as they were read, for evaluation.
    """

    in_memory = True  # or mapped into it: no workers

    def __init__(
        self,
        tables: tuple[TokenRows, TokenRows],
        tokenizer: PairTokenizer,
        max_length: int,
        multiple: int,
        texts: TextSamples | None = None,
    ) -> None:
        text_lengths = torch.stack([table.lengths for table in tables], dim=1)
        sizes = text_lengths + tokenizer.num_special_tokens  # (S, 2)
        self.truncated = int((sizes > max_length).any(1).sum())
        self.token_counts = sizes.clamp(max=max_length)
        self.tables = tables
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.texts = texts
        source, target = self.token_counts.unbind(1)
        self._source = Sequences(tokenizer.source, source, max_length, multiple)
        self._target = Sequences(tokenizer.target, target, max_length, multiple)
        padded = [self._source.padded_lengths, self._target.padded_lengths]
        self.padded_lengths = torch.stack(padded, dim=1)  # (S, 2)

    def __len__(self) -> int:
        return len(self.token_counts)

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index = torch.tensor(indices)
        source_ids, target_ids = self.tables
        sources = [self.tokenizer.build_source(source_ids[i], self.max_length) for i in indices]
        targets = [self.tokenizer.build_target(target_ids[i], self.max_length) for i in indices]
        source = self._source.batch(index, sources)
        batch = {
            "source": source["tokens"],
            "source_padding_mask": source["padding_mask"],
            "tokens": self._target.pad(index, [row[:-1] for row in targets]),
            "targets": self._target.pad(index, [row[1:] for row in targets], IGNORE_INDEX),
            "index": index,
        }
        if self.texts is not None:
            batch["text"] = [self.texts.columns[0][i].as_py() for i in indices]
            batch["reference"] = [self.texts.columns[1][i].as_py() for i in indices]
        return batch


def languages_at(name: str, path: str | None, options: ParallelOptions) -> list[str]:
    """The names of languages in the data of a source; [] if they cannot be read."""
    with suppress(UsageError, DataError, StopIteration):
        source = open_source(PARALLEL, name, path, options, languages=["source", "target"])
        return source.languages_there()
    return []


class TranslationData(TextData):
    """Batches of pairs.

    {"source": int64 (B, M), "source_padding_mask": bool (B, M), False at padding, "tokens": int64
    (B, N), "targets": int64 (B, N), -100 at padding, "index": int64 (B,)}.

    "tokens" are the targets shifted right, which begin with the start token; targets end with
    [EOS]. Evaluation goes from the longest to the shortest pair, and adds "text" and "reference":
    lists of B texts, source and target as they were read.

    Args:
        source: Format of the data; null: as the path shows, or dates without a path; dates: dates
            and numbers in English and French, no download; txt: aligned files such as train.en and
            train.de, a text on each line, also as .gz; csv: CSV or TSV with a column for each
            language; jsonl: JSON Lines, likewise; hub: a data set of the hub, or Parquet files,
            with such columns or a column translation.
        path: File or folder to read, or a data set of the hub. A single file is the training split,
            of which a part is held out for validation.
        languages: Source and target, such as en-de; they are named as files or columns are; with a
            colon if a name has a hyphen, such as en:pt-BR; null: en-fr for dates.
        batch_size: Training pairs per step and device; not used if `loading.batch_tokens` is
            set.
        max_length: Maximum number of tokens of a side, special ones too; longer texts
            are truncated and counted.
        dataset: Options of the data set (not the data set itself): hub id, columns, validation
            fraction.
        tokenizer: How to train them from the training texts, or files of tokenizers.
        loading: Sizes of evaluation batches, batches by tokens, and seed of the order.
    """

    sources = PARALLEL
    source: ParallelSource
    noun = "pairs"
    tokenizer_config: PairTokenizerConfig
    tokenizer: PairTokenizer  # type: ignore[assignment]

    def __init__(
        self,
        source: Literal["dates", "txt", "csv", "jsonl", "hub"] | str | None = None,
        path: str | None = None,
        languages: str | None = None,
        batch_size: int = 64,
        max_length: int = 128,
        dataset: ParallelOptions = ParallelOptions(),
        tokenizer: PairTokenizerConfig = PairTokenizerConfig(),
        loading: TextLoading = TextLoading(multiple=2),  # sentences are short: 8 would pad a fifth
        **shared: Any,
    ) -> None:
        super().__init__(batch_size, max_length, tokenizer=tokenizer, loading=loading, **shared)
        name = choose_source(PARALLEL, source, path, dataset)
        default = "en-fr" if name == "dates" else ""
        names = languages or default
        self.languages = names.split(":" if ":" in names else "-")
        if len(self.languages) != 2 or "" in self.languages:
            found = languages_at(name, path, dataset)
            advice = "such as en-de, or with a colon if a name has a hyphen, such as en:pt-BR"
            if len(found) == 2:
                pairs = (language_pair(pair) for pair in (found, found[::-1]))
                advice = " or ".join(f"--data.languages {pair}" for pair in pairs)
            raise UsageError(
                f"--data.languages is {names or 'missing'}, but must be source and target, "
                f"{advice}."
            )
        self.source = open_source(
            PARALLEL, name, path, dataset, languages=self.languages, skip_bad=self.skip_bad
        )

    # The tokenizers.

    def make_tokenizer(self) -> PairTokenizer:
        """Those of the files, or trained from the training pairs."""
        return PairTokenizer.load_or_train(self._sides, self.training_texts, self.tokenizer_config)

    def stored_tokenizer(self, metadata: dict[str, Any]) -> PairTokenizer:
        return PairTokenizer.from_metadata(metadata)

    def _sides(self) -> tuple[Any, Any]:
        pairs = self.source.split("train")
        return pairs.columns[0], pairs.columns[1]

    def training_texts(self) -> Any:
        """All sources, then all targets."""
        import pyarrow as pa

        return pa.chunked_array([chunk for side in self._sides() for chunk in side.chunks])

    def measure_metadata(self) -> dict[str, Any]:
        """Primitives that a checkpoint keeps.

        Returns:
            What `PairTokenizer.metadata` returns; tokenizer_options, max_length (tokens of either
            side), languages (list of two).
        """
        return {
            **self.tokenizer.metadata(),
            "tokenizer_options": self._tokenizer_options(),
            "max_length": self.max_length,
            "languages": self.languages,
        }

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """As in the base class; the languages must agree, too."""
        given, stored = (language_pair(names) for names in (self.languages, metadata["languages"]))
        require_same("languages", given, stored)
        super().set_metadata(metadata)

    # Splits.

    def training_key(self) -> str:
        """As in the base class."""
        return content_key(*map(text_digest, self.source.split("train").columns))

    def load(self, split: str) -> PairTokens:
        if split == "predict":
            raise UsageError("there is nothing to predict here: use `translate` with a checkpoint.")
        pairs = self.source.split(split)
        tables = (
            tokenised(self._prompted(pairs), self.tokenizer.source),
            tokenised(pairs.columns[1], self.tokenizer.target),
        )
        texts = None if split == "train" else pairs
        return PairTokens(tables, self.tokenizer, self.max_length, self.loading.multiple, texts)

    def _prompted(self, pairs: TextSamples) -> Any:
        """The sources as they are tokenised."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.tokenizer_config.prompt:
            return pairs.columns[0]
        kind = pa.large_string()
        return pc.binary_join_element_wise(
            pa.scalar(self.tokenizer_config.prompt, kind), pairs.columns[0], pa.scalar("", kind)
        )
