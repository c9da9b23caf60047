"""`export` of BERT-style encoders: a checkpoint's weights for other programs."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import TABLES, from_tessera
from modules.pretrained.bert_configs import config_to_huggingface
from tasks.checkpoints.exporting import TextFormat, export_texts
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.errors import UsageError

MODELS: dict[str, type[nn.Module]] = {"bert": BertClassifier, "mlm": BertMaskedLM}


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, configuration and tokenizer, for `from_pretrained`, as a model of BERT's kind
            (what came from RoBERTa, too) or, for what only that has, of DistilBERT's; safetensors: a file with our own
            names, configuration and the data's facts in the header.
        output: Folder or file to write; null puts it beside the checkpoint.
    """
    checkpoint = read_checkpoint(ckpt_path)
    saved = checkpoint[KEY]
    if saved["task"] not in MODELS:
        raise UsageError(
            f"checkpoint '{ckpt_path}' is of task '{saved['task']}': use python -m tasks.{saved['task']}"
        )
    net = MODELS[saved["task"]](load_config(BertConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    translate = partial(to_huggingface, class_names=saved["facts"].get("class_names"))
    export_texts(net, saved["facts"], ckpt_path, format, output, translate)


def to_huggingface(
    net: Any, class_names: list[str] | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Content of `config.json` and the weights by their names, of the first family that has such a model.

    Raises:
        ValueError: none has; the first one's reason.
    """
    reasons = []
    for family in TABLES:
        try:
            state = from_tessera(family, net.state_dict(), net.config)
        except ValueError as error:
            reasons.append(error)
        else:
            return config_to_huggingface(family, net.config, class_names), state
    raise reasons[0]
