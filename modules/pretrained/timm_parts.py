"""Whether a model of timm has no parts but those that ours has, too."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from modules.config import require
from modules.pretrained.weights import build_on_meta

# Attributes that do not change what a model computes.
IRRELEVANT = (
    "training",
    "weight_init_mode",
    "fix_init",
    "pretrained_cfg",
    "default_cfg",
    "pretrained_model_args",
    "mlp_ratio",  # of hidden widths, which are compared
    "target_shift_size",  # of windows, if the size of images changes
)


def check_parts(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless a model of timm's equals that of its class by `arguments`."""
    kind: Any = type(model)
    theirs = describe(model)
    plain = describe(build_on_meta(lambda: kind(**arguments)))
    for name in {**theirs, **plain}:
        had = theirs.get(name, "missing")
        wanted = plain.get(name, "nothing")
        require(
            had == wanted,
            f"{name.strip('.')} of timm's model is {had}; only {wanted} is supported.",
        )


def require_class(name: str, wanted: str, reason: str) -> None:
    """Raises `ValueError` if a class of timm's is not the one wanted."""
    require(name == wanted, f"timm's {name} {reason}.")


def describe(model: nn.Module) -> dict[str, Any]:
    """Returns the classes, attributes and shapes that make up a model."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path}."] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in vars(module).items():
            if not name.startswith("_") and name not in IRRELEVANT:
                found[f"{path}.{name}"] = value
    return found | {name: tuple(value.shape) for name, value in model.state_dict().items()}
