"""What benchmarks of encoder-decoders share: Multi30k, and the same model in three libraries."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks import _compare

# The preset "tiny".
WIDTH = 128
LAYERS = 4
HEADS = 4
HIDDEN = 256
VOCABULARY = 8000

LENGTH = 64  # tokens of a sentence at most
Batch = dict[str, Any]

# Parts of parameter names, ours and those of `nn.Transformer`, in the order of their replacement.
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
    """Multi30k, English to German, with one tokenizer, as `python -m tasks.seq2seq` reads it."""
    from datamodules.text import TextLoading
    from datamodules.tokenizers import PairTokenizerConfig
    from datamodules.translation import TranslationData

    return TranslationData(
        "txt",
        str(_compare.data_folder("multi30k")),
        "en-de",
        batch_size,
        LENGTH,
        tokenizer=PairTokenizerConfig("bpe", VOCABULARY),
        loading=TextLoading(eval_batch_size=batch_size),
    )


class Sizes(NamedTuple):
    """Width E, blocks of each side, heads, hidden values of feed-forward layers, and tokens V."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int


TINY = Sizes(WIDTH, LAYERS, HEADS, HIDDEN, VOCABULARY)


def hugging_face(dropout: float = 0.0, spread: float = 0.02, sizes: Sizes = TINY) -> Any:
    """Hugging Face's Marian model, the same weights in every process.

    Args:
        dropout: Rate of all but attention weights and hidden values.
        spread: Standard deviation of the initial weights.
        sizes: Of the model.
    """
    from transformers import MarianConfig, MarianMTModel

    sides = {}
    for side in ("encoder", "decoder"):
        shape = {"layers": sizes.layers, "attention_heads": sizes.heads, "ffn_dim": sizes.hidden}
        sides |= {f"{side}_{name}": value for name, value in shape.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 6, "decoder_start_token_id": 5}
    config = MarianConfig(
        vocab_size=sizes.vocabulary,
        d_model=sizes.width,
        activation_function="relu",
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=512,
        init_std=spread,
        forced_eos_token_id=None,
        **sides,
        **tokens,
    )
    torch.manual_seed(0)
    return MarianMTModel(config)


def tessera(dropout: float = 0.0, spread: float = 0.02, sizes: Sizes = TINY) -> Any:
    """Our model with the weights of Hugging Face's; arguments as there."""
    from modules.models.seq2seq import Seq2Seq
    from modules.pretrained.family import config_from_huggingface
    from modules.pretrained.seq2seq import FAMILIES
    from modules.pretrained.weights import load_weights

    theirs = hugging_face(dropout, spread, sizes)
    family, found = config_from_huggingface(theirs.config.to_dict(), FAMILIES)
    rates = {"dropout": dropout, "mlp_dropout": 0.0, "attention_dropout": 0.0}
    encoder = replace(found.encoder, **rates)
    config = replace(found, encoder=encoder, decoder=replace(found.decoder, **rates))
    net = Seq2Seq(config)
    load_weights(net, FAMILIES[family].weights_from_external(theirs.state_dict(), config))
    return net


class TorchTransformer(nn.Module):
    """`nn.Transformer` with one table for source, target and output, and sinusoidal positions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.core = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, dropout, batch_first=True, norm_first=False
        )
        self.core.encoder.norm = self.core.decoder.norm = None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        rate = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.arange(512)[:, None] * rate  # (512, E / 2)
        waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)  # (512, E)
        self.register_buffer("waves", waves)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0

    def embedded(self, tokens: Tensor) -> Tensor:
        """(B, N) -> (B, N, E)."""
        return self.dropout(self.embed(tokens) * WIDTH**0.5 + self.waves[: tokens.shape[1]])

    def forward(self, source: Tensor, tokens: Tensor, source_padding_mask: Tensor) -> Tensor:
        """(B, M), (B, N), (B, M) -> logits (B, N, V)."""
        shape = (tokens.shape[1], tokens.shape[1])
        later = torch.ones(shape, dtype=torch.bool, device=tokens.device).triu(1)  # (N, N)
        hidden = self.core(
            self.embedded(source),
            self.embedded(tokens),
            tgt_mask=later,
            src_key_padding_mask=~source_padding_mask,
            memory_key_padding_mask=~source_padding_mask,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.embed.weight)


@torch.no_grad()
def torch_transformer(dropout: float = 0.0) -> TorchTransformer:
    """The same model with `nn.Transformer` and the weights of ours."""
    net = TorchTransformer(dropout)
    ours = dict(tessera().named_parameters())
    left = {name.removeprefix("core."): value for name, value in net.named_parameters()}
    for name, value in ours.items():
        if ".cross_attention.query." in name:
            others = ours[name.replace(".query.", ".key_value.")]
            value = torch.cat((value, others))  # (E, ...), (2 E, ...) -> (3 E, ...)
            name = name.replace("cross_attention.query.", "multihead_attn.in_proj_")
        elif ".cross_attention.key_value." in name or name == "head.bias":
            continue
        if "decoder" in name:  # their norms are numbered
            name = name.replace(".norm2.", ".norm3.").replace(".cross_norm.", ".norm2.")
        for own, other in TORCH_NAMES.items():
            name = name.replace(own, other)
        left.pop(name).copy_(value)
    assert not left, f"left without weights: {list(left)}"
    return net


def logits(name: str, net: Any, batch: Batch) -> Tensor:
    """Logits (B, N, V) of a batch."""
    source, tokens, padding_mask = batch["source"], batch["tokens"], batch["source_padding_mask"]
    if name == "hugging face":
        inputs = {"input_ids": source, "attention_mask": padding_mask.long()}
        return net(**inputs, decoder_input_ids=tokens, use_cache=False).logits
    found = net(source, tokens, padding_mask)
    return net.logits(found) if name == "tessera" else found


def loss(name: str, net: Any, batch: Batch) -> Tensor:
    """Mean cross entropy as each side's own training computes it."""
    source, tokens, padding_mask = batch["source"], batch["tokens"], batch["source_padding_mask"]
    if name == "tessera":
        return net.loss(net(source, tokens, padding_mask), batch["targets"])[0]
    if name == "hugging face":
        inputs = {"input_ids": source, "attention_mask": padding_mask.long()}
        targets = {"decoder_input_ids": tokens, "labels": batch["targets"]}
        return net(**inputs, **targets, use_cache=False).loss
    return F.cross_entropy(logits(name, net, batch).flatten(0, 1), batch["targets"].flatten())


BUILDERS = {"hugging face": hugging_face, "nn.Transformer": torch_transformer, "tessera": tessera}


@torch.inference_mode()
def check(batches: Iterable[Batch]) -> None:
    """Ends the program unless the logits of the peers equal ours."""
    nets = {name: build().eval() for name, build in BUILDERS.items()}
    largest = dict.fromkeys([name for name in nets if name != "tessera"], 0.0)
    for batch in batches:
        expected = logits("tessera", nets["tessera"], batch)  # (B, N, V)
        valid = batch["targets"] >= 0  # (B, N)
        for name, before in largest.items():
            found = (logits(name, nets[name], batch) - expected)[valid].abs().max()
            largest[name] = max(before, float(found))
    _compare.require_equal(largest)
