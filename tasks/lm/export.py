"""`python -m tasks.lm export`: a checkpoint's weights for other programs."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from modules.pretrained.decoder import FAMILIES
from modules.pretrained.family import matching_family
from tasks.checkpoints.exporting import (
    NextTokenGraph,
    TextFormat,
    export_model,
    text_target,
    write_text_graph,
    write_tokenizer,
)
from tasks.checkpoints.generation_config import write_generation
from tasks.cli.text_io import print_note
from tasks.lm.architectures import NOT_CAUSAL, load_model


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        format: hf: a folder with weights, config and tokenizer for `from_pretrained`; onnx: a
            folder with a graph from `input_ids`, of any batch size and any length up to the
            context, to `logits` of the token that follows each, and the tokenizer; safetensors: a
            file with our own names, config and the data's metadata in the header.
        output: Folder to write, or for safetensors a file, such as model.safetensors; null: beside
            the checkpoint.
    """
    target = text_target(ckpt_path, format, output)
    model = load_model(ckpt_path)
    if format != "hf" and not model.net.config.stack.causal:  # hf refuses it
        print_note(f"{NOT_CAUSAL}: it is no language model")
    special_tokens = model.tokenizer.special_ids.known()
    if not model.metadata["marks_documents"]:  # it never saw bos or eos
        special_tokens = {role: special_tokens[role] for role in special_tokens if role == "pad"}

    def convert(net: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        family = matching_family(net.config, FAMILIES)
        state = family.weights_to_external(net.state_dict(), net.config)
        return family.config_to_external(net.config, special_tokens), state

    write_onnx = partial(write_text_graph, NextTokenGraph(model.net), model.metadata)
    # The context, not the length of the rows of training.
    for_tokenizer = model.metadata | {"max_length": model.net.max_length}

    def write_more(_: dict[str, Any], folder: Path) -> None:
        write_tokenizer(for_tokenizer, folder)
        if (generation := model.generation()) is not None:
            ids = special_tokens.items()
            tokens = {f"{role}_token_id": i for role, i in ids if role in ("bos", "eos", "pad")}
            write_generation(folder, generation, tokens)

    export_model("lm", model.net, model.metadata, target, format, convert, write_onnx, write_more)
