"""`export` of BERT-style encoders: a checkpoint's weights for other programs."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from datamodules.tokenizers import Tokenizer
from modules.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import TABLES, config_to_huggingface, from_tessera
from tasks.checkpoints import KEY, load_config, net_weights, read_checkpoint
from tasks.errors import UsageError
from tasks.exporting import made_folder, write_safetensors
from tasks.run_folder import write_text

MODELS: dict[str, type[nn.Module]] = {"bert": BertClassifier, "mlm": BertMaskedLM}
HEADS = {"bert": "ForSequenceClassification", "mlm": "ForMaskedLM"}


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
        hint = write_safetensors(net, saved["facts"], target)
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
            reasons.append(f"{family}: {error}")
    else:
        raise UsageError(f"no model of Hugging Face's is like this one ({'; '.join(reasons)}): export to safetensors")
    settings = config_to_huggingface(family, net.config, HEADS[saved["task"]])
    names = saved["facts"].get("class_names")
    if names:
        settings |= {"id2label": {str(i): name for i, name in enumerate(names)}}
        settings |= {"label2id": {name: i for i, name in enumerate(names)}}
    save_file(
        {name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    write_text(folder / "config.json", json.dumps(settings, indent=2))
    tokenizer = Tokenizer.from_json(saved["facts"]["tokenizer"])
    for name, text in tokenizer.huggingface_files(saved["facts"]["max_length"]).items():
        write_text(folder / name, text)
    return f"transformers.{settings['architectures'][0]}.from_pretrained('{{file}}')"
