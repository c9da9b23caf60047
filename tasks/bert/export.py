"""`export` of `python -m tasks.bert` and `python -m tasks.mlm`: weights for other programs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import FAMILIES
from tasks.checkpoints.exporting import (
    TextFormat,
    TextGraph,
    export_model,
    text_target,
    with_numbers_in_units,
    write_text_graph,
)
from tasks.checkpoints.reading import KEY, load_network, read_checkpoint
from tasks.cli.app import program
from tasks.errors import UsageError


class ClassifierGraph(TextGraph):
    """A classifier of texts."""

    inputs = ("input_ids", "attention_mask")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, N) twice, the mask 0 at padding -> logits (B, K)."""
        return self.net(input_ids, attention_mask.bool())


class MaskedLMGraph(ClassifierGraph):
    """A masked language model."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, N) twice, the mask 0 at padding -> logits (B, N, V)."""
        return self.net.head(self.net.hidden(input_ids, attention_mask.bool()))


# Network and graph of each task.
NETWORKS: dict[str, tuple[type[nn.Module], type[ClassifierGraph]]] = {
    "bert": (BertClassifier, ClassifierGraph),
    "mlm": (BertMaskedLM, MaskedLMGraph),
}


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, config and tokenizer for `from_pretrained`, as BERT (also
            what came from RoBERTa) or, if only that has the same parts, as DistilBERT; onnx: a
            folder with a graph from `input_ids` and `attention_mask` to `logits`, of any batch size
            and any length up to the model's, and the tokenizer; safetensors: a file with our own
            names, config and the data's metadata in the header.
        output: Folder to write, or for safetensors a file, such as model.safetensors; null: beside
            the checkpoint.
    """
    target = text_target(ckpt_path, format, output)
    checkpoint = read_checkpoint(ckpt_path)
    saved = checkpoint[KEY]
    task = saved["task"]
    if task not in NETWORKS:
        raise UsageError(f"checkpoint '{ckpt_path}' is of task {task}: use {program(task)}")
    build, graph = NETWORKS[task]
    net = load_network(checkpoint, BertConfig, build)
    metadata = with_numbers_in_units(net, saved["metadata"])
    convert = partial(to_huggingface, metadata=metadata)
    write_onnx = partial(write_text_graph, graph(net), metadata)
    export_model(task, net, metadata, target, format, convert, write_onnx)


def to_huggingface(
    net: Any, metadata: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns `config.json` and weights of the first family with such a model."""
    reasons = []
    for family in FAMILIES.values():
        try:
            state = family.weights_to_external(net.state_dict(), net.config)
            settings = family.config_to_external(net.config, metadata.get("class_names"))
            if "problem_type" in metadata:
                settings["problem_type"] = metadata["problem_type"]
            return settings, state
        except ValueError as error:
            reasons.append(error)
    raise reasons[0]
