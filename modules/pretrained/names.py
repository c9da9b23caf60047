"""What all tables of names share: reading them both ways, and sentences for what does not fit."""

import torch
from torch import Tensor

from modules.config import require

State = dict[str, Tensor]
Layers = dict[str, str | tuple[str, ...]]  # ours -> theirs; several names stand for rows one below the other
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
            pairs[ours + end] = tuple(name + end for name in ([theirs] if isinstance(theirs, str) else theirs))
    pairs |= {ours: (theirs,) for ours, theirs in (raw or {}).items()}
    return {
        ours.replace("{i}", str(i)): tuple(name.replace("{i}", str(i)) for name in theirs)
        for ours, theirs in pairs.items()
        for i in range(depth if "{i}" in ours else 1)
    }


def take(names: Names, rest: State) -> State:
    """Our weights out of theirs; what is used leaves `rest`."""
    return {
        ours: torch.cat([rest.pop(part) for part in theirs])
        for ours, theirs in names.items()
        if all(part in rest for part in theirs)
    }


def give(names: Names, rest: State) -> State:
    """Their weights out of ours; what is used leaves `rest`."""
    return {
        part: rows.clone()
        for ours, theirs in names.items()
        if ours in rest
        for part, rows in zip(theirs, rest.pop(ours).chunk(len(theirs)), strict=True)
    }


def check_fit(family: str, ours: State, rest: State, wanted: State, optional: tuple[str, ...]) -> None:
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
    require(not rest, f"{family} weights that this model has no place for: {', '.join(sorted(rest)[:3])}.")
    missing = [name for name in wanted if name not in ours and not name.startswith(optional)]
    require(not missing, f"{family} weights lack {', '.join(missing[:3])}; is the config that of the same model?")
    extra = [name for name in ours if name not in wanted]
    require(not extra, f"The config has no {', '.join(extra[:3])}, but the {family} weights do.")
    for name, value in ours.items():
        shape = tuple(wanted[name].shape)
        fits = tuple(value.shape) == shape or name.startswith(optional)
        require(fits, f"{name} is {tuple(value.shape)} in the {family} weights, but {shape} by the config.")
