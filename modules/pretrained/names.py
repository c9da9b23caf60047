"""What all tables of names share: reading them both ways, and sentences for what does not fit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from modules.config import require

State = dict[str, Tensor]
Layers = dict[
    str, str | tuple[str, ...]
]  # ours -> theirs; several names stand for rows one below the other
Names = dict[str, tuple[str, ...]]


def full_names(layers: Layers, depth: int, raw: dict[str, str] | None = None) -> Names:
    """Names of all weights, ours -> theirs.

    Args:
        layers: Names of layers, without ".weight" / ".bias"; "{i}" stands for the number of a block.
        depth: Number of blocks.
        raw: Full names of weights that do not end alike on both sides.
    """
    pairs: Names = {}
    for ours, theirs in layers.items():
        for end in (".weight", ".bias"):
            pairs[ours + end] = tuple(
                name + end for name in ([theirs] if isinstance(theirs, str) else theirs)
            )
    pairs |= {ours: (theirs,) for ours, theirs in (raw or {}).items()}
    return {
        ours.replace("{i}", str(i)): tuple(name.replace("{i}", str(i)) for name in theirs)
        for ours, theirs in pairs.items()
        for i in range(depth if "{i}" in ours else 1)
    }


def unchanged(name: str, value: Tensor) -> Tensor:
    """A weight as it is."""
    return value


def take(names: Names, rest: State, change: Callable[[str, Tensor], Tensor] = unchanged) -> State:
    """Our weights out of theirs; what is used leaves `rest`.

    Args:
        names: Ours -> theirs.
        rest: Their weights.
        change: Makes a weight of theirs, under our name, one of ours. What it leaves as it is, is shared,
            not copied.

    Raises:
        ValueError: Of several that stand for one of ours, some are missing, or one is of another type or of a
            shape that no such model has; by name.
    """
    ours: State = {}
    for name, parts in names.items():
        missing = [part for part in parts if part not in rest]
        if len(missing) < len(parts):
            require(not missing, f"{', '.join(missing)} is missing, though not all of that layer.")
            found = [rest.pop(part) for part in parts]
            for part, value in zip(parts, found, strict=True):
                require(
                    value.is_floating_point(),
                    f"{part} holds {value.dtype}, not floating-point numbers.",
                )
            try:
                ours[name] = change(name, torch.cat(found) if len(found) > 1 else found[0])
            except (IndexError, RuntimeError) as error:
                shapes = " and ".join(str(tuple(value.shape)) for value in found)
                raise ValueError(f"{', '.join(parts)} cannot have the shape {shapes}.") from error
    return ours


def give(names: Names, rest: State, rows: Sequence[int] | None = None) -> State:
    """Their weights out of ours, copied; what is used leaves `rest`.

    Args:
        names: Ours -> theirs.
        rest: Weights under our names.
        rows: Rows of each, where several of theirs stand for one of ours; None: each has as many.
    """
    theirs: State = {}
    for ours, parts in names.items():
        if ours in rest:
            value = rest.pop(ours)
            split = (
                value.chunk(len(parts))
                if len(parts) == 1 or rows is None
                else value.split(list(rows))
            )
            copies = (part.clone(memory_format=torch.contiguous_format) for part in split)
            theirs |= dict(zip(parts, copies, strict=True))
    return theirs


def drop_copies(copies: dict[str, str], rest: State, reason: str) -> None:
    """Drops weights of theirs that repeat another one.

    Args:
        copies: Name of a copy -> name of the original, which may be missing beside it.
        rest: Weights under their names.
        reason: Why they must be the same.

    Raises:
        ValueError: They differ.
    """
    for copy, original in copies.items():
        if copy in rest:
            value = rest.pop(copy)
            other = rest.setdefault(original, value)
            tied = other.shape == value.shape and (
                value.is_meta or torch.equal(other, value.to(other))
            )
            require(tied, f"{copy} is not {original}: {reason}.")


def check_given(family: str, rest: State) -> None:
    """Raises `ValueError` where weights of ours are left over, by name."""
    require(
        not rest,
        f"{family} has no place for {', '.join(sorted(rest)[:3])}; build the model without it.",
    )


def load_fitting(net: nn.Module, state: State, optional: tuple[str, ...] = ()) -> list[str]:
    """Puts weights under our names into a model.

    Args:
        net: The model.
        state: Weights under our names.
        optional: Beginnings of names that may be missing, too many or of other shapes.

    Returns:
        Names of the weights that keep their start values, all of them optional.

    Raises:
        ValueError: Other weights that are missing, left over or of another shape, by name.
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


def state_of(*builds: Callable[[], nn.Module]) -> State:
    """The `state_dict()` of models together, for its names and shapes: without memory, on the meta device.

    Raises:
        ValueError: Their sizes are beyond what any tensor can have.
    """
    state: State = {}
    try:
        with torch.device("meta"):
            for build in builds:
                state |= build().state_dict()
    except (OverflowError, RuntimeError, TypeError) as error:
        raise ValueError("The sizes in the config are beyond those of any model.") from error
    return state


def check_fit(
    family: str, ours: State, rest: State, wanted: State, optional: tuple[str, ...]
) -> None:
    """Compares converted weights with those that the model has.

    Args:
        family: Name of the table.
        ours: Weights under our names.
        rest: Weights that no name stands for.
        wanted: Our model's `state_dict()`, for its names and shapes.
        optional: Beginnings of names that may be missing or of other shapes.

    Raises:
        ValueError: Names that are left over, missing or of another shape.
    """
    require(
        not rest,
        f"{family} weights that this model has no place for: {', '.join(sorted(rest)[:3])}.",
    )
    missing = [name for name in wanted if name not in ours and not name.startswith(optional)]
    require(
        not missing,
        f"{family} weights lack {', '.join(missing[:3])}; is the config that of the same model?",
    )
    extra = [name for name in ours if name not in wanted]
    require(not extra, f"The config has no {', '.join(extra[:3])}, but the {family} weights do.")
    for name, value in ours.items():
        shape = tuple(wanted[name].shape)
        fits = tuple(value.shape) == shape or name.startswith(optional)
        require(
            fits,
            f"{name} is {tuple(value.shape)} in the {family} weights, but {shape} by the config.",
        )
