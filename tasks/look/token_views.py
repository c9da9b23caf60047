"""Views of networks that read and predict tokens: of a text, or the pixels of an image."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modules.activations import recorded, stacks
from modules.measures import (
    induction_score,
    logit_lens,
    nearest,
    previous_token_score,
    repeated_tokens,
)
from tasks.look.inspector import LIKELIEST, head_matrix
from tasks.look.views import Matrix, Table, View

MAX_ROWS = 40  # of a table, a row for each token
PERIOD = 32  # of the repeated tokens of induction scores

Labels = Callable[[Sequence[int]], list[str]]  # of tokens


def neighbours(table: Tensor, ids: Sequence[int], labels: Labels, side: str = "") -> Table:
    """The nearest tokens of some tokens, in a table of embeddings (V, E) of one side."""
    found = [*dict.fromkeys(ids)]
    kept = found[:MAX_ROWS]
    count = min(LIKELIEST, len(table) - 1)
    cosines, ids_nearby = nearest(table.detach().cpu(), torch.tensor(kept), count)
    rows = []
    for name, values, others in zip(
        labels(kept), cosines.tolist(), ids_nearby.tolist(), strict=True
    ):
        pairs = zip(labels(others), values, strict=True)
        rows.append([name, ", ".join(f"{other} {value:.2f}" for other, value in pairs)])
    note = "tokens whose embeddings have the largest cosine" + cut_note(len(found))
    return Table(f"nearest embeddings{side}", ("token", "nearest"), rows, note)


def lens(
    net: Any,
    activations: Mapping[str, Tensor],
    queries: Sequence[str],
    labels: Labels,
    prefix: str = "",
    vocabulary: int | None = None,
) -> Matrix:
    """The likeliest token after each block, at each of N positions.

    Args:
        net: Whose `activations` these are.
        activations: By name.
        queries: Labels of the positions; of the first ones, if there are fewer than N.
        labels: Of tokens.
        prefix: Of the stack, as in `modules.activations`.
        vocabulary: Number of tokens that can be predicted; None: all.
    """
    rows = []
    cells = []
    device = next(net.parameters()).device
    layers = range(len(stacks(net)[prefix].blocks))
    for layer in layers:
        hidden = activations[f"{prefix}blocks.{layer}"][: len(queries)].to(device)  # (N, E)
        logits = logit_lens(net, hidden, prefix)[:, :vocabulary].float()  # (N, V)
        best = logits.softmax(-1).max(-1)
        rows.append(best.values.cpu())
        cells.append(labels(best.indices.tolist()))
    note = "the likeliest token if the network ended after a block; dark: its probability"
    return Matrix(
        "logit lens", torch.stack(rows), [*map(str, layers)], queries, "layer", "token",
        cells=cells, note=note, value_name="probability", limits=(0.0, 1.0),
    )  # fmt: skip


@torch.no_grad()
def induction_views(net: Any, vocabulary: int) -> list[View]:
    """Induction and previous-token score of each head, on random tokens below `vocabulary`."""
    period = min(PERIOD, net.max_length // 2)
    if period < 2:
        return []
    tokens = repeated_tokens(vocabulary, period).to(next(net.parameters()).device)
    with recorded(net, "*.attention.weights") as activations:
        net(tokens)
    repeated = torch.cat([*activations.values()])  # (L, H, N, N)
    found = [
        ("induction score", induction_score(repeated, period), "after the earlier copy of it"),
        ("previous-token score", previous_token_score(repeated), "before it"),
    ]
    return [
        head_matrix(
            name,
            scores,
            f"mean weight from a token to that {where}, on {period} random tokens, twice "
            "(Olsson 2022)",
            "weight",
            1.0,
        )
        for name, scores, where in found
    ]


def cut_note(count: int) -> str:
    """Says that a table has fewer rows than there are tokens."""
    return f"; the first {MAX_ROWS} of {count:,} tokens" if count > MAX_ROWS else ""
