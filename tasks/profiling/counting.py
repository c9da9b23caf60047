"""What a network takes: parameters by part, FLOP and memory, counted without computing anything."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from modules.kernels import cross_entropy
from modules.models.swin import SwinConfig
from tasks.profiling.networks import Network, main_stacks, part_name, resized
from tasks.profiling.timing import Point, in_training

COMPUTED_DEPTHS = (2, 3, 4)  # not 1: with dropped paths the first block differs from the others
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def on_meta(network: Network, config: Any) -> nn.Module:
    """The network without memory for its weights."""
    with torch.device("meta"):
        return network.build(config)


def parameters_by_part(net: nn.Module, config: Any) -> dict[str, int]:
    """Number of parameters of each part, "others" of what is in none."""
    counts: Counter[str] = Counter()
    for name, parameter in net.named_parameters():
        counts[part_name(name, config) or "others"] += parameter.numel()
    return dict(counts)


def counted_flops(network: Network, config: Any, batch: int, length: int) -> tuple[int, int]:
    """FLOP that PyTorch counts, on the meta device: forward, and forward with backward."""
    net = in_training(on_meta(network, config), batch)
    inputs = network.inputs(config, batch, length, "meta")
    with FlopCounterMode(display=False) as counter:
        out = network.outputs(net, *inputs)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops()


def count_point(network: Network, point: Point) -> None:
    """Counts parameters and FLOP of one size of a network, instead of those by formula."""
    net = on_meta(network, point.config)
    point.parameters = sum(parameter.numel() for parameter in net.parameters())
    point.flops = counted_flops(network, point.config, point.batch, point.length)


def saved_bytes(
    network: Network, config: Any, batch: int, length: int, dtype: torch.dtype, device: str
) -> int | None:
    """Bytes of the activations that autograd keeps for the backward pass of a training step.

    Views of one tensor count once, weights not at all. Of many equal blocks the first few are
    computed. None: the step depends on values, as in prefix language models.
    """
    sizes = (batch, length, dtype, device)
    depths = {stack.depth for stack in main_stacks(config).values()}
    if isinstance(config, SwinConfig) or len(depths) > 1 or max(depths) <= COMPUTED_DEPTHS[-1]:
        return saved_bytes_of_all(network, config, *sizes)
    first, second, third = (
        saved_bytes_of_all(network, resized(config, depth=depth), *sizes)
        for depth in COMPUTED_DEPTHS
    )
    if first is None or second is None or third is None:
        return None
    block = third - second
    if block != second - first:
        return saved_bytes_of_all(network, config, *sizes)
    return third + (max(depths) - COMPUTED_DEPTHS[-1]) * block


def saved_bytes_of_all(
    network: Network, config: Any, batch: int, length: int, dtype: torch.dtype, device: str
) -> int | None:
    """`saved_bytes`, by computing all blocks with fake tensors: shapes without values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # fake weights cannot be converted later
    try:
        with FakeTensorMode(), torch.device(device), one_chunk():
            net = in_training(network.build(config), batch)
            return kept_bytes(network, net, network.inputs(config, batch, length, device))
    except DataDependentOutputException:
        return None
    finally:
        torch.set_default_dtype(before)


@contextmanager
def one_chunk() -> Iterator[None]:
    """The loss of a vocabulary in one chunk: autograd keeps the same, after fewer operations."""
    before = cross_entropy.LOGITS_PER_CHUNK
    cross_entropy.LOGITS_PER_CHUNK = 2**62
    try:
        yield
    finally:
        cross_entropy.LOGITS_PER_CHUNK = before


def kept_bytes(network: Network, net: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes of the storages that autograd saves for the backward pass, without weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = network.loss(net, *inputs)
    assert loss.requires_grad
    kept = (tensor for key, tensor in saved.items() if key not in weights)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)
