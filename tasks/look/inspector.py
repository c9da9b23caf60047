"""What is shown of every kind of model, from its activations for one input."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modules.activations import (
    Change,
    ablation,
    attention_parts,
    changed,
    component,
    patching,
    stacks,
    weight_names,
)
from modules.measures import entropy, rollout, token_distance
from tasks.errors import UsageError
from tasks.look.views import Heads, Matrix, Sample, Table, View

LIKELIEST = 5
NAME_LENGTH = 60  # characters of an input that name it
KL_DIVERGENCE = "Kullback-Leibler divergence in nats"
VISIBLE = 1e-30  # least weight of a key that is not masked; windows mask by -100, which is not 0
TITLES = {  # of attention, by the part of the network
    "": "self-attention",
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}


class Component(NamedTuple):
    """A head, or a whole layer: arguments of `modules.activations.component`."""

    layer: int
    head: int | None = None
    part: str = ""

    def __str__(self) -> str:
        part = "cross-attention" if self.part == "cross" else self.part
        head = "" if self.head is None else f", head {self.head}"
        return f"{part} layer {self.layer}{head}".lstrip()


@dataclass(frozen=True)
class Interventions:
    """What to change in the network, to see how its output changes.

    Args:
        ablate: What to take out; None: nothing.
        patch: What to replace by its activation for another input; None: nothing.
        patch_from: The other input: what a user gives as `--text` or `--image`.
        effects: Change each head and each layer in turn, by a forward pass for each.
    """

    ablate: Component | None = None
    patch: Component | None = None
    patch_from: str = ""
    effects: bool = True


class AttentionLayers(NamedTuple):
    """One kind of attention of all blocks, with labels for one input."""

    part: str  # of `modules.activations.attention_parts`
    queries: Sequence[str]
    keys: Sequence[str]

    @property
    def title(self) -> str:
        return attention_title(self.part)


class Inspector:
    """What is shown of the models of one task. Args: model: as `tessera.load` returns it."""

    model_name: str  # the class in `tessera`
    input_option = "--text"
    distance_unit = "tokens"
    difference_name = KL_DIVERGENCE

    def __init__(self, model: Any) -> None:
        self.model = model
        self.net = model.net

    def mean_distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        """Of self-attention, in `distance_unit`: (..., N, N) -> (...)."""
        return token_distance(weights)

    def inputs(self, batch: Mapping[str, Any]) -> list[Sequence[Any]]:
        """Arguments of the model's `logits` for each sample of a batch of its data."""
        raise NotImplementedError

    def completed(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Arguments of `logits`, with what the user left out."""
        return inputs

    def patch_inputs(self, inputs: Sequence[Any], patch_from: str) -> Sequence[Any]:
        """Arguments of `logits` for the input that is patched from."""
        return (patch_from,)

    def attention_layers(self, *inputs: Any) -> list[AttentionLayers]:
        """The kinds of attention, with labels for one input."""
        _, queries, keys = self.model.attention(*inputs)
        return [AttentionLayers("", queries, keys)]

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        """Tabs that only this task has; `activations` as of the method."""
        return {}

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        """Numbers by name that say what the network answers; `reference` logits choose which."""
        raise NotImplementedError

    def difference(self, logits: Tensor, changed_logits: Tensor) -> float:
        """How far the output moves, as `difference_name` says: (..., K) twice."""
        before = logits.log_softmax(-1)
        divergence = (before.exp() * (before - changed_logits.log_softmax(-1))).sum(-1)
        return float(divergence.mean())

    def activations(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """All activations for one input, and the outputs of the network as "logits"."""
        return {**self.model.activations(*inputs), "logits": self.model.logits(*inputs)}

    def sample(self, name: str, inputs: Sequence[Any], interventions: Interventions) -> Sample:
        """All views of one input.

        Args:
            name: Of the sample.
            inputs: Arguments of the model's `logits`.
            interventions: What to change in the network.

        Raises:
            UsageError: The input that is patched from has another length.
        """
        inputs = self.completed(inputs)
        activations = self.activations(inputs)
        kinds = self.attention_layers(*inputs)
        tabs: dict[str, list[View]] = {"attention": [], "rollout": [], "heads": []}
        for layers in kinds:
            weights = self.weights(layers, activations)  # (L, H, N, M)
            tabs["attention"].append(self.heads(layers.title, weights[None], layers, inputs))
            if layers.part != "cross":
                title = f"rollout of {layers.title} over all layers"
                total = rollout([*weights[:, None]])[None, None]  # (1, 1, 1, N, N)
                tabs["rollout"].append(self.heads(title, total, layers, inputs))
            tabs["heads"] += self.head_statistics(layers, weights)
        tabs |= self.task_tabs(inputs, activations)
        tabs["ablation"] = self.ablation_views(inputs, activations, interventions)
        tabs["patching"] = self.patching_views(inputs, activations, interventions)
        return Sample(name, {tab: views for tab, views in tabs.items() if views})

    def weights(self, layers: AttentionLayers, activations: Mapping[str, Tensor]) -> Tensor:
        """(L, H, N, M)."""
        return torch.stack([activations[name] for name in weight_names(self.net, layers.part)])

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, inputs: Sequence[Any]
    ) -> Heads:
        """A view of weights (1, L, H, N, M)."""
        return Heads(title, weights, layers.queries, layers.keys)

    def head_statistics(self, layers: AttentionLayers, weights: Tensor) -> list[View]:
        """A number for each layer and head, of weights (L, H, N, M)."""
        uniform = uniform_entropy(weights)
        note = (
            f"in nats, mean over the queries; {uniform:.3f} if each query reads all keys that it "
            "sees with the same weight; colours from 0 to this"
        )
        title = f"entropy of {layers.title}"
        entropies = entropy(weights).mean(-1)  # (L, H)
        views: list[View] = [head_matrix(title, entropies, note, "nats", uniform)]
        if layers.part != "cross":
            distance = self.mean_distance(weights, layers)  # (L, H)
            note = f"in {self.distance_unit}, mean over the queries"
            title = f"mean distance of {layers.title}"
            largest = float(distance.max())
            views.append(head_matrix(title, distance, note, self.distance_unit, largest))
        return views

    def ablation_views(
        self,
        inputs: Sequence[Any],
        activations: Mapping[str, Tensor],
        interventions: Interventions,
    ) -> list[View]:
        views: list[View] = []
        logits = activations["logits"]
        if interventions.ablate is not None:
            changes = ablation(self.net, *interventions.ablate)
            rows = self.comparison(inputs, logits, self.changed_logits(inputs, changes))
            title = f"without {interventions.ablate}"
            views.append(Table(title, ("output", "input", "ablated", "change"), rows))
        for part in attention_parts(self.net) if interventions.effects else ():
            title = "effect of ablating each head"
            note = "how far the output moves without a head, or without a whole layer"
            changes_of = partial(ablation, self.net, part=part)
            views.append(self.effects(title, part, note, inputs, logits, changes_of))
        return views

    def patching_views(
        self,
        inputs: Sequence[Any],
        activations: Mapping[str, Tensor],
        interventions: Interventions,
    ) -> list[View]:
        if interventions.patch is None:
            return []
        patch_from = interventions.patch_from
        others = self.activations(self.patch_inputs(inputs, patch_from))
        batch = {name: value[None] for name, value in others.items()}  # (1, ...), as in a pass
        for name in component(self.net, *interventions.patch):
            found, needed = len(others[name]), len(activations[name])  # of (N, ...)
            if found != needed:
                part = interventions.patch.part
                theirs, own = (
                    next(one.queries for one in self.attention_layers(*texts) if one.part == part)
                    for texts in (self.patch_inputs(inputs, patch_from), inputs)
                )
                raise UsageError(
                    f"--patch_from has {found} tokens ({' '.join(theirs)}), but "
                    f"{shortened(inputs[0])!r} has {needed} ({' '.join(own)}): give a text of as "
                    "many tokens"
                )
        logits = activations["logits"]
        changes = patching(self.net, batch, *interventions.patch)
        after = self.changed_logits(inputs, changes)
        rows = self.comparison(inputs, logits, after, others["logits"])
        columns = ("output", "input", "patched", "change", "other input")
        note = f"the other input: {patch_from}"
        views: list[View] = [Table(f"{interventions.patch} of another input", columns, rows, note)]
        for part, (prefix, _) in attention_parts(self.net).items() if interventions.effects else ():
            if others[f"{prefix}hidden"].shape == activations[f"{prefix}hidden"].shape:
                title = "effect of patching each head"
                note = "how far the output moves with a head, or a whole layer, of the other input"
                changes_of = partial(patching, self.net, batch, part=part)
                views.append(self.effects(title, part, note, inputs, logits, changes_of))
        return views

    def changed_logits(self, inputs: Sequence[Any], changes: Mapping[str, Change]) -> Tensor:
        with changed(self.net, changes):
            logits: Tensor = self.model.logits(*inputs)
        return logits

    def comparison(self, inputs: Sequence[Any], before: Tensor, *others: Tensor) -> list[list[Any]]:
        """Rows of an output before and after a change, the change, and further outputs."""
        values = [self.outputs(logits, before, inputs) for logits in (before, *others)]
        for numbers, logits in zip(values, (before, *others), strict=True):
            numbers[self.difference_name] = self.difference(before, logits)
        rows = []
        for name in values[0]:
            old, new, *more = [numbers[name] for numbers in values]
            rows.append([name, old, new, new - old, *more])
        return rows

    def effects(
        self,
        title: str,
        part: str,
        note: str,
        inputs: Sequence[Any],
        logits: Tensor,
        changes_of: Callable[..., Mapping[str, Change]],
    ) -> Matrix:
        """How far the output moves with the changes of each head and each layer."""
        prefix, sub_layer = attention_parts(self.net)[part]
        stack = stacks(self.net)[prefix]
        heads = range(stack.config.heads)
        rows = []
        for layer in range(len(stack.blocks)):
            every = [changes_of(layer, head) for head in (*heads, None)]
            after = [self.changed_logits(inputs, changes) for changes in every]
            rows.append([self.difference(logits, one) for one in after])
        title += f" of {attention_title(part)}" if part else ""
        columns = [*map(str, heads), "layer" if sub_layer == "attention" else "all"]
        note = f"{note}: {self.difference_name}"
        names = [*map(str, range(len(rows)))]
        name = self.difference_name
        values = torch.tensor(rows)  # (L, H + 1)
        return Matrix(title, values, names, columns, "layer", "head", note=note, value_name=name)


class ClassifierInspector(Inspector):
    """Views of classifiers and regressions."""

    @property
    def is_single_label(self) -> bool:
        return self.model.metadata["problem_type"] == "single_label_classification"

    @property
    def difference_name(self) -> str:  # type: ignore[override]
        if self.is_single_label:
            return KL_DIVERGENCE
        return "mean absolute change of the outputs"

    def difference(self, logits: Tensor, changed_logits: Tensor) -> float:
        if self.is_single_label:
            return super().difference(logits, changed_logits)
        return float((logits - changed_logits).abs().mean())

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        values = self.model.problem.predictions(logits[None])[0]  # (K,)
        order = reference.argsort(descending=True)[:LIKELIEST].tolist()
        return {self.model.class_names[index]: float(values[index]) for index in order}

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        logits = activations["logits"]
        rows = [[name, value] for name, value in self.outputs(logits, logits, inputs).items()]
        columns = ("class", "probability") if self.is_single_label else ("output", "value")
        return {"prediction": [Table("prediction", columns, rows)]}


def shortened(text: str) -> str:
    """The beginning of a text."""
    text = " ".join(text.split())
    return text if len(text) <= NAME_LENGTH else f"{text[: NAME_LENGTH - 1]}…"


def attention_title(part: str) -> str:
    """What a kind of attention is called: "stages.1" is that in windows of a Swin."""
    return TITLES.get(part) or f"self-attention in windows of stage {part.removeprefix('stages.')}"


def uniform_entropy(weights: Tensor) -> float:
    """The entropy if each query weighs all keys that it sees alike, in nats, mean over the queries.

    Args:
        weights: (L, H, N, M). A key that is masked has the weight 0 in all heads of a layer. The
            layer whose queries see most counts.
    """
    visible = (weights > VISIBLE).any(1).sum(-1)  # (L, N)
    return float(visible.clamp(min=1).log().mean(-1).max())


def head_matrix(title: str, values: Tensor, note: str, value_name: str, largest: float) -> Matrix:
    """A matrix of numbers (L, H), with colours from 0 to `largest`."""
    layers, heads = values.shape
    names = [*map(str, range(max(layers, heads)))]
    return Matrix(
        title, values, names[:layers], names[:heads], "layer", "head",
        note=note, value_name=value_name, limits=(0.0, largest),
    )  # fmt: skip
