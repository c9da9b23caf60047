"""Updating metrics on ranks that may have one batch less than others."""

from typing import Any

from torchmetrics import Metric


def count(metric: Metric, batch: tuple[Any, ...], counts: bool) -> None:
    """Update a metric.

    Args:
        metric: of one rank.
        batch: what its `update` takes.
        counts: False for a batch that another rank counts. It adds nothing then, but states get the
            batch's shapes: all ranks must have the same to put their states together.
    """
    before = {} if counts else {name: size(state) for name, state in metric.metric_state.items()}
    metric.update(*batch)
    for name, state in before.items():
        if isinstance(state, int):
            batches = getattr(metric, name)
            batches[state:] = [batch[:0] for batch in batches[state:]]
        else:
            setattr(metric, name, state)


def size(state: Any) -> Any:
    """Length of a state that grows, or a copy of one that does not."""
    return len(state) if isinstance(state, list) else state.clone()
