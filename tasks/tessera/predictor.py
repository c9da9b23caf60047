"""A classifier as a function of batches of a table."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.utils.errors import UsageError
from tasks.problems import Regression

from .images import ImageClassifier
from .loading import load
from .models import Classifier


class Predictor:
    """Labels batches of a table: for `map_batches` of Ray Data and `map` of datasets.

    It can be pickled; each process loads the model at its first batch.

    >>> predictor = tessera.Predictor(run_folder, column="input")
    >>> batch = predictor({"input": np.array([sample, sample]), "id": np.array([3, 5])})
    >>> sorted(batch)
    ['id', 'input', 'label', 'probability']

    Args:
        path: What `load` takes; relative to the folder of the process that loads it.
        column: Column with texts, or with images: paths, encoded bytes, or uint8 values (H, W, C).
            None: "text" or "image", as the model needs it.
        probabilities: Add a column with the probabilities of all classes, (B, K), in the order of
            the model's `class_names`.
        batch_size: Samples at a time.
        options: Other arguments of `load`.
    """

    def __init__(
        self,
        path: str | Path,
        column: str | None = None,
        probabilities: bool = False,
        batch_size: int = 64,
        **options: Any,
    ) -> None:
        self.path = str(path)
        self.column = column
        self.probabilities = probabilities
        self.batch_size = batch_size
        self.options = options

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "model"}

    @cached_property
    def model(self) -> Classifier:
        """The model; `UsageError` if it is not a classifier."""
        return load(self.path, kind=Classifier, **self.options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Adds the columns "label" and "probability", (B,) each, to a batch of columns.

        Or "labels" (with commas between them), or "prediction", a number, as the model was trained.

        Raises `UsageError` if the column is missing, `DataError` if an image cannot be read.
        """
        column = self.column or ("image" if isinstance(self.model, ImageClassifier) else "text")
        if column not in batch:
            raise UsageError(f"there is no column {column!r}: choose from {', '.join(batch)}")
        if self.probabilities and isinstance(self.model.problem, Regression):
            raise UsageError("a model of numbers has no probabilities: leave them out")
        found = self.model.predict(list(batch[column]), self.batch_size)
        answers = [one.answer() for one in found]
        added: dict[str, Any] = {}
        for name, kind in self.model.problem.answers.items():
            added[name] = np.array([answer[name] for answer in answers], dtype=kind)
        if self.probabilities:
            names = self.model.class_names
            rows = [[one.probabilities[name] for name in names] for one in found]
            # (B * K,) -> (B, K); of no samples, too
            added["probabilities"] = np.array(rows, dtype=np.float32).reshape(-1, len(names))
        return {**batch, **added}
