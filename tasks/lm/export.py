"""`python -m tasks.lm export`: a checkpoint's weights for other programs."""

from typing import Any

from torch import Tensor

from datamodules.tokenizers import Tokenizer
from modules.pretrained.decoder import from_tessera
from modules.pretrained.decoder_configs import config_to_huggingface, suited_family
from tasks.exporting import TextFormat, export_texts
from tasks.lm.architectures import load_model


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, configuration and tokenizer, for `from_pretrained`; safetensors: a file with
            our own names, configuration and the data's facts in the header.
        output: Folder or file to write; null puts it beside the checkpoint.
    """
    model = load_model(ckpt_path)
    export_texts(model.net, model.facts, ckpt_path, format, output, lambda net: to_huggingface(net, model.tokenizer))


def to_huggingface(net: Any, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Content of `config.json` and the weights by their names.

    Raises:
        ValueError: they have no such model; says why.
    """
    family = suited_family(net.config)
    return config_to_huggingface(family, net.config, tokenizer.ids.known()), from_tessera(
        family, net.state_dict(), net.config
    )
