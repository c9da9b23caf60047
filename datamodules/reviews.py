"""Labelled texts for classification: read, tokenised once, and batched by length."""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from datamodules.base import require_same
from datamodules.sources import TEXT_SOURCES, TextSamples, find_source
from datamodules.sources.readers.formats import read_lines
from datamodules.sources.texts import text_samples
from datamodules.text import Sequences, TextData, TokenLists, TokenRows
from datamodules.tokenizers import Tokenizer
from datamodules.tokens.token_cache import tokenised
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import open_regular, path_fault


class LabelledTokens(Sequences):
    """Tokenised texts with their labels, (S,) int64, or None for prediction.

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


class ReviewData(TextData):
    """Batches of texts and labels.

    {"tokens": int64 (B, N), "padding_mask": bool (B, N), False at padding, "label": int64 (B,),
    "index": int64 (B,)}. Evaluation and prediction go from the longest to the shortest text:
    "index" is the position of a text in the order it was read, for prediction in `predict_texts`;
    then batches have no "label".

    Args:
        source: reviews: generated ones, no download; hub: a data set of the hub; csv, jsonl: files
            with columns; txt: files in train/CLASS/.
        path: File or folder to read; for the source hub a local copy (parquet files named by
            split). A single file is the training split, of which a part is held back for
            validation.
        predict_path: File with a text on each line to classify with `predict`; - reads standard
            input.
    """

    def __init__(
        self,
        source: Literal["reviews", "hub", "csv", "jsonl", "txt"] = "reviews",
        path: str | None = None,
        predict_path: str | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.source = find_source(TEXT_SOURCES, source)(path, self.options, self.skip_bad)
        self.predict_path = predict_path
        self.predict_text: str | None = None  # a single text to classify, instead of a file

    def measure_metadata(self) -> dict[str, Any]:
        """As in the base class, and class_names (list) and num_classes."""
        names = self.source.checked_class_names()
        return {"class_names": names, "num_classes": len(names), **super().measure_metadata()}

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """As in the base class; the class names must agree, too."""
        require_same("class_names", self.options.class_names, metadata["class_names"])
        super().set_metadata(metadata)
        self.source.checkpoint_classes = metadata["class_names"]

    def setup(self, stage: str) -> None:
        """As in the base class; classes that are missing, or not the checkpoint's, are refused
        first."""
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
            lists = TokenLists(self.tokenizer.encode_batch(self._texts_to_predict.column))
            return LabelledTokens(lists, None, self.tokenizer, self.max_length, multiple)
        texts = self.source.split(split)
        table = tokenised(texts.column, self.tokenizer)
        return LabelledTokens(table, texts.labels, self.tokenizer, self.max_length, multiple)

    @property
    def predict_texts(self) -> list[str]:
        """The texts to classify, in the order they were given; what "index" counts."""
        return self._texts_to_predict.column.to_pylist()

    @cached_property
    def _texts_to_predict(self) -> TextSamples:
        """The texts to classify that can be."""
        if self.predict_text is not None:
            return self._usable([self.predict_text], [1], "--text")
        if self.predict_path is None:
            raise UsageError(
                "predict needs --data.predict_path: a file with a text on each line, or -."
            )
        if self.predict_path == "-":
            return self._usable(*self._lines(sys.stdin.buffer, "standard input"))
        path = Path(self.predict_path)
        fault = path_fault(path)
        if fault:
            raise UsageError(
                f"{path} {fault}: --data.predict_path takes a file with a text on each line, or -."
            )
        with open_regular(path) as file:
            return self._usable(*self._lines(file, str(path)))

    def _lines(self, file: BinaryIO, origin: str) -> tuple[list[str], list[int], str]:
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
