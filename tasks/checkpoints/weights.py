"""Files of weights, read without running code, and weights and configs fitted to the data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn

from datamodules.utils.files import parse_object
from modules.pretrained.weights import CLASSIFIERS, load_weights
from tasks.checkpoints.reading import (
    KEY,
    VERSION,
    Checkpoint,
    check_finite,
    check_version,
    load_tensors,
)
from tasks.errors import DataError, UsageError, usage_errors
from tasks.options import flat

State = dict[str, Tensor]
Config = TypeVar("Config")
PRETRAINED = "--model.pretrained"


def read_weights(source: str, option: str = PRETRAINED) -> State:
    """Returns the tensors of a .safetensors file, or of a .pth or .bin file of tensors only.

    Raises:
        UsageError: There is no such file, or it holds other objects or quantised weights.
        DataError, RunError: It is truncated, of another format, holds no weights, or one is not
            finite.
    """
    path = check_file(source, option)
    what = f"{option} {source}"
    state: Any = {}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except Exception as error:  # safetensors raises its own kinds
            raise DataError(f"{what} is truncated or not a file of weights") from error
    else:
        state = load_tensors(path, what)
        for name in ("state_dict", "model"):  # where training scripts put the weights
            state = state.get(name, state) if isinstance(state, dict) else {}
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(f"{what} holds no weights: give what torch.save(model.state_dict()) wrote")
    for name, value in state.items():
        if value.is_quantized or (value.is_floating_point() and value.element_size() == 1):
            raise UsageError(f"{what}: {name} is {value.dtype}: give unquantised weights")
    check_finite(state, what)
    return state


def check_file(source: str, option: str) -> Path:
    """Returns the path of a file; raises `UsageError` if there is none."""
    if not Path(source).is_file():
        hint = "timm/<model name> for timm's weights"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            hint = f"hf/{source} for a model of the hub"
        elif re.fullmatch(r"[\w.]+", source):
            hint = f"timm/{source} for timm's weights"
        raise UsageError(f"{option} {source}: no such file; give one, or {hint}")
    return Path(source)


def read_header(source: str, option: str = PRETRAINED) -> dict[str, str]:
    """Returns the metadata in the header of a .safetensors file; {} for other files."""
    path = check_file(source, option)
    if path.suffix != ".safetensors":
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{option} {source} is truncated or not a file of weights") from error


def read_exported(source: str, option: str = PRETRAINED) -> Checkpoint:
    """Returns what `export --format safetensors` wrote, as a checkpoint without options of a run.

    Raises as `read_weights`, and `UsageError` if its header is damaged or of another version.
    """
    header = read_header(source, option)
    what = f"{option} {source}"
    check_version(header.get("version"), str(VERSION), what)
    with usage_errors(f"{what}: its header"):
        entry = {
            "task": header["task"],
            "metadata": parse_object(header.get("metadata", "")),
            "net": parse_object(header.get("config", "")),
            "config": {"model": {}, "data": {}},
        }
    state = {f"net.{name}": value for name, value in read_weights(source, option).items()}
    return {KEY: entry, "state_dict": state}


def match_classes(
    source: str, state: State, names: Sequence[str] | None, metadata: Mapping[str, Any]
) -> State:
    """Returns weights whose classifier has the classes of the data, in order, or is left out.

    The head of a regression is left out, too: its unit is that of other data.

    Args:
        source: Where the weights come from, for a message if the classifier is left out.
        state: Weights under our names.
        names: Class of each row of the classifier; None: not known.
        metadata: Of the data; without `class_names`, all weights are kept.
    """
    wanted = metadata.get("class_names")
    head = {name: value for name, value in state.items() if name.startswith(CLASSIFIERS)}
    if wanted is None or not head:
        return state
    if metadata["problem_type"] == "regression":
        rank_zero_only(print)(
            f"{PRETRAINED} {source}: the head is initialised anew for the numbers"
        )
        return {name: value for name, value in state.items() if name not in head}
    names = names or []
    complete = all(len(value) == len(names) == len(wanted) for value in head.values())
    if complete and set(names) == set(wanted):
        rows = torch.tensor([names.index(name) for name in wanted])
        return state | {name: value[rows] for name, value in head.items()}
    known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "without names"
    rank_zero_only(print)(
        f"{PRETRAINED} {source}: the head is initialised anew for other classes than its own "
        f"({known})"
    )
    return {name: value for name, value in state.items() if name not in head}


def load_checkpoint_weights(
    net: Any, weights: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> None:
    """Loads `weights` that were saved with the config `saved`; an error names differing options."""
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        saved_options = flat(dict(saved))
        differ = [
            f"--model.net.{name} {value} (checkpoint: {saved_options.get(name)})"
            for name, value in flat(asdict(net.config)).items()
            if saved_options.get(name) != value
        ]
        reason = "; ".join(differ) or str(error).splitlines()[0]
        raise UsageError(f"these options do not fit the checkpoint's weights: {reason}") from error


def load_pretrained_weights(
    net: nn.Module, source: str, state: State, optional: tuple[str, ...] = ()
) -> list[str]:
    """As `load_weights`; a `UsageError` says which options may contradict the weights.

    Args:
        net: The network.
        source: See `--model.pretrained`.
        state: Weights under our names.
        optional: Prefixes of names that may be missing or of another shape.
    """
    try:
        return load_weights(net, state, optional)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise UsageError(
            f"{PRETRAINED} {source}: {reason}: leave out --preset and the options of --model.net "
            "that contradict the weights"
        ) from error


def fill_config(config: Config, sizes: Mapping[str, Any]) -> Config:
    """Returns a config with the sizes of the data; raises `UsageError` if it has other sizes."""
    for name, value in sizes.items():
        asked = getattr(config, name)
        if asked not in (None, value):
            raise UsageError(
                f"--model.net.{name} {asked}: the data have {value}: leave it out, or in Python "
                f"use replace(config, {name}=None)"
            )
    return replace(config, **sizes)  # type: ignore[type-var]
