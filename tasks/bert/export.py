"""`export` of `python -m tasks.bert` and `python -m tasks.mlm`: weights for other programs."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import FAMILIES
from tasks.checkpoints.exporting import TextFormat, export_text_model
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.errors import UsageError

NETWORKS: dict[str, type[nn.Module]] = {"bert": BertClassifier, "mlm": BertMaskedLM}


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, config and tokenizer for `from_pretrained`, as BERT (also
            what came from RoBERTa) or, if only that has the same parts, as DistilBERT; safetensors:
            a file with our own names, config and the data's metadata in the header.
        output: Folder or file to write; null: beside the checkpoint.
    """
    checkpoint = read_checkpoint(ckpt_path)
    saved = checkpoint[KEY]
    task = saved["task"]
    if task not in NETWORKS:
        raise UsageError(f"checkpoint '{ckpt_path}' is of task {task}: use python -m tasks.{task}")
    net = NETWORKS[task](load_config(BertConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    metadata = saved["metadata"]

    convert = partial(to_huggingface, class_names=metadata.get("class_names"))
    export_text_model(net, metadata, ckpt_path, format, output, convert)


def to_huggingface(
    net: Any, class_names: list[str] | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns `config.json` and weights of the first family with such a model."""
    reasons = []
    for family in FAMILIES.values():
        try:
            state = family.weights_to_external(net.state_dict(), net.config)
            return family.config_to_external(net.config, class_names), state
        except ValueError as error:
            reasons.append(error)
    raise reasons[0]
