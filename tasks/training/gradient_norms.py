"""Norms of the gradients of an optimizer step, of all weights together and by layer."""

import re
from typing import Any

from torch import Tensor, nn

from tasks.training.precision import total_norm


def logged_norms(net: nn.Module, norm: Tensor, by_layer: bool) -> dict[str, Tensor]:
    """What is logged of a step's gradients, () each.

    Args:
        net: The network, with gradients.
        norm: That of all gradients together.
        by_layer: Also `grad_norm/LAYER` for each layer with gradients, as `layer_of` names it. The
            sum of their squares is that of `train/grad_norm`.
    """
    norms: dict[str, Any] = {"train/grad_norm": norm}
    if by_layer:
        gradients: dict[str, list[Tensor]] = {}
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(layer_of(name), []).append(parameter.grad)
        norms |= {f"grad_norm/{layer}": total_norm(found) for layer, found in gradients.items()}
    return {name: unsharded(value) for name, value in norms.items()}


def layer_of(parameter: str) -> str:
    """The layer of a parameter, by its name; one that is in no layer has its own name.

    >>> layer_of("encoder.stack.blocks.0.norm1.weight"), layer_of("stack.blocks.1.norm1.bias")
    ('encoder.0', 'stack.1')
    >>> layer_of("head.linear.weight"), layer_of("position.table")
    ('head.linear', 'position')
    >>> layer_of("scale")
    'scale'
    """
    block = re.match(r"(?:(.+)\.)?stack\.blocks\.(\d+)\.", parameter)
    if block is None:
        return parameter.rpartition(".")[0] or parameter
    return f"{block[1] or 'stack'}.{block[2]}"


def unsharded(value: Any) -> Any:
    """A tensor as a whole; if weights are sharded, norms are, too (`DTensor`)."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
