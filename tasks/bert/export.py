"""`export` of BERT-style encoders: a checkpoint's weights for other programs."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from datamodules.tokenizers import Tokenizer
from modules.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import TABLES, from_tessera
from modules.pretrained.bert_configs import config_to_huggingface
from tasks.checkpoints import KEY, load_config, net_weights, read_checkpoint
from tasks.errors import UsageError
from tasks.exporting import made_folder, new_file, write_safetensors
from tasks.run_folder import write_text

MODELS: dict[str, type[nn.Module]] = {"bert": BertClassifier, "mlm": BertMaskedLM}


def export(ckpt_path: str, format: Literal["hf", "safetensors"] = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for Hugging Face's transformers or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: hf: a folder with weights, configuration and tokenizer, for `from_pretrained`; safetensors: a file with
            our own names, configuration and the data's facts in the header.
        output: Folder or file to write; null puts it beside the checkpoint.
    """
    checkpoint = read_checkpoint(ckpt_path)
    saved = checkpoint[KEY]
    if saved["task"] not in MODELS:
        raise UsageError(f"checkpoint '{ckpt_path}' is of task '{saved['task']}': use python -m tasks.{saved['task']}")
    net = MODELS[saved["task"]](load_config(BertConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    target = (
        Path(output) if output else Path(ckpt_path).with_suffix({"hf": ".hf", "safetensors": ".safetensors"}[format])
    )
    if format == "safetensors":
        with new_file(target) as partial:
            hint = write_safetensors(net, saved["facts"], partial)
    else:
        with made_folder(target) as folder:
            hint = write_huggingface(net, saved, folder)
    print(f"wrote {target}\n{hint.format(file=target)}")


def write_huggingface(net: Any, saved: dict[str, Any], folder: Path) -> str:
    """Weights, `config.json` and tokenizer; the hint loads them.

    Raises:
        UsageError: no model of theirs is like this one; says in what.
    """
    from safetensors.torch import save_file

    reasons = []
    for family in TABLES:
        try:
            state = from_tessera(family, net.state_dict(), net.config)
            break
        except ValueError as error:
            reasons.append(str(error))
    else:
        raise UsageError(f"no model of Hugging Face's is like this one ({reasons[0]}): export to safetensors")
    settings = config_to_huggingface(family, net.config, saved["facts"].get("class_names"))
    save_file(
        {name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    write_text(folder / "config.json", json.dumps(settings, indent=2))
    write_tokenizer(saved["facts"], folder)
    return f"transformers.{settings['architectures'][0]}.from_pretrained('{{file}}')"


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, for `AutoTokenizer`."""
    tokenizer, content = Tokenizer.from_json(facts["tokenizer"]), json.loads(facts["tokenizer"])
    content.pop("control", None)  # what a foreign tokenizer's other files said; they say it again below
    roles = {f"{role}_token": tokenizer.tokens([number])[0] for role, number in tokenizer.ids.known().items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": facts["max_length"], **roles}
    write_text(folder / "tokenizer.json", json.dumps(content, ensure_ascii=False))
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
