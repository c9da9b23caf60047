"""Times of inference and of training steps, by size and by part, and formulas fitted to them."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from modules.convolution import NoConv
from tasks.profiling.networks import Network, main_stacks, part_name

Measured = TypeVar("Measured")
BYTES_PER_PARAMETER = 16  # weight, gradient and two moments of AdamW, in float32
AXES = ("length", "width", "depth", "batch_size")


@dataclass
class Point:
    """One size of a network and its input, with what was measured.

    Args:
        axis: What differs from the base: an entry of `AXES`.
        value: Its size.
        config: Of the network.
        batch: Samples B.
        length: Tokens of a sample, or the side of an image in pixels.
        tokens: Tokens T of a sample.
        parameters: Of the network.
        flops: Forward, and forward with backward, of the batch.
        activations: Bytes kept for the backward pass of the batch, in float32; None: not known.
        inference: Median seconds; None: not measured.
        training: Median seconds of a step: forward, backward and AdamW.
        parts: Median seconds of inference by part.
    """

    axis: str
    value: int
    config: Any
    batch: int
    length: int
    tokens: int
    parameters: int
    flops: tuple[int, int]
    activations: int | None = None
    inference: float | None = None
    training: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def training_bytes(self) -> int | None:
        """Weights, gradients, moments of AdamW and activations, in float32; None: not known."""
        if self.activations is None:
            return None
        return BYTES_PER_PARAMETER * self.parameters + self.activations


def measure(
    network: Network,
    points: Sequence[Point],
    repetitions: int,
    device: str,
    advance: Callable[[int], object],
) -> None:
    """Measures all points in turns, after one turn that does not count; writes into them."""
    nets: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for point in points:
        if repr(point.config) not in nets:
            with torch.device(device):
                net = network.build(point.config)
            nets[repr(point.config)] = net, torch.optim.AdamW(net.parameters())

    def times(point: Point) -> tuple[float, float, dict[str, float]]:
        net, optimizer = nets[repr(point.config)]
        inputs = network.inputs(point.config, point.batch, point.length, device)
        step = training_step(network, net, optimizer, inputs)
        result = (
            seconds(inference_step(network, net, inputs), device),
            seconds(step, device),
            part_seconds(network, net, point.config, inputs, device),
        )
        advance(1)
        return result

    found = in_turns([partial(times, point) for point in points], repetitions)
    for point, results in zip(points, found, strict=True):
        inference, training, parts = zip(*results, strict=True)
        point.inference = statistics.median(inference)
        point.training = statistics.median(training)
        names = dict.fromkeys(name for one in parts for name in one)
        point.parts = {
            name: statistics.median(one.get(name, 0.0) for one in parts) for name in names
        }


def in_turns(
    measurements: Sequence[Callable[[], Measured]], repetitions: int
) -> list[list[Measured]]:
    """Calls all in turns, so that a slow moment slows down all; the first turn does not count.

    Returns:
        The results of each, one for each repetition.
    """
    found: list[list[Measured]] = [[] for _ in measurements]
    for turn in range(repetitions + 1):
        for measurement, results in zip(measurements, found, strict=True):
            result = measurement()
            if turn:
                results.append(result)
    return found


def inference_step(network: Network, net: nn.Module, inputs: tuple) -> Callable[[], object]:
    """The forward pass with all logits."""

    def step() -> None:
        net.eval()
        with torch.inference_mode():
            network.outputs(net, *inputs)

    return step


def in_training(net: nn.Module, batch: int) -> nn.Module:
    """`net` in training mode; for one sample with BatchNorm as in evaluation.

    In training BatchNorm refuses a channel that has a single number.
    """
    net.train()
    for module in net.modules():
        if batch == 1 and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eval()
    return net


def training_step(
    network: Network, net: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple
) -> Callable[[], object]:
    """Forward pass, loss, backward pass and AdamW."""

    def step() -> None:
        in_training(net, len(inputs[0]))
        network.loss(net, *inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize(device)


def part_seconds(
    network: Network, net: nn.Module, config: Any, inputs: tuple, device: str
) -> dict[str, float]:
    """Seconds of inference by part: of its modules, without those of other parts inside them."""
    spent: Counter[str] = Counter()
    running: list[list[Any]] = []  # of modules: part, start, seconds of those inside

    def enter(part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            wait(device)
            running.append([part, time.perf_counter(), 0.0])

        return hook

    def leave(*_: object) -> None:
        wait(device)
        part, start, inside = running.pop()
        total = time.perf_counter() - start
        spent[part] += total - inside
        if running:
            running[-1][2] += total

    handles = []
    for name, module in net.named_modules():
        part = part_name(name, config)
        if part is not None and not isinstance(module, nn.Identity | NoConv):
            handles += [
                module.register_forward_pre_hook(enter(part)),
                module.register_forward_hook(leave),
            ]
    total = seconds(inference_step(network, net, inputs), device)
    for handle in handles:
        handle.remove()
    return {**spent, "others": max(0.0, total - sum(spent.values()))}


@dataclass(frozen=True)
class Fit:
    """A sum of terms fitted to times.

    Args:
        names: Of the terms, such as "T d²".
        factors: Seconds for 1 of each term, at least 0, (K,).
        terms: Values of the terms at each point, (P, K).
    """

    names: tuple[str, ...]
    factors: np.ndarray
    terms: np.ndarray

    @property
    def curves(self) -> np.ndarray:
        """Seconds of each term at each point, (P, K)."""
        return np.asarray(self.terms * self.factors)


def fit(points: Sequence[Point], times: Sequence[float]) -> Fit:
    """Fits the terms of an axis to times: least squares of relative errors, factors from 0.

    Over lengths and widths the terms are B L T d², with attention B L T² d, and a constant; over
    depths and batch sizes, the size and a constant. What a head takes is part of the term that
    grows alike.
    """
    names = tuple(terms_of(points[0]))
    terms = np.array([[*terms_of(point).values()] for point in points])  # (P, K)
    weighted = terms / np.array(times)[:, None]  # (P, K), of which the sum should be 1
    best_error = float("inf")
    best = np.zeros(len(names))
    for count in range(1, len(names) + 1):
        for columns in combinations(range(len(names)), count):
            chosen = weighted[:, columns]
            factors = np.zeros(len(names))
            factors[[*columns]] = np.linalg.lstsq(chosen, np.ones(len(times)), rcond=None)[0]
            error = float(((weighted @ factors - 1) ** 2).sum())
            if (factors >= 0).all() and error < best_error:
                best_error = error
                best = factors
    return Fit(names, best, terms)


def terms_of(point: Point) -> dict[str, float]:
    """The terms of `fit` for one point, by name."""
    if point.axis not in ("length", "width"):
        return {"n": float(point.value), "1": 1.0}
    stacks = [*main_stacks(point.config).values()]
    width = stacks[0].width
    amount = float(point.batch * sum(stack.depth for stack in stacks) * point.tokens * width)
    terms = {"T d²": amount * width, "T² d": amount * point.tokens, "1": 1.0}
    if stacks[0].order == "mixer":
        del terms["T² d"]
    return terms
