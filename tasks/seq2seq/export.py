"""`python -m tasks.seq2seq export`: a checkpoint's weights for other programs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.tokenizers import PairTokenizer
from modules.pretrained.family import matching_family
from modules.pretrained.seq2seq import FAMILIES
from tasks.checkpoints.exporting import (
    TextFormat,
    TextGraph,
    export_model,
    save_tokenizer,
    set_special_tokens,
    text_target,
    write_text_graph,
)
from tasks.checkpoints.generation_config import write_generation
from tasks.seq2seq.architectures import TARGET_FOLDER, load_model
from tasks.seq2seq.decoding import generation_settings


class EncoderDecoderGraph(TextGraph):
    """An encoder-decoder."""

    inputs = ("input_ids", "attention_mask", "decoder_input_ids")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor
    ) -> Tensor:
        """(B, M) twice, the mask 0 at padding, and (B, N) -> logits (B, N, V)."""
        return self.net.logits(self.net(input_ids, decoder_input_ids, attention_mask.bool()))


def export(ckpt_path: str, format: TextFormat = "hf", output: str | None = None) -> None:
    """Write a checkpoint's weights for transformers, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        format: hf: a folder with weights, config and tokenizers for `from_pretrained`, as Marian,
            BART or T5, with a separate target tokenizer in its folder `target_tokenizer`; onnx: a
            folder with a graph from `input_ids` and `attention_mask` of the source and
            `decoder_input_ids`, the start token and the target so far, to `logits` of the token
            that follows each, of any batch size and lengths, and the tokenizers; safetensors: a
            file with our own names, config and the data's metadata in the header.
        output: Folder to write, or for safetensors a file, such as model.safetensors; null: beside
            the checkpoint.
    """
    target = text_target(ckpt_path, format, output)
    model = load_model(ckpt_path)
    metadata = model.metadata
    ids = {
        "decoder_start": metadata["start"],
        "bos": model.tokenizer.target.special_ids.bos,
        "eos": metadata["end"],
        "pad": metadata["pad_id"],
    }
    special_tokens = {role: token for role, token in ids.items() if token is not None}

    def convert(net: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        family = matching_family(net.config, FAMILIES)
        state = family.weights_to_external(net.state_dict(), net.config)
        return family.config_to_external(net.config, special_tokens), state

    def write_more(metadata: dict[str, Any], folder: Path) -> None:
        write_tokenizers(model.tokenizer, metadata["max_length"], folder)
        settings = {
            **{f"{role}_token_id": token for role, token in special_tokens.items()},
            **generation_settings(model.tokens),
            "max_new_tokens": metadata["max_length"],
            "num_beams": 5,  # as in `translate`
        }
        write_generation(folder, model.generation, settings)

    write_onnx = partial(write_text_graph, EncoderDecoderGraph(model.net), metadata)
    export_model("seq2seq", model.net, metadata, target, format, convert, write_onnx, write_more)


def write_tokenizers(pair: PairTokenizer, max_length: int, folder: Path) -> None:
    """Writes the tokenizer of the source and, if it is another one, that of the target."""
    sides = {folder: pair.source}
    if not pair.joint:
        sides[folder / TARGET_FOLDER] = pair.target
    for place, tokenizer in sides.items():
        place.mkdir(exist_ok=True)
        content = json.loads(tokenizer.to_json())
        bos = [tokenizer.special_id("bos")] if pair.config.begin else []
        set_special_tokens(content, tokenizer, bos, [tokenizer.special_id("eos")])
        # "[EOS]" in a text is read as any text.
        save_tokenizer(content, tokenizer, max_length, place, {"split_special_tokens": True})
