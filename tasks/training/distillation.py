"""Distillation: a network learns from the outputs of a trained one, its teacher, too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.errors import UsageError

TEACHER = "--model.teacher.path"
Kind = Literal["soft", "hard"]
AnyTeacher = TypeVar("AnyTeacher", bound="Teacher")


@dataclass(frozen=True)
class TeacherConfig:
    """A trained model that a network learns from: (1 - alpha) * loss of the labels + alpha * its.

    Args:
        path: A checkpoint or run folder of the same task, `hf/<model>` or a folder of such a model;
            for images also `timm/<model>` or `torchvision/<model>`; null: no teacher.
        kind: What to learn; "soft": the teacher's probabilities at a temperature T, by T^2
            KL(teacher || network) (Hinton 2015); "hard": its most likely class, by cross-entropy
            (Touvron 2021).
        alpha: Weight of the loss of the teacher, from 0 to 1.
        temperature: Temperature T of "soft"; a higher one tells more of unlikely classes.
        keep_outputs: Compute the teacher's logits of all training samples once, before the first
            step, and keep them on each device, in 4 bytes * samples * classes (CIFAR-10: 2 MB,
            ImageNet: 5 GB); images must not be augmented.
    """

    path: str | None = None
    kind: Kind = "soft"
    alpha: float = 0.5
    temperature: float = 3.0
    keep_outputs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"--model.teacher.alpha {self.alpha} must lie between 0 and 1")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"--model.teacher.temperature {self.temperature} must be above 0")
        changed = any(getattr(self, field.name) != field.default for field in fields(self))
        if self.path is None and changed:
            raise UsageError(f"the options of --model.teacher need a teacher: add {TEACHER}")

    def add(self, loss: Tensor, logits: Tensor, taught: Tensor) -> Tensor:
        """Returns a loss () of the labels with that of the teacher.

        Args:
            loss: Of the labels, ().
            logits: Of the network, (B, K).
            taught: Logits of the teacher, (B, K).
        """
        return (1 - self.alpha) * loss + self.alpha * LOSSES[self.kind](
            logits, taught, self.temperature
        )


@dataclass(frozen=True)
class TextTeacherConfig(TeacherConfig):
    """As `TeacherConfig`; a student of the same width can also learn the last vectors (Sanh 2019).

    Args:
        path: A checkpoint or run folder of the same task, `hf/<model>` or a folder of such a model;
            null: no teacher.
        kind: What to learn; "soft": the teacher's probabilities at a temperature T, by T^2
            KL(teacher || network) (Hinton 2015); "hard": its most likely class, by cross-entropy
            (Touvron 2021).
        alpha: Weight of the loss of the teacher, from 0 to 1.
        temperature: Temperature T of "soft"; a higher one tells more of unlikely classes.
        keep_outputs: Compute the teacher's logits of all training samples once, before the first
            step, and keep them on each device, in 4 bytes * samples * classes; not together with
            `cosine`.
        cosine: Weight of 1 - cos between the vectors of each token after the last blocks (Sanh
            2019), added to the loss; needs a teacher of the same `stack.width`.
    """

    cosine: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.cosine < float("inf"):
            raise UsageError(f"--model.teacher.cosine {self.cosine} must not be negative")
        if self.cosine and self.keep_outputs:
            raise UsageError(
                "--model.teacher.keep_outputs keeps logits, and --model.teacher.cosine also needs "
                "the vectors of all tokens: leave one of them out"
            )


def soft_loss(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(taught / T) || softmax(logits / T)), mean over the batch (Hinton 2015)."""
    ours = (logits / temperature).log_softmax(-1)  # (B, K)
    theirs = (taught / temperature).log_softmax(-1)  # (B, K)
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def hard_loss(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Cross-entropy with the teacher's most likely class, mean over the batch (Touvron 2021)."""
    return F.cross_entropy(logits, taught.argmax(-1))


LOSSES: dict[Kind, Callable[[Tensor, Tensor, float], Tensor]] = {
    "soft": soft_loss,
    "hard": hard_loss,
}


def cosine_loss(hidden: Tensor, taught: Tensor, padding_mask: Tensor) -> Tensor:
    """1 - cos of vectors (B, N, E), mean over the tokens that are not padding (Sanh 2019)."""
    return 1 - F.cosine_similarity(hidden[padding_mask], taught[padding_mask], dim=-1).mean()


class Teacher:
    """A frozen network in evaluation mode.

    It is no `nn.Module`: the task's checkpoints, optimizer and DDP know nothing of it.

    Args:
        net: The network.
        rows: Where the classes of the data are among its own; None: in the same order.
    """

    def __init__(self, net: nn.Module, rows: Sequence[int] | None) -> None:
        self.net = net.eval().requires_grad_(False)
        self.rows = None if rows is None else torch.tensor(rows)

    def to(self: AnyTeacher, device: torch.device) -> AnyTeacher:
        """Moves it to a device."""
        self.net.to(device)
        if self.rows is not None:
            self.rows = self.rows.to(device)
        return self

    def in_order(self, logits: Tensor) -> Tensor:
        """Its logits (B, K) as float32 in the order of the classes of the data, (B, K)."""
        return (logits if self.rows is None else logits[:, self.rows]).float()


def match_rows(
    source: str, known: Sequence[Sequence[str]], count: int, wanted: Sequence[str]
) -> list[int] | None:
    """Returns where the classes of the data are among those of a teacher; None: the same order.

    Args:
        source: Where the teacher comes from.
        known: Names of its classes; several lists if they have several names each, none if they
            have no names: then they are taken to be in the order of the data.
        count: Number of its classes.
        wanted: Names of the classes of the data.

    Raises `UsageError` if its classes are others.
    """
    for names in known:
        if len(names) == len(wanted) and set(names) == set(wanted):
            return [names.index(name) for name in wanted]
    if not known and count == len(wanted):
        return None
    message = f"{TEACHER} {source} has {count} classes and the data have {len(wanted)}"
    if known:
        only = {
            "the teacher": [name for name in known[-1] if name not in wanted],
            "the data": [name for name in wanted if name not in known[-1]],
        }
        firsts = [f"{names[0]!r} of {whose}" for whose, names in only.items() if names]
        message += f"; the first that only one of them has: {' and '.join(firsts)}"
    raise UsageError(f"{message}: give a teacher that was trained on the same classes")


def check_path(source: str | None) -> None:
    """Refuses the path of a teacher that does not exist; names of models in libraries pass."""
    is_name = source is None or source.startswith(("hf/", "timm/", "torchvision/"))
    if not is_name and not Path(str(source)).exists():
        raise UsageError(
            f"{TEACHER} {source}: there is no such file or folder; if the teacher was moved, give "
            "its new path"
        )


def check_problem(source: str, metadata: Mapping[str, Any]) -> None:
    """Refuses a teacher that does not predict one class of each sample."""
    kind = metadata["problem_type"]
    if kind != "single_label_classification":
        raise UsageError(
            f"{TEACHER} {source} was trained for {kind}: give one that predicts one class"
        )
