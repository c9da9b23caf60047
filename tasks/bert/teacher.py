"""Teachers of text classifiers: encoders of ours and of Hugging Face."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datamodules.tokenizers import Tokenizer
from modules.models.bert import BertClassifier, BertConfig
from modules.pretrained.bert import FAMILIES
from tasks.bert.architectures import with_weights
from tasks.checkpoints.pretrained import ModelFolder, read_task_checkpoint, tokenizer_file
from tasks.checkpoints.reading import KEY, best_checkpoint, load_network
from tasks.errors import UsageError
from tasks.training.distillation import TEACHER, Teacher, check_problem, match_rows


class TextTeacher(Teacher):
    """A `BertClassifier` that reads the tokens of the student."""

    net: BertClassifier

    @torch.no_grad()
    def outputs(self, tokens: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, N) -> vectors of its encoder (B, N, E), and logits (B, K)."""
        hidden = self.net.encoder(tokens, padding_mask)
        return hidden, self.in_order(self.net.classify(hidden, padding_mask))


def load_teacher(source: str, metadata: Mapping[str, Any], width: int | None) -> TextTeacher:
    """Loads a teacher.

    Args:
        source: See `TeacherConfig.path`.
        metadata: Of the student's data.
        width: Of the vectors that the student learns from it; None: it learns none.

    Raises:
        UsageError: There is no such model, or it is of another task, or has another tokenizer,
            other classes, another width or fewer positions; or its file holds code.
        DataError: It cannot be downloaded.
    """
    path = best_checkpoint(source)
    if path.endswith(".ckpt"):
        checkpoint = read_task_checkpoint(path, ("bert",), TEACHER)
        net = load_network(checkpoint, BertConfig, BertClassifier)
        own = checkpoint[KEY]["metadata"]
    else:
        found, own = with_weights(ModelFolder(source, FAMILIES, TEACHER))
        if not isinstance(found, BertClassifier):
            raise UsageError(
                f"{TEACHER} {source} is a masked language model: give a model that was trained to "
                "classify"
            )
        net = found
    check_problem(source, own)
    check_inputs(source, net.config, own, metadata)
    if width not in (None, net.config.stack.width):
        raise UsageError(
            f"--model.teacher.cosine compares vectors of {width} numbers with those of {source}, "
            f"which have {net.config.stack.width}: leave it out, or give the student that "
            "--model.net.stack.width"
        )
    names = own["class_names"]
    return TextTeacher(net, match_rows(source, [names], len(names), metadata["class_names"]))


def check_inputs(
    source: str, config: BertConfig, own: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Refuses a teacher of `own` metadata that cannot read the tokens of the student's data."""
    tokenizer = Tokenizer.from_json(own["tokenizer"])
    other = Tokenizer.from_json(metadata["tokenizer"])
    if tokenizer.digest != other.digest:
        raise UsageError(
            f"{TEACHER} {source} has another tokenizer ({tokenizer.vocab_size} tokens) than the "
            f"data ({other.vocab_size}): train the student with that of the teacher, "
            f"--data.tokenizer.file {tokenizer_file(best_checkpoint(source), own['tokenizer'])}"
        )
    length = metadata["max_length"]
    if config.position == "learned" and length > config.max_length:
        raise UsageError(
            f"--data.max_length {length} exceeds the {config.max_length} tokens that {TEACHER} "
            f"{source} reads: lower it"
        )
