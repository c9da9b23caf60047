"""ONNX: a network as a graph for ONNX Runtime and other programs."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.utils.extras import requires_extra

KEPT = ("class_names", "problem_type", "preprocessing")  # metadata that a graph holds


def write_graph(
    net: nn.Module,
    examples: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    metadata: Mapping[str, Any],
    path: Path,
    output: str = "logits",
) -> None:
    """Writes a network as a graph with one output, and the metadata in `KEPT`, as JSON.

    Args:
        net: In evaluation mode.
        examples: Each input by its name.
        axes: For each input, names of the axes that may have another size than in the examples.
        metadata: Of the data.
        path: File to write; torch writes weights of more than 1.5 GiB to PATH.data beside it.
        output: Name of the output.

    Raises:
        UsageError: ONNX is not installed.
    """
    with requires_extra("export"):
        import onnxscript  # noqa: F401
    with warnings.catch_warnings():
        # Axes of several inputs have one name since they are the same; torch warns of each.
        warnings.filterwarnings("ignore", "# The axis name: .* will not be used", UserWarning)
        program = torch.onnx.export(
            net,
            tuple(examples.values()),
            dynamo=True,
            verbose=False,
            input_names=[*examples],
            output_names=[output],
            dynamic_shapes=dict(axes),
        )
    assert program is not None
    remove_traces(program.model)
    kept = {name: json.dumps(metadata[name]) for name in KEPT if name in metadata}
    program.model.metadata_props.update(kept)
    program.save(path)


def remove_traces(model: Any) -> None:
    """Removes the stack traces, with paths of this machine, that torch stores with each node."""
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            for part in (node, *node.outputs):
                part.metadata_props.clear()
                part.doc_string = None
        for value in graph.inputs:
            value.metadata_props.clear()
