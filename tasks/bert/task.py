"""Text classification with a BERT-style encoder: loss, metrics and predictions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.reviews import ReviewData
from modules.models.bert import BertClassifier, BertConfig
from modules.pooling import POOLINGS
from tasks.base import Batch, StepOutput
from tasks.bert.architectures import fit_to_data, load_pretrained
from tasks.bert.teacher import TextTeacher, load_teacher
from tasks.classification import ClassifierTask
from tasks.errors import UsageError
from tasks.predictions import PredictionFile
from tasks.text import TextTask
from tasks.tracking.class_scores import calibration_error, roc_curve
from tasks.tracking.evaluated import EvaluatedSamples
from tasks.training.distillation import TextTeacherConfig, cosine_loss


class BertTask(TextTask, ClassifierTask):
    """Classification of texts with an encoder (Devlin 2019).

    Args:
        net: The network. Null numbers of classes and tokens come from the data.
        r_drop: Weight of the divergence of two passes with dropout (Liang 2021, there 0.1 to 5); it
            doubles the time of a step; 0: one pass.
        reset_head: Initialise the classifier anew; even if the pretrained weights have one that
            fits.
        teacher: A trained model to learn from, besides the labels.
        kwargs: See `TextTask` and `ClassifierTask`.
    """

    name = "bert"
    needed_metadata = ("vocabulary", "pad_id", "max_length", "tokenizer_options")
    teacher: TextTeacher | None
    input_names = ("text", "text", "line")

    def __init__(
        self,
        net: BertConfig = BertConfig(),
        r_drop: float = 0.0,
        reset_head: bool = False,
        teacher: TextTeacherConfig = TextTeacherConfig(),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if r_drop < 0:
            raise ValueError(f"r_drop {r_drop} must not be negative")
        self.net_config = net
        self.r_drop = r_drop
        self.reset_head = reset_head
        self.teacher_config: TextTeacherConfig = teacher

    def build(self, metadata: Mapping[str, Any]) -> BertClassifier:
        classes = len(metadata["class_names"])
        config = fit_to_data(self.net_config, metadata, self.pretrained, num_classes=classes)
        length = metadata["max_length"]
        if length > config.max_length and not POOLINGS[config.pool].any_length:
            raise UsageError(
                f"--data.max_length {length} exceeds the {config.max_length} tokens that --model."
                f"net.pool {config.pool} takes: lower it, or raise --model.net.max_length"
            )
        build = partial(BertClassifier, config)
        if self.pretrained is None:
            return build()
        reset = ("head", "pooler", "pool") if self.reset_head else ()
        return load_pretrained(build, self.pretrained, metadata, reset)

    def modules_to_compile(self) -> list[nn.Module]:
        return [self.net.encoder if self.teacher_config.cosine else self.net]

    def make_metrics(self) -> dict[str, Metric]:
        """Adds for classes AUROC, and calibration error in 15 bins (Guo 2017)."""
        metrics = super().make_metrics()
        if self.problem_type == "single_label_classification":
            metrics["samples"] = EvaluatedSamples({"auroc": auroc, "ece": calibration_error})
        return metrics

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns loss (), predictions (B, K) and targets of a batch of tokens (B, N)."""
        labels = batch["label"]
        if training:
            taught = self.kept_logits(batch)
            logits, loss = self.learn(batch["tokens"], batch["padding_mask"], labels, taught)
        else:
            logits = self.net(batch["tokens"], batch["padding_mask"])
            loss = self.problem.loss(logits, labels)
        predictions = self.problem.predictions(logits)
        return StepOutput(loss, len(labels), predictions, self.problem.metric_targets(labels))

    def learn(
        self, tokens: Tensor, padding_mask: Tensor, labels: Tensor, taught: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns logits (B, K) and the training loss () of tokens (B, N).

        `taught` are the teacher's logits (B, K); None: it computes them here, if there is one.
        """
        if not self.teacher_config.cosine:
            logits = self.net(tokens, padding_mask)
        else:
            hidden = self.net.encoder(tokens, padding_mask)  # (B, N, E)
            logits = self.net.classify(hidden, padding_mask)
        loss = self.training_loss(logits, labels)
        if self.r_drop:
            second = self.net(tokens, padding_mask)
            loss = (loss + self.training_loss(second, labels)) / 2
            loss = loss + self.r_drop * self.problem.divergence(logits, second) / 2
        if self.teacher is None:
            return logits, loss
        if taught is None:
            taught_hidden, taught = self.teacher.outputs(tokens, padding_mask)
        loss = self.teacher_config.add(loss, logits, taught)
        if self.teacher_config.cosine:
            cosine = cosine_loss(hidden, taught_hidden, padding_mask)
            loss = loss + self.teacher_config.cosine * cosine
        return logits, loss

    def load_teacher(self, source: str) -> TextTeacher:
        width = self.net.config.stack.width if self.teacher_config.cosine else None
        return load_teacher(source, self.metadata, width)

    def teacher_logits(self, batch: Batch) -> Tensor:
        assert self.teacher is not None
        return self.teacher.outputs(batch["tokens"], batch["padding_mask"])[1]

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Returns indices of the texts (B,) and their predictions (B, K)."""
        logits = self.net(batch["tokens"], batch["padding_mask"])
        return batch["index"], self.problem.predictions(logits)

    def write_predictions(
        self, trainer: pl.Trainer, datamodule: ReviewData, file: PredictionFile
    ) -> None:
        if datamodule.predict_text and datamodule.predict_path is not None:
            raise UsageError("--text and --input exclude each other: leave one out")
        is_written = not (datamodule.predict_text and file.is_default)
        found = self.predict_inputs(trainer, datamodule, file if is_written else None)
        if found is None:
            return
        texts, predictions, others = found
        if datamodule.predict_text:
            for one in predictions:
                print(one.line(file.top_k))
        if not is_written:
            if datamodule.skipped:
                rank_zero_warn(self.skipped_inputs(datamodule.skipped))
            return
        self.save_predictions(file, texts, predictions, others, datamodule.skipped)


def auroc(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Macro average of the area under the ROC curve of each class against the rest, ().

    Classes that no sample has are left out; NaN if there is one class only.
    """
    classes = zip(probabilities.cpu().unbind(1), range(probabilities.shape[1]), strict=True)
    curves = [roc_curve("", scores, labels.cpu() == label) for scores, label in classes]
    return torch.tensor([curve.auc for curve in curves if curve is not None]).mean()
