"""Metrics on ranks of which some have one batch less than others."""

from typing import Any

from torchmetrics import Metric


def update_metric(
    metric: Metric, arguments: tuple[Any, ...], is_counted: bool, **named: Any
) -> None:
    """Calls `metric.update`.

    Args:
        metric: Of this rank.
        arguments: Of `update`.
        is_counted: False for a batch that another rank counts. Its values are removed again, but
            list states keep empty tensors of its shapes, which gathering needs on every rank.
        named: More arguments, for metrics whose `update` has them.
    """
    named = metric._filter_kwargs(**named)  # as `MetricCollection.update`
    if is_counted:
        metric.update(*arguments, **named)
        return
    lengths = {}
    copies = {}
    for name, state in metric.metric_state.items():
        if isinstance(state, list):
            lengths[name] = len(state)
        else:
            copies[name] = state.clone()
    metric.update(*arguments, **named)
    for name, length in lengths.items():
        values = getattr(metric, name)
        values[length:] = [value[:0] for value in values[length:]]
    for name, state in copies.items():
        setattr(metric, name, state)
