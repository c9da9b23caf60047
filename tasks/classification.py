"""What classification tasks share: problem type, metrics, result files."""

from functools import cached_property
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics import Metric

from datamodules.base import ResumableDataModule
from datamodules.sources import ProblemType
from datamodules.sources.base import shortened
from tasks.base import Batch, Task
from tasks.distributed.predicting import predicted
from tasks.errors import UsageError
from tasks.options import merged
from tasks.predictions import AnyPrediction, PredictionFile
from tasks.problems import PROBLEMS, ClassWeights, Problem
from tasks.tracking.csv_files import unique_heads, write_csv
from tasks.tracking.evaluated import Evaluated, PooledVectors
from tasks.tracking.evaluation_figures import save_embeddings, save_media
from tasks.tracking.media import Picture, Table
from tasks.tracking.report import counted

FEW_CLASSES = 6  # that the first line of a run names


class ClassifierTask(Task):
    """Base of image and text tasks that predict classes, labels or numbers.

    Args:
        problem_type: Each sample has one class, any number of labels, or a number to predict.
        label_smoothing: Probability mass spread evenly over all classes (Szegedy 2016), from 0 to
            below 1.
        class_weights: Weight of each class in the training loss; balanced: rare classes weigh as
            much as frequent ones.
        kwargs: Those of `Task`.
    """

    # Metadata that are options of `data.dataset`, too.
    dataset_metadata: tuple[str, ...] = ("class_names",)
    # Of what `predict` reads: column in the file of predictions, and what one and a bad one is.
    input_names = ("path", "image", "file")

    def __init__(
        self,
        problem_type: ProblemType = "single_label_classification",
        label_smoothing: float = 0.0,
        class_weights: ClassWeights = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} must be from 0 to below 1")
        if label_smoothing and problem_type == "regression":
            raise ValueError("--model.label_smoothing is for classes: set it to 0 for regression")
        self.problem_type = problem_type
        self.monitor = PROBLEMS[problem_type].monitor
        self.monitor_mode = PROBLEMS[problem_type].monitor_mode
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights
        self.loss_weights: Tensor | None = None  # (K,)
        self.pooled = PooledVectors()

    @property
    def class_names(self) -> list[str]:
        """Names of the K classes, in the order of the logits."""
        return list(self.metadata["class_names"])

    @cached_property
    def problem(self) -> Problem:
        """What the outputs mean. Raises `UsageError` if the data are of another problem type."""
        found = self.metadata["problem_type"]
        if found != self.problem_type:
            raise UsageError(
                f"the data are for {found}, the task for {self.problem_type}: give both the same "
                "problem_type"
            )
        return PROBLEMS[found](self.metadata)

    def describe_targets(self, room: int) -> str:
        description = f", {self.problem.description}"
        named = f"{description} ({', '.join(self.class_names)})"
        has_few = 2 <= len(self.class_names) <= FEW_CLASSES
        return named if has_few and len(named) <= room else description

    def on_fit_start(self) -> None:
        labels = self.datamodule.dataset("train").labels
        weights = self.problem.weights(self.class_weights, labels)
        self.loss_weights = None if weights is None else weights.to(self.device)

    def training_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss () of a training batch: logits (B, K), targets as `Problem.loss`."""
        return self.problem.loss(logits, targets, self.label_smoothing, self.loss_weights)

    def make_metrics(self) -> dict[str, Metric]:
        return self.problem.metrics()

    def resolved_config(self) -> dict[str, Any]:
        dataset = {name: self.metadata[name] for name in self.dataset_metadata}
        return merged(super().resolved_config(), {"data": {"dataset": dataset}})

    def reset_media(self) -> None:
        self.pooled.watch(self.net.pool)
        self.pooled.reset()

    def collect_media(self, batch: Batch, outputs: Any) -> None:
        """Keeps the vectors of some samples that the network has pooled."""
        size = len(self.datamodule.dataset(self.split))
        self.pooled.add(batch["index"], batch["label"], size)

    def evaluated(self, split: str) -> Evaluated | None:
        """All samples of the last evaluation of a split; None if no batch was evaluated."""
        found: Evaluated | None = self.metrics[split]["samples"].found
        return found

    def media(self, split: str) -> dict[str, Table | Picture]:
        samples = self.evaluated(split)
        return {} if samples is None else self.problem.media(samples)

    def save_results(self, folder: Path, split: str) -> None:
        samples = self.evaluated(split)
        if samples is None:
            return
        prefix = "" if split == "test" else f"{split}_"
        column, cells = self.datamodule.sample_names(split)
        heads, columns = self.problem.evaluated_columns(samples)
        names = [cells[i] for i in samples.indices.tolist()]
        write_csv(
            folder / f"{prefix}predictions.csv", unique_heads([column, *heads]), [names, *columns]
        )
        save_media(folder, prefix, self.media(split))
        self.problem.save_reports(folder, prefix, samples)
        save_embeddings(folder, prefix, self.pooled, self.class_names)

    def predict_inputs(
        self, trainer: pl.Trainer, datamodule: ResumableDataModule, file: PredictionFile | None
    ) -> tuple[list[str], list[AnyPrediction]] | None:
        """Returns paths or texts, and what is predicted for each; arguments as of `predicted`."""
        found = predicted(trainer, self, datamodule, file)
        if found is None:
            return None
        indices, rows = found
        names = datamodule.predict_samples
        return [names[i] for i in indices], [self.problem.prediction(row) for row in rows]

    def save_predictions(
        self, file: PredictionFile, inputs: list[str], found: list[AnyPrediction], bad: list[str]
    ) -> None:
        """Writes what `predict_inputs` returned; says where, and which inputs were skipped."""
        column, noun, source = self.input_names
        file.write(column, inputs, self.class_names, found)
        note = f", {counted(len(bad), f'bad {source}')} skipped: {shortened(bad)}" if bad else ""
        print(f"predictions for {counted(len(inputs), noun)} are in {file.path}{note}")
