"""Shared by the benchmarks of encoder-decoders: Multi30k, and the same model in our code and in that of others."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, HIDDEN, VOCABULARY, LENGTH = (
    128,
    4,
    4,
    256,
    8000,
    64,
)  # the preset "tiny"; tokens of a side
Batch = dict[str, Any]

# Pieces of parameter names, ours and those of `nn.Transformer`, in the order in which they are replaced.
TORCH_NAMES = {
    "encoder.stack.blocks.": "encoder.layers.",
    "decoder.stack.blocks.": "decoder.layers.",
    "cross_attention.output.": "multihead_attn.out_proj.",
    ".attention.qkv.": ".self_attn.in_proj_",
    ".attention.output.": ".self_attn.out_proj.",
    "feedforward.up.": "linear1.",
    "feedforward.down.": "linear2.",
}


def data(batch_size: int = 64) -> Any:
    """Multi30k, English to German, by one tokenizer, as `python -m tasks.seq2seq` reads it."""
    from datamodules.text import TextLoading
    from datamodules.tokenizers import PairTokenizerConfig
    from datamodules.translation import TranslationData

    return TranslationData(
        "files",
        str(Path(os.environ["TESSERA_DATA"], "multi30k")),
        "en-de",
        batch_size,
        LENGTH,
        tokenizer=PairTokenizerConfig("bpe", VOCABULARY),
        loading=TextLoading(eval_batch_size=batch_size),
    )


def hugging_face(dropout: float = 0.0, spread: float = 0.02) -> Any:
    """Hugging Face's Marian model at these sizes, the same weights in every process.

    Args:
        dropout: Rate of all but attention weights and hidden values.
        spread: Standard deviation of its start values.
    """
    from transformers import MarianConfig, MarianMTModel

    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", HIDDEN))
    }
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        **sides,
        activation_function="relu",
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=512,
        init_std=spread,
        pad_token_id=0,
        bos_token_id=5,
        eos_token_id=6,
        decoder_start_token_id=5,
        forced_eos_token_id=None,
    )
    torch.manual_seed(0)
    return MarianMTModel(config)


def tessera(dropout: float = 0.0, spread: float = 0.02) -> Any:
    """Our model with the weights of Hugging Face's; arguments as there."""
    from modules.models.seq2seq import Seq2Seq
    from modules.pretrained.family import config_from_huggingface
    from modules.pretrained.seq2seq import FAMILIES
    from modules.pretrained.weights import load_weights

    theirs = hugging_face(dropout, spread)
    family, found = config_from_huggingface(theirs.config.to_dict(), FAMILIES)
    rates = {"dropout": dropout, "mlp_dropout": 0.0, "attention_dropout": 0.0}
    config = replace(
        found, encoder=replace(found.encoder, **rates), decoder=replace(found.decoder, **rates)
    )
    net = Seq2Seq(config)
    load_weights(net, FAMILIES[family].weights_from_external(theirs.state_dict(), config))
    return net


class TorchTransformer(nn.Module):
    """`nn.Transformer` with one table for source, target and output, and sinusoidal positions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        sizes = (WIDTH, HEADS, HIDDEN, dropout)
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, batch_first=True), LAYERS
        )
        decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, batch_first=True), LAYERS
        )
        self.core = nn.Transformer(
            WIDTH,
            HEADS,
            custom_encoder=encoder,
            custom_decoder=decoder,
            dropout=dropout,
            batch_first=True,
        )
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        rate = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.arange(512)[:, None] * rate  # (512, E / 2)
        self.register_buffer(
            "waves", torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
        )  # (512, E)
        for layer in (
            layer for layer in self.modules() if isinstance(layer, nn.MultiheadAttention)
        ):
            layer.dropout = 0.0

    def forward(self, source: Tensor, tokens: Tensor, source_padding_mask: Tensor) -> Tensor:
        """(B, M), (B, N), (B, M) -> logits (B, N, V)."""
        read, written = (
            self.dropout(self.embed(x) * WIDTH**0.5 + self.waves[: x.shape[1]])
            for x in (source, tokens)
        )
        later = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).triu(
            1
        )  # (N, N)
        hidden = self.core(
            read,
            written,
            tgt_mask=later,
            src_key_padding_mask=~source_padding_mask,
            memory_key_padding_mask=~source_padding_mask,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.embed.weight)


@torch.no_grad()
def torch_transformer(dropout: float = 0.0) -> TorchTransformer:
    """The same model with `nn.Transformer` and the weights of ours."""
    net, ours = TorchTransformer(dropout), dict(tessera().named_parameters())
    left = {name.removeprefix("core."): value for name, value in net.named_parameters()}
    for name, value in ours.items():
        if ".cross_attention.query." in name:
            value = torch.cat(
                (value, ours[name.replace(".query.", ".key_value.")])
            )  # (E, ...), (2 E, ...) -> (3 E, ...)
            name = name.replace("cross_attention.query.", "multihead_attn.in_proj_")
        elif ".cross_attention.key_value." in name or name == "head.bias":
            continue
        if "decoder" in name:  # their norms count up
            name = name.replace(".norm2.", ".norm3.").replace(".cross_norm.", ".norm2.")
        for own, other in TORCH_NAMES.items():
            name = name.replace(own, other)
        left.pop(name).copy_(value)
    assert not left, f"left without weights: {list(left)}"
    return net


def logits(net: Any, batch: Batch) -> Tensor:
    """Logits (B, N, V) of a batch, whosever the model is."""
    source, tokens, keep = batch["source"], batch["tokens"], batch["source_padding_mask"]
    if hasattr(net, "generation_config"):
        return net(
            input_ids=source, attention_mask=keep.long(), decoder_input_ids=tokens, use_cache=False
        ).logits
    return (
        net(source, tokens, keep)
        if isinstance(net, TorchTransformer)
        else net.logits(net(source, tokens, keep))
    )


def loss(net: Any, batch: Batch) -> Tensor:
    """Mean cross entropy as each side's own training computes it."""
    if hasattr(net, "loss"):
        return net.loss(
            net(batch["source"], batch["tokens"], batch["source_padding_mask"]), batch["targets"]
        )[0]
    if hasattr(net, "generation_config"):
        given = {
            "attention_mask": batch["source_padding_mask"].long(),
            "decoder_input_ids": batch["tokens"],
        }
        return net(
            input_ids=batch["source"], labels=batch["targets"], use_cache=False, **given
        ).loss
    return F.cross_entropy(logits(net, batch).flatten(0, 1), batch["targets"].flatten())


@torch.inference_mode()
def check(batches: Iterable[Batch]) -> None:
    """Prints how far the logits of the peers are from ours; ends the program if they are not equal."""
    ours, peers = (
        tessera().eval(),
        {"Hugging Face": hugging_face().eval(), "nn.Transformer": torch_transformer().eval()},
    )
    largest = dict.fromkeys(peers, 0.0)
    for batch in batches:
        expected, valid = logits(ours, batch), batch["targets"] >= 0  # (B, N, V), (B, N)
        for name, net in peers.items():
            largest[name] = max(
                largest[name], float((logits(net, batch) - expected)[valid].abs().max())
            )
    for name, difference in largest.items():
        print(f"largest difference of the logits from {name}'s {difference:.1e}")
    if max(largest.values()) > 1e-4:
        raise SystemExit("The outputs are not equal: the times say nothing.")
