"""The first samples of the test split of a checkpoint's data."""

from collections.abc import Sequence
from typing import Any

from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.cli.app import load
from tasks.errors import UsageError
from tasks.look.inspector import Inspector
from tasks.options import accepted_options, build_from_options, merge_options


def test_inputs(inspector: Inspector, task: str, count: int) -> list[Sequence[Any]]:
    """Returns the arguments of the model's `logits` for each of at most `count` samples.

    Raises:
        UsageError: The model has no data of its own, as one of the hub.
    """
    model = inspector.model
    if model.source.startswith(("hf/", "timm/")):
        raise UsageError(f"{model.source} comes without data: give {inspector.input_option}")
    config = read_checkpoint(model.source, task)[KEY]["config"]["data"]
    problem = model.metadata.get("problem_type")  # which --model.problem_type sets
    if problem is not None:
        config = merge_options(config, {"dataset": {"problem_type": problem}})
    data = load(load(f"tasks.{task}.__main__:APP").data)
    datamodule: Any = build_from_options(data, accepted_options(data, **config), {})
    datamodule.set_metadata(model.metadata)
    split = datamodule.load("test")
    return inspector.inputs(split[[*range(min(count, len(split)))]])
