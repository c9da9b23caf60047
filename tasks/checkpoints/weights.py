"""Weights: files that others wrote, read without running code, and those of checkpoints; configurations that fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tasks.checkpoints.reading import check_finite, load_tensors
from tasks.cli.parsing import flat
from tasks.errors import DataError, UsageError

State = dict[str, Tensor]
Config = TypeVar("Config")


def read_weights(source: str, option: str = "--model.pretrained", meta: bool = False) -> State:
    """Tensors of a .safetensors file, or of a .pth or .bin file that holds nothing else.

    Args:
        source: The file.
        option: What named it.
        meta: Their names and shapes only, as tensors on the meta device; values are not checked.

    Raises:
        UsageError: no such file, or it holds objects other than tensors.
        DataError, RunError: it is truncated, of another format, or holds no weights; or one of them holds
            NaN or infinity, by name.
    """
    state = _tensors(source, option)
    if meta:
        return {name: value.to("meta") for name, value in state.items()}
    check_finite(state, f"{option} {source}")
    return state


def _tensors(source: str, option: str) -> State:
    """As `read_weights`, whatever the values."""
    path = regular(source, option)
    what, state = f"{option} {source}", dict[str, Any]()
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except Exception as error:  # safetensors has kinds of its own
            raise DataError(f"{what} is truncated or not a file of weights") from error
    else:
        state = load_tensors(path, what)
        for name in ("state_dict", "model"):  # where training scripts put the weights
            state = state.get(name, state) if isinstance(state, dict) else {}
    if not state or not all(
        isinstance(name, str) and _plain(value) for name, value in state.items()
    ):
        raise DataError(
            f"{what} holds no weights by name: give what `torch.save(model.state_dict(), FILE)` wrote"
        )
    for name, value in state.items():
        if value.is_floating_point() and value.element_size() == 1:
            raise UsageError(
                f"{what}: {name} is {value.dtype}: give weights that are not quantised"
            )
    return state


def _plain(value: Any) -> bool:
    """Whether this is a tensor that holds each of its values."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def regular(source: str, option: str) -> Path:
    """The path of a file; raises `UsageError` where there is none."""
    if not Path(source).is_file():
        raise UsageError(f"{option} {source}: no such file; give one, or timm/<model name>")
    return Path(source)


def read_header(source: str, option: str = "--model.pretrained") -> dict[str, str]:
    """What the header of a .safetensors file says beside its tensors; nothing for other files.

    Raises:
        UsageError, DataError: as `read_weights`.
    """
    path = regular(source, option)
    if path.suffix != ".safetensors":
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{option} {source} is truncated or not a file of weights") from error


def with_classes(
    source: str, state: State, names: Sequence[str] | None, wanted: Sequence[str] | None
) -> State:
    """Weights whose classifier, if there is one, has a row for each class of the data, in their order, or is left out.

    Args:
        source: Where the weights are from, for the sentence that says why the classifier is left out.
        state: Weights under our names.
        names: Of the classifier's rows; None: not known.
        wanted: Of the data's classes; None: they have no classes, and all weights are kept.
    """
    head = {name: value for name, value in state.items() if name.startswith("head.linear.")}
    if wanted is None or not head:
        return state
    names = names or []
    if set(names) == set(wanted) and all(
        len(value) == len(names) == len(wanted) for value in head.values()
    ):
        rows = torch.tensor([names.index(name) for name in wanted])
        return state | {name: value[rows] for name, value in head.items()}
    from pytorch_lightning.utilities import rank_zero_only

    known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "without names"
    rank_zero_only(print)(
        f"--model.pretrained {source}: its classes ({known}) are not those of the data, so the head starts anew"
    )
    return {name: value for name, value in state.items() if name not in head}


def load_weights(net: Any, weights: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Load `weights` saved with the configuration `saved`, all of them.

    Raises:
        UsageError: the network was asked for otherwise than it was saved; names the options that differ.
    """
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        asked, had = flat(asdict(net.config)), flat(dict(saved))
        differ = [
            f"--model.net.{k} {v} (checkpoint: {had.get(k)})"
            for k, v in asked.items()
            if had.get(k) != v
        ]
        reason = "; ".join(differ) or str(error).splitlines()[0]
        raise UsageError(f"these options do not fit the checkpoint's weights: {reason}") from error


def filled(config: Config, found: Mapping[str, Any]) -> Config:
    """A network's configuration with what the data decide filled in.

    Raises:
        UsageError: a number that was asked for contradicts the data.
    """
    for name, value in found.items():
        asked = getattr(config, name)
        if asked not in (None, value):
            raise UsageError(
                f"--model.net.{name} {asked} contradicts the data, which have {value}: leave it out"
            )
    return replace(config, **found)  # type: ignore[type-var]
