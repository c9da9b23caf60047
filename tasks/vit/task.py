"""Image classification with a Vision Transformer: loss, metrics, pictures and predictions."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from datamodules.images import ImageData
from datamodules.utils.files import natural_key
from datamodules.vision.views import ViewsName, average_over_views
from modules.models.images import ImageNet, architecture_of, build_image_net
from modules.models.swin import SWIN_PRESETS, SwinConfig
from modules.models.vit import VIT_PRESETS, ViTConfig
from tasks.base import Batch, StepOutput
from tasks.checkpoints.reading import best_checkpoint
from tasks.checkpoints.weights import fill_config
from tasks.classification import ClassifierTask
from tasks.distributed.predicting import predicts_all
from tasks.errors import UsageError, usage_errors
from tasks.predictions import PredictionFile
from tasks.tracking.evaluated import Evaluated
from tasks.tracking.media import Picture, Table, render_picture
from tasks.training.distillation import TeacherConfig
from tasks.vit.attend import draw, rollout
from tasks.vit.image_task import ImageTask

if TYPE_CHECKING:
    from tasks.vit.teacher import ImageTeacher

MAX_ROLLOUTS = 6  # images with attention that an evaluation logs
MAX_MISTAKES = 32  # misclassified images that an evaluation logs


class ViTTask(ImageTask, ClassifierTask):
    """Image classification with a Vision Transformer (Dosovitskiy 2021).

    Args:
        net: The network. Null numbers of classes and channels come from the data.
        pretrained: Weights to start from: a checkpoint or run folder, also of `tasks.mae`;
            `timm/<model name>`, downloaded by timm; `hf/<model>` of the Hugging Face hub; a folder
            of Hugging Face's or timm's layout; a .safetensors or .pth file of timm's weights that
            is named after the model or has a config.json beside it; or a .safetensors file that
            `export` wrote; null: random weights.
        teacher: A trained model to learn from, besides the labels.
        tta: Views over which logits are averaged after training: the image alone, also mirrored, or
            ten crops of it.
        kwargs: See `ImageTask` and `ClassifierTask`.
    """

    name = "vit"
    dataset_metadata = ("class_names", "mean", "std", "interpolation", "crop_pct")
    teacher: "ImageTeacher | None"

    def __init__(
        self,
        net: ViTConfig = replace(VIT_PRESETS["tiny"], channels=None, num_classes=None),
        pretrained: str | None = None,
        teacher: TeacherConfig = TeacherConfig(),
        tta: ViewsName = "none",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.net_config = net
        changing = self.augment.config.in_use
        if teacher.keep_outputs and changing:
            off = " ".join(f"--model.augment.{name} 0" for name in changing)
            raise UsageError(
                "--model.teacher.keep_outputs needs images that are the same in each epoch: add "
                f"{off}, or leave it out"
            )
        self.refused_commands = ("look",) if net.stack.order == "mixer" else ()
        self.pretrained = None if pretrained is None else best_checkpoint(pretrained)
        self.teacher_config = teacher
        self.tta = tta
        self.collected: dict[str, Picture] = {}
        self.mistakes: dict[int, tuple[Any, ...]] = {}  # by position in the data

    @classmethod
    def for_network(cls, net: Mapping[str, Any]) -> type["ViTTask"]:
        with usage_errors():
            return TASKS[architecture_of(net)]

    @staticmethod
    def check_options(
        options: Any, on_command_line: Collection[str], given: Collection[str]
    ) -> None:
        """Refuses a file of weights whose architecture is not known, unless options describe it.

        Also `--look_every` for a network without attention.
        """
        is_mixer = options.model.net.stack.order == "mixer"
        if options.get("look_every") is not None and is_mixer:
            raise UsageError(
                '--look_every: the network has no attention, as its stack.order is "mixer": leave '
                "it out"
            )
        if options.model.pretrained is not None:
            from tasks.vit.architectures import check_described

            check_described(options.model.pretrained, given)

    def build(self, metadata: Mapping[str, Any]) -> ImageNet:
        sizes = {"num_classes": len(metadata["class_names"]), "channels": metadata["channels"]}
        net = build_image_net(fill_config(self.net_config, sizes))
        if self.pretrained is not None:
            from tasks.vit.architectures import load_pretrained

            load_pretrained(net, self.pretrained, metadata)
        return net

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns loss (), predictions (B, K) and targets of uint8 images (B, C, H, W)."""
        labels = batch["label"]
        if training:
            pixels = self.augment.erase(self.normalised(self.augment(batch["image"])))
            pixels, targets = self.augment.mix(pixels, self.problem.dense(labels))
            logits, loss = self.learn(pixels, targets, self.kept_logits(batch))
        else:
            trains = self.trainer.state.fn == "fit"
            logits = self.logits(batch, "none" if trains else self.tta)
            loss = self.problem.loss(logits, labels)
        predictions = self.problem.predictions(logits)
        return StepOutput(loss, len(labels), predictions, self.problem.metric_targets(labels))

    def learn(
        self, pixels: Tensor, targets: Tensor, taught: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns logits (B, K) and the training loss () of normalised pixels (B, C, H, W).

        With a teacher, a network with a distillation head learns from it with that head alone.
        `taught` are the teacher's logits (B, K); None: it computes them here.
        """
        if self.teacher is None:
            logits = self.net(pixels)
            return logits, self.training_loss(logits, targets)
        heads = self.net(pixels, each_head=True)  # (heads, B, K)
        loss = self.training_loss(heads[0], targets)
        if taught is None:
            taught = self.teacher.logits(pixels)
        loss = self.teacher_config.add(loss, heads[-1], taught)
        return heads.mean(0), loss

    def teacher_logits(self, batch: Batch) -> Tensor:
        assert self.teacher is not None
        return self.teacher.logits(self.normalised(batch["image"]))

    def load_teacher(self, source: str) -> "ImageTeacher":
        from tasks.vit.teacher import load_teacher

        return load_teacher(source, self.metadata)

    def reset_media(self) -> None:
        super().reset_media()
        self.collected = {}
        self.mistakes = {}

    def collect_media(self, batch: Batch, outputs: Tensor) -> None:
        """Keeps misclassified images, and draws the attention rollout of some images."""
        super().collect_media(batch, outputs)
        has_mistakes = self.problem_type == "single_label_classification"
        if self.collected and not has_mistakes:
            return
        images = batch["image"]
        samples = Evaluated(outputs.cpu(), batch["label"].cpu(), batch["index"].cpu())
        truth, answers, *_ = self.problem.evaluated_columns(samples)[1]
        names = [(shown(label), shown(guess)) for label, guess in zip(truth, answers, strict=True)]
        if not self.collected:
            numbers = sorted(range(len(images)), key=lambda i: spread_key(int(samples.indices[i])))
            chosen = sorted(numbers[:MAX_ROLLOUTS])
            first = images[chosen]
            with self.trainer.precision_plugin.val_step_context():
                attention = rollout(self.net, self.normalised(first))
            titles = [
                f"label: {label}" + f"\nprediction: {guess}" * (label != guess)
                for label, guess in (names[i] for i in chosen)
            ]
            if attention is not None:
                self.collected["attention"] = render_picture(
                    lambda file: draw(first, attention, titles, file)
                )
        if not has_mistakes:
            return
        confidence, predicted = samples.predictions.max(-1)  # (B,), (B,)
        wrong = torch.nonzero(predicted != samples.labels).flatten()  # (S,)
        found = dict(zip(samples.indices[wrong].tolist(), wrong.tolist(), strict=True))
        kept = sorted([*self.mistakes, *found], key=spread_key)[:MAX_MISTAKES]
        for position in kept:
            if position in found:
                i = found[position]
                row = (images[i].clone().cpu(), *names[i], float(confidence[i]))
                self.mistakes[position] = row
        self.mistakes = {position: self.mistakes[position] for position in sorted(kept)}

    def media(self, split: str) -> dict[str, Table | Picture]:
        media = super().media(split) | self.collected
        if self.problem_type == "single_label_classification":
            columns = ("image", "label", "prediction", "probability")
            media["misclassified"] = Table(columns, list(self.mistakes.values()))
        return media

    def logits(self, batch: Batch, views: ViewsName) -> Tensor:
        """Returns the mean of the logits (B, K) over views of the images."""
        return average_over_views(self.net, self.normalised(batch["image"]), views)

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[list[str], Tensor]:
        """Returns paths and predictions (B, K)."""
        logits = self.logits(batch, self.tta)
        return batch["path"], self.problem.predictions(logits)

    def write_predictions(
        self, trainer: pl.Trainer, datamodule: ImageData, file: PredictionFile
    ) -> None:
        is_printed = datamodule.predicts_one_image
        is_written = not (is_printed and file.is_default)
        found = self.predict_inputs(trainer, datamodule, file if is_written else None)
        if found is None:
            return
        paths, predictions, others = found
        if is_printed:
            print(predictions[0].line(file.top_k))
        if not is_written:
            return
        bad = set(datamodule.skipped)
        if predicts_all(trainer):
            bad |= set(datamodule.predict_samples) - set(paths)  # also what other processes skipped
        self.save_predictions(file, paths, predictions, others, sorted(bad, key=natural_key))


def shown(answer: str | float) -> str:
    """A class, labels or a number, in the title of an image."""
    return answer or "none" if isinstance(answer, str) else f"{answer:.4g}"


def spread_key(position: int) -> int:
    """A number by which samples are chosen: the lowest ones are spread evenly over the data."""
    return position * 2654435761 % 2**32  # 2^32 over the golden ratio (Knuth)


class SwinTask(ViTTask):
    """Image classification with a Swin Transformer (Liu 2021, Liu 2022).

    Args:
        net: The network. Null numbers of classes and channels come from the data.
        kwargs: See `ViTTask`.
    """

    def __init__(
        self,
        net: SwinConfig = replace(SWIN_PRESETS["swin_tiny"], channels=None, num_classes=None),
        **kwargs: Any,
    ) -> None:
        super().__init__(net=net, **kwargs)  # type: ignore[arg-type]


TASKS: dict[str, type[ViTTask]] = {"vit": ViTTask, "swin": SwinTask}  # by architecture
