"""Labelled texts for classification: read, tokenised once, and batched by length."""

import sys
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import torch
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor

from datamodules.sources import TEXT_SOURCES, TextSamples, TextSource, open_source
from datamodules.sources.labelled import require_same_targets, target_metadata
from datamodules.sources.readers.formats import open_decompressed, read_errors, read_lines
from datamodules.sources.text_files import TextFolder, TextHub
from datamodules.sources.texts import require_texts, text_samples
from datamodules.text import Sequences, TextData, TokenLists, TokenRows
from datamodules.tokenizers import Tokenizer
from datamodules.tokens.token_cache import tokenised
from datamodules.utils.cache import text_digest
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import path_fault


class LabelledTokens(Sequences):
    """Tokenised texts with their targets, as `Split.labels`, or None for prediction.

    `table` has their tokens without special tokens; `multiple` as in `TextLoading`.
    """

    def __init__(
        self,
        table: TokenRows,
        labels: Tensor | None,
        tokenizer: Tokenizer,
        max_length: int,
        multiple: int,
    ) -> None:
        sizes = table.lengths + tokenizer.num_special_tokens()
        super().__init__(tokenizer, sizes.clamp(max=max_length), max_length, multiple)
        self.table = table
        self.labels = labels
        self.truncated = int((sizes > max_length).sum())

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index = torch.tensor(indices)
        inputs = [self.tokenizer.build_inputs(self.table[i], self.max_length) for i in indices]
        batch = self.batch(index, [row.ids for row in inputs])
        return batch if self.labels is None else batch | {"label": self.labels[index]}


def text_column_of(source: TextSource) -> str | None:
    """The column with the texts of a table; None if the source is not a table."""
    if not isinstance(source, TextHub):
        return None
    return source.sample_column(source.table("train").columns.schema)


class ReviewData(TextData):
    """Batches of texts and labels.

    {"tokens": int64 (B, N), "padding_mask": bool (B, N), False at padding, "label": int64 (B,),
    "index": int64 (B,)}. Labels are float32 (B, K) unless each text has one class. Evaluation and
    prediction go from the longest to the shortest text: "index" is the position of a text in the
    order it was read, for prediction in `predict_samples`; then batches have no "label".

    Args:
        source: Format of the data; null: as the path shows, or reviews without a path; reviews:
            generated ones, no download; csv, jsonl: files with columns; folder: texts in
            train/CLASS/*.txt, or only in CLASS/*.txt; hub: a data set of the hub, or Parquet files
            named by split.
        path: File or folder to read, or a data set of the hub. A single file, or a folder of only
            classes, is the training split, of which a part is held out for validation.
        balanced: Draw each class equally often, with replacement; else an epoch takes every
            text once.
        label_fraction: Part of each class to learn from; at least one text, chosen by
            `loading.seed`. Validation and test stay whole.
    """

    sources = TEXT_SOURCES

    def __init__(
        self,
        source: Literal["reviews", "csv", "jsonl", "folder", "hub"] | str | None = None,
        path: str | None = None,
        balanced: bool = False,
        label_fraction: float = 1.0,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        if balanced and self.loading.batch_tokens is not None:
            raise UsageError(
                "--data.balanced and --data.loading.batch_tokens exclude each other: leave one out."
            )
        self.balanced = balanced
        self.source = open_source(TEXT_SOURCES, source, path, self.options, skip_bad=self.skip_bad)
        self.source.keep_labels(label_fraction, self.loading.seed)
        self.predict_text: list[str] = []  # texts to classify, instead of a file
        self._predict_source: TextSource | None = None

    def measure_metadata(self) -> dict[str, Any]:
        """As in the base class, those of `target_metadata`, and text_column, if there is one."""
        metadata = {**target_metadata(self.source), **super().measure_metadata()}
        return metadata | {"text_column": text_column_of(self.source)}

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """As in the base class; the class names and the problem type must agree, too."""
        require_same_targets(self.options, metadata)
        super().set_metadata(metadata)
        self.source.use_checkpoint(metadata)

    def setup(self, stage: str) -> None:
        """As in the base class; classes that are missing, or not the checkpoint's, are refused
        first."""
        self.source.needs_every_class = stage == "fit"
        if stage != "predict":
            self.source.require_classes(
                self._metadata.get("class_names") or self.source.checked_class_names()
            )
        super().setup(stage)

    def training_texts(self) -> Any:
        return self.source.split("train").column

    def load(self, split: str) -> LabelledTokens:
        multiple = self.loading.multiple
        if split == "predict":  # used once: not cached
            lists = self.tokenizer.encode_batch(self._texts_to_predict.column)
            self._warn_unknown(lists)
            return LabelledTokens(
                TokenLists(lists), None, self.tokenizer, self.max_length, multiple
            )
        texts = self.source.split(split)
        table = tokenised(texts.column, self.tokenizer)
        return LabelledTokens(table, texts.labels, self.tokenizer, self.max_length, multiple)

    def _warn_unknown(self, lists: list[list[int]]) -> None:
        """Warns if half or more of the tokens of a text to classify are unknown."""
        unknown = self.tokenizer.special_ids.unk
        if unknown is None:
            return
        found = [i for i, ids in enumerate(lists) if ids and 2 * ids.count(unknown) >= len(ids)]
        if found:
            rank_zero_warn(
                f"the tokenizer knows at most half of the tokens of {len(found):,} of "
                f"{len(lists):,} texts, such as {self.predict_samples[found[0]][:60]!r}: the model "
                "cannot read the rest; `tokenize` shows which they are."
            )

    def sample_names(self, split: str) -> tuple[str, list[Any]]:
        """A column that tells the samples of a split apart, in the order of "index"; its name."""
        return "text", self.source.split(split).column.to_pylist()

    def training_key(self) -> str:
        """As in the base class."""
        return text_digest(self.source.split("train").column)

    @property
    def predict_samples(self) -> list[str]:
        """The texts to classify, in the order they were given; what "index" counts."""
        return self._texts_to_predict.column.to_pylist()

    def predict_state(self) -> list[str]:
        """The texts themselves."""
        return self.predict_samples

    @cached_property
    def _texts_to_predict(self) -> TextSamples:
        """The texts to classify that can be."""
        if self.predict_text:
            count = len(self.predict_text)
            where = "--text" if count == 1 else f"--text {{}} of {count}"
            if not self.skip_bad:
                require_texts(self.predict_text, where, first=1)
            return self._usable(self.predict_text, list(range(1, count + 1)), where)
        if self.predict_path is None:
            raise UsageError("predict needs --input: a file with a text on each line, or -.")
        if self.predict_path == "-":
            return self._usable(*self._lines(self._standard_input(), "standard input"))
        path = Path(self.predict_path)
        fault = path_fault(path)
        if fault:
            raise UsageError(
                f"{path} {fault}: --input takes a file with a text on each line, a table (CSV, "
                "TSV, JSON Lines, Parquet), or -; for a text use --text."
            )
        tables = [kind for kind in TEXT_SOURCES.values() if kind.reads(Path(path.name))]
        if tables:
            return self._table_to_predict(tables[0], path)
        with read_errors(path), open_decompressed(path) as file:
            return self._usable(*self._lines(file, str(path)))

    def _table_to_predict(self, kind: type[TextSource], path: Path) -> TextSamples:
        """The texts of a table, which needs no labels."""
        options = replace(self.options, label_column=None)
        source = kind(str(path), options, self.skip_bad)
        source.labelled = False
        source.path_option = "--input"
        source.skipped = self.source.skipped
        texts = self.source.usable(source.read("train"), "predict")
        self._predict_source = source
        self._note_other_column(text_column_of(source))
        return texts

    @rank_zero_only
    def _note_other_column(self, column: str | None) -> None:
        """Says which column of a table to predict is read, if it is not that of the training."""
        trained = self._metadata.get("text_column")
        if self.options.text_column is None and trained not in (None, column):
            print(
                f"{self.predict_path}: reading the column {column}, the model was trained on the "
                f"column {trained}; choose another with --data.dataset.text_column",
                file=sys.stderr,
            )

    def other_columns(self, split: str, indices: list[int]) -> dict[str, list[Any]]:
        """As in the base class; of a folder the paths of the texts."""
        is_predict = split == "predict"
        source = self._predict_source if is_predict else self.source
        texts = self._texts_to_predict if is_predict else self.source.split(split)
        if isinstance(source, TextFolder):
            return {"path": [texts.name(i) for i in indices]}
        if not isinstance(source, TextHub):
            return {}
        origin = "train" if is_predict else source.split_in_data(split)
        lines = source.table(origin).rows  # (S,) their numbers
        return source.other_columns(origin, torch.searchsorted(lines, texts.rows[indices]))

    def _standard_input(self) -> BinaryIO:
        """What the first process reads there, in every process."""
        if self.trainer is None:
            return sys.stdin.buffer
        content = sys.stdin.buffer.read() if self.trainer.is_global_zero else b""
        return BytesIO(self.trainer.strategy.broadcast(content))

    def _lines(self, file: IO[bytes], origin: str) -> tuple[list[str], list[int], str]:
        """The lines that are UTF-8, their numbers, and what to call them; the others are bad."""
        texts = []
        rows = []
        for number, line in enumerate(read_lines(file, origin, self.source.reject), 1):
            if line is not None:
                texts.append(line)
                rows.append(number)
        if not texts:
            raise DataError(f"{origin} holds no texts.")
        return texts, rows, f"line {{}} of {origin}"

    def _usable(self, texts: list[str], rows: list[int], where: str) -> TextSamples:
        return self.source.usable(text_samples(texts, torch.tensor(rows), where), "predict")
