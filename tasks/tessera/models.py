"""What the models of all tasks share in Python, and what their methods return."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from datamodules.utils.errors import UsageError
from modules.generation.sampling import GenerationConfig
from modules.record import AttentionRecord
from tasks.errors import unknown_name
from tasks.predictions import AnyPrediction, Number
from tasks.problems import PROBLEMS, Problem

Result = TypeVar("Result")
Texts = str | Iterable[str]  # one text, or a list or a column of a table of texts
HUGGING_FACE_NAMES = {  # of options of generation, and ours
    "num_beams": "beams",
    "max_length": "max_new_tokens",
    "do_sample": "temperature",
    "stop_strings": "stop",
}


class Attention(NamedTuple):
    """Attention weights of one input.

    Args:
        weights: (L, H, N, M): of each layer and head, from N queries to M keys; rows sum to 1.
        queries: N labels.
        keys: M labels.
    """

    weights: Tensor
    queries: list[str]
    keys: list[str]


class Model:
    """A trained model.

    Args:
        net: The network, a plain `nn.Module`.
        metadata: What the training told about the data: class names, tokenizer, image size, ...
        source: Where the weights come from.
    """

    def __init__(self, net: nn.Module, metadata: dict[str, Any], source: str) -> None:
        self.net: Any = net.eval()
        self.metadata = metadata
        self.source = source

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.net.parameters())
        return f"{type(self).__name__}({self.source!r}, {count:,} parameters, {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the weights are and inputs are moved to."""
        return next(self.net.parameters()).device


class Classifier(Model):
    """A model that predicts classes, labels or numbers."""

    @property
    def class_names(self) -> list[str]:
        """Names of the K classes, in the order of the logits."""
        return list(self.metadata["class_names"])

    @cached_property
    def problem(self) -> Problem:
        """What the outputs of the network mean."""
        return PROBLEMS[self.metadata["problem_type"]](self.metadata)

    def predict(self, inputs: Any, /, batch_size: int = 64, top_k: int | None = None) -> Any:
        """What is predicted for an input, or a list of that for several."""
        raise NotImplementedError

    def predicted(self, logits: Tensor, top_k: int | None) -> list[AnyPrediction]:
        """What outputs (B, K) of the network mean; `top_k` as of `predict`."""
        found = [self.problem.prediction(row) for row in self.problem.predictions(logits.float())]
        if top_k is None:
            return found
        self.problem.check_top_k(top_k)
        return [
            one if isinstance(one, Number) else replace(one, probabilities=dict(one.top(top_k)))
            for one in found
        ]


def one_or_many(
    inputs: Any, is_one: bool, run: Callable[[list[Any]], Sequence[Result]]
) -> Result | list[Result]:
    """What `run` makes of a list of inputs; without the list around it for a single input.

    Raises `TypeError` if `inputs` is neither.
    """
    if is_one:
        return run([inputs])[0]
    if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):
        raise TypeError(f"{type(inputs).__name__} is a table: give one of its columns")
    if not isinstance(inputs, Iterable):
        raise TypeError(f"{type(inputs).__name__} is neither an input nor a list of inputs")
    return list(run(list(inputs)))


def texts_of(inputs: Any, run: Callable[[list[str]], Sequence[Result]]) -> Result | list[Result]:
    """`one_or_many` of texts: a string, or a list or a column of a table of strings."""

    def checked(texts: list[Any]) -> Sequence[Result]:
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"text {number} is of type {type(text).__name__}, not a string")
        return run(texts) if texts else []

    return one_or_many(inputs, isinstance(inputs, str), checked)


def check_single(is_one: bool, given: Any, noun: str) -> None:
    """Raises `TypeError` if a method of one input is given a list, or something else."""
    if not is_one:
        raise TypeError(
            f"this method takes one {noun} at a time, but this is of type {type(given).__name__}: "
            "call it for each"
        )


def stacked(vectors: Tensor | list[Tensor]) -> Tensor:
    """The vector (E,) of one input, or those of S inputs, (S, E); (0, 0) of none."""
    if isinstance(vectors, Tensor):
        return vectors
    return torch.stack(vectors) if vectors else torch.empty(0, 0)


def generation_options(options: Mapping[str, Any], *more: str) -> list[str]:
    """Names of given options as the command line has them.

    Raises `UsageError` if one is neither of `GenerationConfig` nor in `more`.
    """
    known = {field.name for field in fields(GenerationConfig)} | set(more)
    for name in options:
        if name not in known:
            hint = HUGGING_FACE_NAMES.get(name)
            raise UsageError(
                f"did you mean {hint} instead of {name}?"
                if hint
                else unknown_name(name, known, "option")
            )
    return [f"--{name}" for name in options]


def batched(rows: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
    """Consecutive parts of at most `batch_size` rows; `UsageError` if it is below 1."""
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, but must be at least 1.")
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def recorded_weights(record: AttentionRecord) -> Tensor:
    """Self-attention weights of one input: L tensors (1, H, N, N) -> (L, H, N, N)."""
    return torch.cat(record.self_attn).float().cpu()
