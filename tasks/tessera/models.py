"""What the models of all tasks share in Python, and what their methods return."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from datamodules.utils.errors import UsageError
from modules.activations import Change, ablation, changed, recorded
from modules.generation.sampling import GenerationConfig
from modules.record import AttentionRecord
from modules.schema import check_value
from tasks.errors import unknown_name, usage_errors
from tasks.predictions import AnyPrediction, Number
from tasks.problems import PROBLEMS, Problem

Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=GenerationConfig)
Texts = str | Iterable[str]  # one text, or a list or a column of a table of texts
# From tokens and padding mask, both (B, N), to B results.
Run = Callable[[Tensor, Tensor], Sequence[Result]]
PACKAGES = ("tessera", "tasks", "torch")  # between a user's line and a warning
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
        self.num_parameters = sum(p.numel() for p in net.parameters())  # before they are packed
        self.metadata = metadata
        self.source = source

    def __repr__(self) -> str:
        count = f"{self.num_parameters:,} parameters"
        return f"{type(self).__name__}({self.source!r}, {count}, {self.device})"

    if not TYPE_CHECKING:  # type checkers see the methods that there are

        def __getattr__(self, name: str) -> Any:
            """Says what a model of this kind has instead."""
            kind = type(self)
            if hasattr(kind, name):  # a property that raised an AttributeError of its own
                return object.__getattribute__(self, name)
            public = [one for one in dir(kind) if not one.startswith("_")]
            methods = ", ".join(one for one in public if callable(getattr(kind, one)))
            text = f"{kind.__name__} has no {name!r}; its methods are {methods}"
            raise AttributeError(text, name=name, obj=self)

    @property
    def device(self) -> torch.device:
        """Where the weights are and inputs are moved to."""
        return next(self.net.parameters()).device

    def logits(self, *inputs: Any) -> Tensor:
        """The outputs of the network for one input."""
        raise NotImplementedError

    def activations(self, *inputs: Any, names: str | Sequence[str] = "*") -> dict[str, Tensor]:
        """Activations for one input by name, such as "blocks.2.attention.heads".

        `modules.activations.activation_names(model.net)` lists all names. Weights are (H, N, M),
        heads (N, H, D), logits as of `logits`, and all others (N, E).

        Args:
            inputs: As of `logits`.
            names: Names or patterns such as "blocks.*.attention.weights".

        Raises:
            UsageError: There is no such activation.
        """
        patterns = [names] if isinstance(names, str) else names
        with usage_errors(), recorded(self.net, *patterns) as found:
            self.logits(*inputs)
        return {name: value[0].float().cpu() for name, value in found.items()}

    @contextmanager
    def intervene(self, changes: Mapping[str, Change]) -> Iterator[None]:
        """Changes activations inside a `with`, for all methods.

        >>> with model.intervene({"blocks.0.attention": lambda x: 0 * x}):
        ...     changed = model.logits("The text")

        Args:
            changes: By name or pattern, a function from an activation, batch first, to what takes
                its place, such as `modules.activations.patch`.

        Raises:
            UsageError: There is no such activation.
        """
        with ExitStack() as stack:
            with usage_errors():
                stack.enter_context(changed(self.net, changes))
            yield

    @contextmanager
    def ablate(self, layer: int, head: int | None = None, part: str = "") -> Iterator[None]:
        """Takes a head, or a whole block with its norms, out of the network inside a `with`.

        Args:
            layer: Number of the block, from 0.
            head: Number of the head, from 0; None: the whole block, or of "cross" its
                cross-attention.
            part: "encoder", "decoder" or "cross" of an encoder-decoder, "stages.0" of a Swin.

        Raises:
            UsageError: There is no such block or head.
        """
        with usage_errors():
            changes = ablation(self.net, layer, head, part)
        with self.intervene(changes):
            yield

    @torch.no_grad()
    def run_batches(
        self, rows: Sequence[Sequence[int]], batch_size: int, run: Run[Result]
    ) -> list[Result]:
        """`run` on batches of token ids of similar length; results are in the order of the rows."""
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        results: dict[int, Result] = {}
        for part in split_into_batches(order, batch_size):
            tensors = [torch.tensor(rows[index]) for index in part]
            pad_id = self.metadata.get("source_padding", self.metadata.get("pad_id", 0))
            tokens = pad_sequence(tensors, batch_first=True, padding_value=pad_id)  # (B, N)
            lengths = torch.tensor([len(tensor) for tensor in tensors])  # (B,)
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]  # (N,), (B, 1) -> (B, N)
            results |= zip(part, run(tokens.to(self.device), mask.to(self.device)), strict=True)
        return [results[index] for index in range(len(rows))]


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

    def to_predictions(self, logits: Tensor, top_k: int | None) -> list[AnyPrediction]:
        """What outputs (B, K) of the network mean; `top_k` as in `predict`."""
        rows = self.problem.predictions(logits.float()).cpu()  # (B, K)
        found = [self.problem.prediction(row) for row in rows]
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

    def run_checked(texts: list[Any]) -> Sequence[Result]:
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{number}] is of type {type(text).__name__}, not a string")
            check_utf8(text, f"texts[{number}]")
        return run(texts) if texts else []

    return one_or_many(inputs, isinstance(inputs, str), run_checked)


def check_single(is_one: bool, given: Any, noun: str) -> None:
    """Raises `TypeError` if a method of one input is given a list, or something else."""
    if not is_one:
        raise TypeError(
            f"this method takes one {noun} at a time, but this is of type {type(given).__name__}: "
            "call it for each"
        )
    if isinstance(given, str):
        check_utf8(given, f"the {noun}")


def check_utf8(text: str, what: str) -> None:
    """Raises `UsageError` if a text has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8: {ascii(text)[:80]}") from error


def stack_rows(vectors: Tensor | list[Tensor]) -> Tensor:
    """The vector (E,) of one input, or those of S inputs, (S, E); (0, 0) of none."""
    if isinstance(vectors, Tensor):
        return vectors
    return torch.stack(vectors) if vectors else torch.empty(0, 0)


def generation_options(
    kind: type[Asked], options: Mapping[str, Any], *more: str, **others: Any
) -> Asked:
    """The options of a user, with `others` that the user does not give.

    Raises `UsageError` if one is neither of `GenerationConfig` nor in `more`, or has a wrong value.
    """
    known = [*(field.name for field in fields(GenerationConfig)), *more]
    for name in options:
        if name not in known:
            hint = HUGGING_FACE_NAMES.get(name)
            raise UsageError(
                f"did you mean {hint} instead of {name}?"
                if hint
                else unknown_name(name, known, "option")
            )
    types = get_type_hints(kind)
    with usage_errors():
        values = {name: check_value(types[name], value, name) for name, value in options.items()}
        return kind(**values, **others)


def warn(message: str) -> None:
    """Warns at the user's line that called a method, however deep this call is below it."""
    frame = inspect.currentframe()
    level = 1
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] in PACKAGES:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def split_into_batches(rows: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
    """Consecutive parts of at most `batch_size` rows; `UsageError` if it is below 1."""
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, but must be at least 1.")
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def no_attention() -> UsageError:
    """Returns the error of a network without attention between all tokens."""
    return UsageError(
        "this network has no attention between all tokens, as it is a Swin or its stack.order is "
        '"mixer": `activations` returns what is inside, and `attention` the weights of a Swin'
    )


def recorded_weights(record: AttentionRecord) -> Tensor:
    """Self-attention weights of one input: L tensors (1, H, N, N) -> (L, H, N, N)."""
    if not record.self_attn:
        raise no_attention()
    return torch.cat(record.self_attn).float().cpu()
