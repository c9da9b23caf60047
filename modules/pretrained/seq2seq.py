"""Marian, BART and T5 weights from and to Hugging Face: tables of names, read both ways.

Where they compute otherwise, the weights make up for it: Marian's channels are put in another order, T5's queries and
its decoder's last norm take up the scales of scores and logits.
"""

import re
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from modules.config import GATED
from modules.init import RESIDUAL
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from modules.pretrained.names import (
    Layers,
    Names,
    State,
    check_fit,
    check_given,
    drop_copies,
    full_names,
    give,
    load_fitting,
    state_of,
    take,
)
from modules.pretrained.seq2seq_configs import check_expressible

HEAD = "lm_head"


@dataclass(frozen=True)
class Table:
    """How Hugging Face names the weights of one family, and the base of what the families compute otherwise.

    Args:
        prefix: What all names but those of the output layer begin with; files of bare models leave it out.
        block: Their name of a block; "{side}" stands for encoder or decoder, "{i}" for the number of the block.
        encoder: Our name of a layer in a block of the encoder -> theirs, without ".weight" / ".bias"; several of theirs
            are rows of ours one below the other.
        decoder: The same in a block of the decoder.
        others: The same outside of blocks.
        raw: Our full name -> theirs, where they do not end alike.
        unused: Names of weights that files may hold and no model of ours uses.
    """

    prefix: str
    block: str
    encoder: Layers
    decoder: Layers
    others: Layers = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)
    unused: str = r"\.version$"

    def names(self, config: Seq2SeqConfig) -> Names:
        """All of our names with theirs, those of tables of tokens aside."""
        names = full_names(self.others, 1, self.raw)
        for side, parts in (("encoder", self.encoder), ("decoder", self.decoder)):
            block = self.block.replace("{side}", side)
            layers: Layers = {}
            for ours, theirs in parts.items():
                several = (theirs,) if isinstance(theirs, str) else theirs
                layers[f"{side}.stack.blocks.{{i}}.{ours}"] = tuple(
                    f"{block}.{name}" for name in several
                )
            names |= full_names(layers, getattr(config, side).depth)
        return names

    def tokens(self, config: Seq2SeqConfig) -> tuple[Names, dict[str, str]]:
        """Our names of tables of tokens with theirs, and of their copies with what those repeat."""
        encoder, decoder = (
            f"{self.prefix}{side}.embed_tokens.weight" for side in ("encoder", "decoder")
        )
        shared, head = f"{self.prefix}shared.weight", f"{HEAD}.weight"
        if config.tying in ("all", "inputs"):
            names: Names = {"embed.weight": (shared,)}
            copies = {encoder: shared, decoder: shared}
        else:
            names, copies = {"source_embed.weight": (encoder,), "embed.weight": (decoder,)}, {}
        if config.tying in ("all", "target"):
            copies[head] = names["embed.weight"][0]
        else:
            names["unembed.weight"] = (head,)
        return names, copies

    def ours(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """A weight of theirs, under our name, as we compute with it."""
        return value

    def theirs(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """A weight of ours as they compute with it."""
        return value


class Bart(Table):
    """BART (Lewis 2020): two rows before the first position that nobody uses, a bias per token of two axes."""

    def ours(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Positions (2 + N, E) -> (N, E), biases (1, V) -> (V,)."""
        return (
            value[2:]
            if name.endswith("position.table")
            else value[0]
            if name == "head.bias"
            else value
        )

    def theirs(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Positions (N, E) -> (2 + N, E), biases (V,) -> (1, V)."""
        if name.endswith("position.table"):
            return torch.cat((value.new_zeros(2, value.shape[1]), value))  # (2 + N, E)
        return value[None] if name == "head.bias" else value


class Marian(Bart):
    """Marian (Junczys-Dowmunt 2018): in its positions all sines come before the cosines, where ours take turns.

    Channels have no order in a Transformer, so theirs are put into that of ours.
    """

    def ours(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Channels in another order."""
        return _turn(name, super().ours(name, value, config), _channels(config.encoder.width))

    def theirs(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Channels in another order."""
        return super().theirs(
            name, _turn(name, value, _channels(config.encoder.width).argsort()), config
        )


def _channels(width: int) -> Tensor:
    """Where the sines and cosines that take turns stand among sines, then cosines: (E,)."""
    return torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2))).argsort()


def _turn(name: str, value: Tensor, order: Tensor) -> Tensor:
    """Channels of token vectors in another order, in whichever axis of a weight they are; keeps the shape."""
    layer, end = name.split(".")[-2:]
    if layer in RESIDUAL or "norm" in layer:
        return value[order]
    return value[:, order] if end == "weight" else value


class T5(Table):
    """T5 (Raffel 2020): scores are not divided by sqrt(D), but vectors by sqrt(E) before they meet a shared table."""

    def names(self, config: Seq2SeqConfig) -> Names:
        """As in `Table`; with a gate, two layers take the place of one."""
        names = super().names(config)
        if config.encoder.feedforward not in GATED:
            return names
        gates = {}
        for ours, theirs in names.items():
            if ".feedforward.up." in ours:
                gates[ours] = tuple(part.replace(".wi.", ".wi_1.") for part in theirs)
                gates[ours.replace(".up.", ".gate.")] = tuple(
                    part.replace(".wi.", ".wi_0.") for part in theirs
                )
        return names | gates

    def ours(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Queries times sqrt(D), norm by sqrt(E); distances (buckets, H) -> (1, buckets, H)."""
        return self.scaled(
            name, value[None] if name.endswith("position.table") else value, config, 1.0
        )

    def theirs(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Queries by sqrt(D), norm times sqrt(E); distances (1, buckets, H) -> (buckets, H)."""
        return self.scaled(
            name, value[0] if name.endswith("position.table") else value, config, -1.0
        )

    @staticmethod
    def scaled(name: str, value: Tensor, config: Seq2SeqConfig, power: float) -> Tensor:
        """Queries times sqrt(D), the last norm of a model with one table by sqrt(E); both to a power."""
        if name.endswith((".qkv.weight", ".query.weight")):
            rows = config.encoder.heads * config.encoder.resolved.head_dim
            return torch.cat(
                (value[:rows] * config.encoder.resolved.head_dim ** (power / 2), value[rows:])
            )  # keeps the shape
        if name == "decoder.stack.norm.weight" and config.tying == "all":
            return value * config.encoder.width ** (-power / 2)
        return value


BART_BLOCK: Layers = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.out_proj",
    "norm1": "self_attn_layer_norm",
    "feedforward.up": "fc1",
    "feedforward.down": "fc2",
    "norm2": "final_layer_norm",
}
BART_CROSS: Layers = {
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_norm": "encoder_attn_layer_norm",
}
BART = ("model.", "model.{side}.layers.{i}", BART_BLOCK, BART_BLOCK | BART_CROSS)
T5_ATTENTION: Layers = {
    "norm1": "layer.0.layer_norm",
    "attention.qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
    "attention.output": "layer.0.SelfAttention.o",
}
T5_CROSS: Layers = {
    "cross_norm": "layer.1.layer_norm",
    "cross_attention.query": "layer.1.EncDecAttention.q",
    "cross_attention.key_value": tuple(f"layer.1.EncDecAttention.{part}" for part in "kv"),
    "cross_attention.output": "layer.1.EncDecAttention.o",
}
T5_FEEDFORWARD: dict[int, Layers] = {
    place: {
        "norm2": f"layer.{place}.layer_norm",
        "feedforward.up": f"layer.{place}.DenseReluDense.wi",
        "feedforward.down": f"layer.{place}.DenseReluDense.wo",
    }
    for place in (1, 2)
}
TABLES: dict[str, Table] = {
    "marian": Marian(
        *BART,
        raw={"head.bias": "final_logits_bias"},
        unused=r"\.version$|\.embed_positions\.weight$",
    ),
    "bart": Bart(
        *BART,
        {f"{side}.norm": f"model.{side}.layernorm_embedding" for side in ("encoder", "decoder")},
        {
            "encoder.position.table": "model.encoder.embed_positions.weight",
            "decoder.position.table": "model.decoder.embed_positions.weight",
            "head.bias": "final_logits_bias",
        },
    ),
    "t5": T5(
        "",
        "{side}.block.{i}",
        T5_ATTENTION | T5_FEEDFORWARD[1],
        T5_ATTENTION | T5_CROSS | T5_FEEDFORWARD[2],
        {f"{side}.stack.norm": f"{side}.final_layer_norm" for side in ("encoder", "decoder")},
        {
            f"{side}.position.table": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            for side in ("encoder", "decoder")
        },
        r"\.EncDecAttention\.relative_attention_bias\.weight$",  # in old files
    ),
}


def to_tessera(family: str, state: State, config: Seq2SeqConfig) -> State:
    """Hugging Face's weights under our names.

    Args:
        family: Entry of `TABLES`.
        state: Their `state_dict()` or file; names without prefix are understood, what nobody uses is left out.
        config: Our model.

    Returns:
        What `load_weights` puts into `Seq2Seq(config)`; weights that are theirs as they stand are shared, not copied.

    Raises:
        ValueError: Weights that our model has no place for, or that are missing or of another shape, by name.
    """
    table = TABLES[family]
    whole = (table.prefix, HEAD, "final_logits_bias")
    rest = {
        name if name.startswith(whole) else table.prefix + name: value
        for name, value in state.items()
        if not re.search(table.unused, name)
    }
    names, copies = table.tokens(config)
    drop_copies(copies, rest, "the config says that they are one")
    if config.tying == "inputs" and (shared := f"{table.prefix}shared.weight") in rest:
        rest.setdefault(f"{HEAD}.weight", rest[shared])  # they are one in that file
    ours = take(names | table.names(config), rest, partial(table.ours, config=config))
    if config.output_bias:
        ours.setdefault("head.bias", torch.zeros(config.target_vocabulary or 0))
    check_fit(family, ours, rest, state_of(partial(Seq2Seq, config)), ())
    return ours


def load_weights(net: nn.Module, state: State) -> None:
    """Puts weights under our names into a `Seq2Seq`, all of them.

    Raises:
        ValueError: Weights that are missing, left over or of another shape, by name.
    """
    load_fitting(net, state)


def from_tessera(family: str, state: State, config: Seq2SeqConfig) -> State:
    """Our weights under Hugging Face's names, for its model of the same sizes; tables that are one are there once.

    Args:
        family: Entry of `TABLES`.
        state: `state_dict()` of `Seq2Seq(config)`.
        config: Our model.

    Raises:
        ValueError: Their model cannot be like ours, with the reason.
    """
    check_expressible(family, config)
    table, rest = TABLES[family], dict(state)
    if "head.bias" in table.raw:
        rest.setdefault("head.bias", torch.zeros(config.target_vocabulary or 0))
    rest = {name: table.theirs(name, value, config) for name, value in rest.items()}
    theirs = give(table.tokens(config)[0] | table.names(config), rest)
    check_given(family, rest)
    return theirs
