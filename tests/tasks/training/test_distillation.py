"""Losses of teachers: by their formulas, as timm's and transformers', and who gets gradients."""

from typing import Any

import pytest
import timm
import torch
from timm.task import TokenDistillationTask
from torch import Tensor, nn
from torch.nn import functional as F

from modules.models.bert import BertClassifier
from modules.pretrained.timm import config_from_timm_model
from modules.pretrained.vit import TIMM
from tasks.bert.task import BertTask
from tasks.bert.teacher import TextTeacher
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.training.distillation import (
    TeacherConfig,
    TextTeacherConfig,
    cosine_loss,
    match_rows,
)
from tasks.vit.task import ViTTask
from tasks.vit.teacher import Found, ImageTeacher
from tests.helpers.tiny_models import BERT, close, random_tokens, tiny
from tests.parity.vit import our_vit, randomise

NAMES = [*"abcde"]
METADATA = {
    **external_targets("single_label_classification"),
    "class_names": NAMES,
    "channels": 3,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
}


def logits_pair() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)


def test_soft_loss_is_hintons_with_its_gradient() -> None:
    """dC/dz = T (q - p) / B: Hinton (2015), eq. 2, times T^2."""
    logits, taught = logits_pair()
    temperature = 2.5
    p, q = ((one / temperature).softmax(-1) for one in (taught, logits))
    zero = torch.zeros(())
    loss = TeacherConfig("it", alpha=1.0, temperature=temperature).add(zero, logits, taught)
    expected = temperature**2 * (p * (p.log() - q.log())).sum(-1).mean()
    close(loss, expected)
    loss.backward()
    assert logits.grad is not None
    close(logits.grad, temperature * (q - p) / len(logits))


def test_hard_loss_is_half_of_each_cross_entropy() -> None:
    logits, taught = logits_pair()
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    own = F.cross_entropy(logits, labels)
    loss = TeacherConfig("it", "hard").add(own, logits, taught)
    picked = -logits.log_softmax(-1)
    rows = range(len(labels))
    close(loss, (picked[rows, labels] + picked[rows, taught.argmax(-1)]).mean() / 2)


def test_the_labels_have_the_rest_of_alpha() -> None:
    logits, taught = logits_pair()
    own = torch.tensor(3.0)
    part = TeacherConfig("it", alpha=1.0).add(own, logits, taught)
    close(TeacherConfig("it", alpha=0.2).add(own, logits, taught), 0.8 * own + 0.2 * part)
    close(TeacherConfig("it", alpha=0.0).add(own, logits, taught), own)


def test_cosine_loss_is_distilberts() -> None:
    """`CosineEmbeddingLoss` of the tokens that are not padding, as in the authors' code."""
    hidden, taught = torch.randn(2, 3, 4, 7)
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True, False, False, False]])
    expected = nn.CosineEmbeddingLoss()(hidden[mask], taught[mask], torch.ones(7))
    close(cosine_loss(hidden, taught, mask), expected)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_step_of_an_image_task_is_timms(kind: Any) -> None:
    """Two heads, an own normalisation of the teacher; loss and gradients."""
    theirs = randomise(
        timm.create_model(
            "deit_tiny_distilled_patch16_224", depth=1, img_size=32, patch_size=8, num_classes=5
        )
    )
    config = config_from_timm_model(theirs)
    theirs.pretrained_cfg |= {"mean": METADATA["mean"], "std": METADATA["std"]}
    teacher = randomise(timm.create_model("test_vit", num_classes=5, img_size=32))
    teacher.pretrained_cfg |= {"mean": (0.3, 0.5, 0.6), "std": (0.7, 0.3, 0.2)}
    peer = TokenDistillationTask(
        theirs, teacher, nn.CrossEntropyLoss(), distill_type=kind, task_loss_weight=0.7,
        temperature=2.0, device=torch.device("cpu"), verbose=False,
    )  # fmt: skip
    task = ViTTask(teacher=TeacherConfig("it", kind, alpha=0.3, temperature=2.0))
    task.metadata = METADATA
    task.net = our_vit(theirs, config).requires_grad_()
    found = Found(teacher, [NAMES], 5, (3, 32, 32), [0.3, 0.5, 0.6], [0.7, 0.3, 0.2])
    task.teacher = ImageTeacher("it", found, METADATA)
    pixels, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 4])
    expected = peer.train()(pixels, labels)["loss"]
    _, loss = task.learn(pixels, labels)
    close(loss, expected)
    loss.backward()
    expected.backward()
    found_gradients = {name: p.grad for name, p in task.net.named_parameters()}
    ours = TIMM.weights_to_external(found_gradients, task.net.config)
    for name in ("head.weight", "head_dist.weight", "blocks.0.attn.qkv.weight"):
        close(ours[name], theirs.get_parameter(name).grad, atol=1e-4)
    assert all(p.grad is None for p in teacher.parameters())


def test_a_text_student_learns_probabilities_and_vectors() -> None:
    config = TextTeacherConfig("it", alpha=0.3, temperature=2.0, cosine=0.5)
    task = BertTask(teacher=config)
    task.metadata = {**METADATA, "class_names": [*"xyz"]}
    task.net, teacher = tiny("bert").train(), tiny("bert")
    task.teacher = TextTeacher(teacher, [2, 0, 1])
    tokens = random_tokens()
    mask = torch.arange(tokens.shape[1]) < torch.tensor([[16], [9], [3]])
    labels = torch.tensor([0, 1, 2])
    _, loss = task.learn(tokens, mask, labels)
    ours, theirs = task.net.encoder(tokens, mask), teacher.encoder(tokens, mask)
    logits, taught = task.net(tokens, mask), teacher(tokens, mask)[:, [2, 0, 1]]
    kl = F.kl_div((logits / 2).log_softmax(-1), (taught / 2).softmax(-1), reduction="batchmean")
    apart = 1 - F.cosine_similarity(ours[mask], theirs[mask], dim=-1).mean()
    close(loss, 0.7 * F.cross_entropy(logits, labels) + 0.3 * 4 * kl + 0.5 * apart)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in task.net.parameters() if p.requires_grad)
    assert isinstance(task.net, BertClassifier) and not teacher.training
    assert BERT.num_classes == 3


def test_a_teacher_is_in_no_part_of_the_task() -> None:
    task = ViTTask()
    before = task.state_dict().keys(), [*task.modules()]
    found = Found(nn.Flatten(), [], 5, (3, 32, 32), [0.5] * 3, [0.5] * 3)
    task.teacher = ImageTeacher("it", found, METADATA)
    assert (task.state_dict().keys(), [*task.modules()]) == before


def test_classes_are_found_by_any_of_their_names() -> None:
    synsets, words = ["n1", "n2", "n3"], ["cat", "dog", "hen"]
    assert match_rows("it", [synsets, words], 3, ["hen", "cat", "dog"]) == [2, 0, 1]
    assert match_rows("it", [synsets, words], 3, ["n2", "n1", "n3"]) == [1, 0, 2]
    assert match_rows("it", [], 3, words) is None
    for known, count in (([synsets], 3), ([words[:2]], 2), ([], 4)):
        with pytest.raises(UsageError, match=f"{count} classes and the data have 3"):
            match_rows("it", known, count, words)
    with pytest.raises(UsageError, match="'n1' of the teacher and 'cat' of the data"):
        match_rows("it", [synsets], 3, words)


@pytest.mark.parametrize(
    "options",
    [{"alpha": -0.1}, {"alpha": 1.5}, {"temperature": 0.0}, {"temperature": float("inf")}],
)
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"teacher.{next(iter(options))}"):
        TeacherConfig("it", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"teacher\.cosine"):
        TextTeacherConfig("it", cosine=-1.0)
    with pytest.raises(UsageError, match=r"teacher\.path"):
        TextTeacherConfig(cosine=1.0)
