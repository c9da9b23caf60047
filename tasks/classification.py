"""What classification tasks share: problem type, metrics, result files."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from datamodules.base import ResumableDataModule
from datamodules.sources import ProblemType
from datamodules.sources.base import shortened
from datamodules.utils.progress import progress_bar
from tasks.base import Batch, Task
from tasks.distributed.predicting import predict_dataset
from tasks.errors import UsageError
from tasks.options import merge_options
from tasks.predictions import AnyPrediction, PredictionFile
from tasks.problems import PROBLEMS, ClassWeights, Problem
from tasks.tracking.csv_files import unique_names, write_csv
from tasks.tracking.evaluated import Evaluated, PooledVectors
from tasks.tracking.evaluation_figures import save_embeddings, save_media
from tasks.tracking.media import Picture, Table
from tasks.tracking.report import format_count, write_skipped
from tasks.training.distillation import TEACHER, Teacher, TeacherConfig, check_path
from tasks.training.precision import float32_by_default

FEW_CLASSES = 6  # that the first line of a run names


class ClassifierTask(Task):
    """Base of image and text tasks that predict classes, labels or numbers.

    Args:
        problem_type: What a sample has: a class, several labels or a number.
        label_smoothing: Probability mass spread over all classes (Szegedy 2016); from 0, below 1.
        class_weights: Weight of each class in the training loss; as a list, or by name, such as
            {spam: 3}, with 1 for other classes; balanced: rare classes weigh as much as frequent
            ones.
        kwargs: Those of `Task`.
    """

    needed_metadata: Sequence[str] = ("class_names", "problem_type")
    teacher_config = TeacherConfig()
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
        self.teacher: Teacher | None = None  # while it trains
        self.kept_outputs: Tensor | None = None  # logits (S, K) of the teacher, if they are kept

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

    def load_teacher(self, source: str) -> Teacher:
        """Loads the teacher of `TeacherConfig.path` for the data of this task."""
        raise NotImplementedError

    @float32_by_default()
    def on_fit_start(self) -> None:
        if self.class_weights == "balanced" and getattr(self.datamodule, "balanced", False):
            raise UsageError(
                "--data.balanced true and --model.class_weights balanced both make rare classes "
                "count as much as frequent ones, and together they overcompensate: leave one out"
            )
        source = self.teacher_config.path
        if source is not None:
            if self.problem_type != "single_label_classification":
                raise UsageError(
                    f"{TEACHER} is for one class a sample, not for {self.problem_type}: leave it "
                    "out"
                )
            check_path(source)
            with torch.random.fork_rng(devices=[]):  # for initial weights, which are replaced
                self.teacher = self.load_teacher(source).to(self.device)
            if self.teacher_config.keep_outputs:
                self.kept_outputs = self.teacher_outputs()
                self.teacher.net.cpu()  # frees the memory of the device
        labels = self.training_labels() if self.class_weights == "balanced" else None
        weights = self.problem.weights(self.class_weights, labels)
        self.loss_weights = None if weights is None else weights.to(self.device)

    def on_fit_end(self) -> None:
        self.teacher = None  # frees its memory
        self.kept_outputs = None

    def teacher_logits(self, batch: Batch) -> Tensor:
        """Logits (B, K) of the teacher for a batch as the data have it."""
        raise NotImplementedError

    def teacher_outputs(self) -> Tensor:
        """Logits (S, K) of the teacher for all training samples, float32.

        They are computed in the batches of an evaluation, which are the same in each run and for
        any number of processes: so a resumed run has the same bits.
        """
        data = self.datamodule
        if data is None:
            raise UsageError(
                "--model.teacher.keep_outputs needs the index of each sample: train on a "
                "ResumableDataModule, or leave it out"
            )
        dataset = data.dataset("train")
        logits = torch.zeros(len(dataset), len(self.class_names), device=self.device)
        loader = data.eval_loader(dataset)
        strategy = self.trainer.strategy
        with (
            self.trainer.precision_plugin.train_step_context(),
            float32_by_default(),
            progress_bar("computing the outputs of the teacher", len(dataset)) as advance,
        ):
            for number, batch in enumerate(loader):
                batch = strategy.batch_to_device(batch)
                if loader.sampler.is_counted(number):
                    logits[batch["index"]] = self.teacher_logits(batch)
                    advance(len(batch["index"]) * self.trainer.world_size)
        return strategy.reduce(logits, reduce_op="sum")  # a row is zero in all processes but one

    def kept_logits(self, batch: Batch) -> Tensor | None:
        """Logits (B, K) of the teacher for a training batch; None if they are not kept."""
        return None if self.kept_outputs is None else self.kept_outputs[batch["index"]]

    def training_labels(self) -> Tensor:
        """The targets of all training samples, (S,) or (S, K)."""
        dataset = None if self.datamodule is None else self.datamodule.dataset("train")
        labels: Tensor | None = getattr(dataset, "labels", None)
        if labels is None:
            raise UsageError(
                "--model.class_weights balanced needs all labels: train on a ResumableDataModule "
                "whose data set has them as `labels`, or give a weight for each class"
            )
        return labels

    def training_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss () of a training batch: logits (B, K), targets as `Problem.loss`."""
        return self.problem.loss(logits, targets, self.label_smoothing, self.loss_weights)

    def make_metrics(self) -> dict[str, Metric]:
        return self.problem.metrics()

    def resolved_options(self) -> dict[str, Any]:
        names = [name for name in self.dataset_metadata if name in self.metadata]
        dataset = {name: self.metadata[name] for name in names}
        return merge_options(super().resolved_options(), {"data": {"dataset": dataset}})

    def reset_media(self) -> None:
        self.pooled.watch(self.net.pool)
        self.pooled.reset()

    def collect_media(self, batch: Batch, outputs: Any) -> None:
        """Keeps the vectors of some samples that the network has pooled."""
        size = len(self.datamodule.dataset(self.split))
        self.pooled.add(batch["index"], batch["label"], size)

    def evaluated_samples(self, split: str) -> Evaluated | None:
        """All samples of the last evaluation of a split; None if no batch was evaluated."""
        found: Evaluated | None = self.metrics[split]["samples"].found
        return found

    def media(self, split: str) -> dict[str, Table | Picture]:
        samples = self.evaluated_samples(split)
        return {} if samples is None else self.problem.media(samples)

    def save_results(self, folder: Path, split: str) -> None:
        samples = self.evaluated_samples(split)
        if samples is None:
            return
        prefix = "" if split == "test" else f"{split}_"
        column, cells = self.datamodule.sample_names(split)
        header, columns = self.problem.evaluated_columns(samples)
        indices = samples.indices.tolist()
        write_csv(
            folder / f"{prefix}predictions.csv",
            unique_names([column, *header]),
            [[cells[i] for i in indices], *columns],
            self.datamodule.other_columns(split, indices),
        )
        save_media(folder, prefix, self.media(split))
        self.problem.save_reports(folder, prefix, samples)
        save_embeddings(folder, prefix, self.pooled, self.class_names)

    def predict_inputs(
        self, trainer: pl.Trainer, datamodule: ResumableDataModule, file: PredictionFile | None
    ) -> tuple[list[str], list[AnyPrediction], dict[str, list[Any]]] | None:
        """Returns paths or texts, predictions, and other columns of the table that was read.

        The arguments are those of `predict_dataset`.
        """
        if file is not None:
            file.check_default()
        found = predict_dataset(trainer, self, datamodule, file)
        if found is None:
            return None
        indices, rows = found
        names = datamodule.predict_samples
        predictions = [self.problem.prediction(row) for row in rows]
        return (
            [names[i] for i in indices],
            predictions,
            datamodule.other_columns("predict", indices),
        )

    def save_predictions(
        self,
        file: PredictionFile,
        inputs: list[str],
        found: list[AnyPrediction],
        others: dict[str, list[Any]],
        bad: list[str],
    ) -> None:
        """Writes what `predict_inputs` returned, and what was skipped beside it; says where."""
        column, noun, _ = self.input_names
        file.write(column, inputs, self.class_names, found, others)
        names = file.path.with_suffix(".skipped.txt")
        write_skipped(names, bad)
        note = f", {self.skipped_inputs(bad)} (all in {names})" if bad else ""
        print(f"predictions for {format_count(len(inputs), noun)} are in {file.path}{note}")

    def skipped_inputs(self, bad: list[str]) -> str:
        """How many inputs of `predict` were skipped, and which."""
        source = self.input_names[2]
        return f"{format_count(len(bad), f'bad {source}')} skipped: {shortened(bad)}"
