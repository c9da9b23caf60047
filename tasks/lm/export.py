"""`python -m tasks.lm export`: a checkpoint's weights for other programs."""

from typing import Any

from torch import Tensor

from modules.pretrained.decoder import from_tessera
from modules.pretrained.decoder_configs import config_to_huggingface, suited_family
from tasks.checkpoints.exporting import TextFormat, export_texts
from tasks.lm.architectures import Model, load_model


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, configuration and tokenizer, for `from_pretrained`; safetensors: a file with
            our own names, configuration and the data's facts in the header.
        output: Folder or file to write; null puts it beside the checkpoint.
    """
    model = load_model(ckpt_path)
    export_texts(
        model.net, model.facts, ckpt_path, format, output, lambda net: to_huggingface(net, model)
    )


def to_huggingface(net: Any, model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Content of `config.json` and the weights by their names; it names no begin and end that the model never saw.

    Raises:
        ValueError: they have no such model; says why.
    """
    family = suited_family(net.config)
    special = model.tokenizer.special_ids.known()
    if not model.facts["marks_documents"]:
        special = {role: number for role, number in special.items() if role not in ("bos", "eos")}
    return config_to_huggingface(family, net.config, special), from_tessera(
        family, net.state_dict(), net.config
    )
