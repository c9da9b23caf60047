"""Weights of other libraries: names translated both ways, and everything checked to fit."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from modules.config import require

State = dict[str, Tensor]
# Our name -> theirs. Several of their tensors are rows of ours, one below the other.
Layers = dict[str, str | tuple[str, ...]]
Names = dict[str, tuple[str, ...]]
Built = TypeVar("Built")
CLASSIFIERS = ("head.linear.", "distillation_head.linear.")  # layers with a row for each class
BUILD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError),
    *(LookupError, RuntimeError, TypeError),
)


def weight_names(layers: Layers, depth: int, tensors: Mapping[str, str] | None = None) -> Names:
    """Returns the names of all weights, ours -> theirs; arguments as in `Family`."""
    pairs: Names = {}
    for ours, theirs in layers.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        for end in (".weight", ".bias"):
            pairs[ours + end] = tuple(part + end for part in parts)
    pairs |= {ours: (name,) for ours, name in (tensors or {}).items()}
    names: Names = {}
    for ours, parts in pairs.items():
        for i in range(depth if "{i}" in ours else 1):
            names[ours.replace("{i}", str(i))] = tuple(
                part.replace("{i}", str(i)) for part in parts
            )
    return names


def from_external(names: Names, rest: State, convert: Callable[[str, Tensor], Tensor]) -> State:
    """Returns our weights made of theirs, and removes those that it uses from `rest`.

    `convert` turns one of their weights into ours, given our name; what it does not change is
    shared, not copied. Raises `ValueError` if a part of one of our weights is missing, is not of
    floating point, or has a shape that no such model has; by name.
    """
    state: State = {}
    for name, parts in names.items():
        missing = [part for part in parts if part not in rest]
        if len(missing) == len(parts):
            continue
        require(
            not missing, f"{', '.join(missing)} is missing, but the rest of the layer is there."
        )
        found = [rest.pop(part) for part in parts]
        for part, value in zip(parts, found, strict=True):
            floats = value.is_floating_point()
            require(floats, f"{part} holds {value.dtype}, not floating-point numbers.")
        try:
            state[name] = convert(name, torch.cat(found) if len(found) > 1 else found[0])
        except (IndexError, RuntimeError) as error:
            shapes = " and ".join(str(tuple(value.shape)) for value in found)
            raise ValueError(f"{', '.join(parts)} cannot have the shape {shapes}.") from error
    return state


def to_external(names: Names, rest: State, qkv_rows: Sequence[int] | None = None) -> State:
    """Returns copies of our weights under their names, and removes those that it uses from `rest`.

    `qkv_rows` are those of queries, keys and values in one of ours; None: equally many.
    """
    state: State = {}
    for ours, parts in names.items():
        if ours not in rest:
            continue
        value = rest.pop(ours)
        if len(parts) == 1 or qkv_rows is None:
            split = value.chunk(len(parts))
        else:
            split = value.split(list(qkv_rows))
        for part, rows in zip(parts, split, strict=True):
            state[part] = rows.clone(memory_format=torch.contiguous_format)
    return state


def drop_copies(copies: Mapping[str, str], rest: State) -> None:
    """Removes tied weights: their name of a copy -> that of the original, which may be missing.

    Raises `ValueError` if they differ.
    """
    for copy, original in copies.items():
        if copy in rest:
            value = rest.pop(copy)
            other = rest.setdefault(original, value)
            tied = other.shape == value.shape and torch.equal(other, value.to(other))
            require(
                tied,
                f"{copy} is not {original}, but the config says that they are tied "
                "(tie_word_embeddings).",
            )


def drop_other_classifier(state: State, num_classes: int | None) -> State:
    """Returns weights under our names without a classifier for another number of classes."""
    bias = state.get("head.linear.bias")
    if bias is not None and bias.shape == (num_classes,):
        return state
    return {name: value for name, value in state.items() if not name.startswith(CLASSIFIERS)}


def build_on_meta(build: Callable[[], Built]) -> Built:
    """Builds networks without memory for their weights; `ValueError` if sizes fit no tensor."""
    try:
        with torch.device("meta"):
            return build()
    except BUILD_ERRORS as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"The config describes no network ({reason}).") from error


def load_weights(net: nn.Module, state: State, optional: tuple[str, ...] = ()) -> list[str]:
    """Loads weights under our names; returns the names of those that stay as initialised.

    These begin with a prefix in `optional`. Raises `ValueError` if another weight is missing,
    unexpected or of another shape; by name.
    """
    wanted = net.state_dict()
    fitting = {
        name: value
        for name, value in state.items()
        if not name.startswith(optional) or (name in wanted and wanted[name].shape == value.shape)
    }
    check_fit("pretrained", fitting, {}, wanted, optional)
    net.load_state_dict(fitting, strict=False)
    return [name for name in wanted if name not in fitting]


def check_fit(
    family: str, state: State, rest: State, wanted: Mapping[str, Tensor], optional: tuple[str, ...]
) -> None:
    """Raises `ValueError` if weights are unexpected, missing or of another shape; by name.

    Args:
        family: Name of the family, for messages.
        state: Weights under our names.
        rest: Their weights that have no name here.
        wanted: The network's `state_dict()`; only names and shapes count.
        optional: Prefixes of names that may be missing or of another shape.
    """
    unknown = ", ".join(sorted(rest)[:3])
    require(not rest, f"{family} weights that this model has no place for: {unknown}.")
    missing = [name for name in wanted if name not in state and not name.startswith(optional)]
    lacking = ", ".join(missing[:3])
    require(not missing, f"{family} weights lack {lacking}, which the config has.")
    extra = [name for name in state if name not in wanted]
    require(not extra, f"The config has no {', '.join(extra[:3])}, but the {family} weights do.")
    for name, value in state.items():
        had = tuple(value.shape)
        shape = tuple(wanted[name].shape)
        fits = had == shape or name.startswith(optional)
        require(fits, f"{name} is {had} in the {family} weights, but {shape} by the config.")
