"""GPT-2, Llama, Mistral and Qwen weights from and to Hugging Face: tables of names, read both ways."""

import re
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from modules.models.gpt import Decoder, DecoderConfig
from modules.pretrained.decoder_configs import check_expressible
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

HEAD = "lm_head"
BUFFERS = (
    r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$"  # masks and frequencies in old files
)


@dataclass(frozen=True)
class Table:
    """How Hugging Face names the weights of one family.

    Args:
        prefix: What all names but those of the output layer begin with; files of bare models leave it out.
        embed: Their table of tokens.
        layers: Our name of a layer -> theirs, without ".weight" / ".bias"; several of theirs are rows of ours one
            below the other; "{i}" stands for the number of a block.
        positions: Their table of positions; None: they are rotary.
        turned: Ends of our names of layers whose matrices they keep as (inputs, outputs).
    """

    prefix: str
    embed: str
    layers: Layers
    positions: str | None = None
    turned: tuple[str, ...] = ()

    def names(self, config: DecoderConfig) -> Names:
        """All of our names with theirs."""
        raw = {} if self.positions is None else {"position.table": self.positions}
        layers: Layers = {"embed": self.embed, "unembed": HEAD, **self.layers}
        return full_names(layers, config.stack.depth, raw)

    def turn(self, name: str, value: Tensor) -> Tensor:
        """A weight under our name, a `turned` matrix the other way round, theirs to ours or ours to theirs."""
        turned = name.endswith(tuple(f"{layer}.weight" for layer in self.turned))
        return value.t() if turned else value


GPT2 = Table(
    "transformer.",
    "transformer.wte",
    {
        "stack.blocks.{i}.norm1": "transformer.h.{i}.ln_1",
        "stack.blocks.{i}.attention.qkv": "transformer.h.{i}.attn.c_attn",
        "stack.blocks.{i}.attention.output": "transformer.h.{i}.attn.c_proj",
        "stack.blocks.{i}.norm2": "transformer.h.{i}.ln_2",
        "stack.blocks.{i}.feedforward.up": "transformer.h.{i}.mlp.c_fc",
        "stack.blocks.{i}.feedforward.down": "transformer.h.{i}.mlp.c_proj",
        "stack.norm": "transformer.ln_f",
    },
    "transformer.wpe.weight",
    ("attention.qkv", "attention.output", "feedforward.up", "feedforward.down"),
)
LLAMA = Table(
    "model.",
    "model.embed_tokens",
    {
        "stack.blocks.{i}.norm1": "model.layers.{i}.input_layernorm",
        "stack.blocks.{i}.attention.qkv": (
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        "stack.blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
        "stack.blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
        "stack.blocks.{i}.attention.output": "model.layers.{i}.self_attn.o_proj",
        "stack.blocks.{i}.norm2": "model.layers.{i}.post_attention_layernorm",
        "stack.blocks.{i}.feedforward.gate": "model.layers.{i}.mlp.gate_proj",
        "stack.blocks.{i}.feedforward.up": "model.layers.{i}.mlp.up_proj",
        "stack.blocks.{i}.feedforward.down": "model.layers.{i}.mlp.down_proj",
        "stack.norm": "model.norm",
    },
)
TABLES: dict[str, Table] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
}


def to_tessera(family: str, state: State, config: DecoderConfig) -> State:
    """Hugging Face's weights under our names.

    Args:
        family: Entry of `TABLES`.
        state: Their `state_dict()` or file; names without prefix are understood, buffers of old files left out.
        config: Our model.

    Returns:
        What `load_weights` puts into `Decoder(config)`; matrices that are theirs as they stand are shared, not copied.

    Raises:
        ValueError: Weights that our model has no place for, or that are missing or of another shape, by name.
    """
    table = TABLES[family]
    whole = (table.prefix, f"{HEAD}.")
    rest = {
        name if name.startswith(whole) else table.prefix + name: value
        for name, value in state.items()
        if not re.search(BUFFERS, name)
    }
    if config.tied:
        copies = {f"{HEAD}.weight": f"{table.embed}.weight"}
        drop_copies(
            copies, rest, "two separate tables need tie_word_embeddings false in config.json"
        )
    ours = take(table.names(config), rest, table.turn)
    check_fit(family, ours, rest, state_of(partial(Decoder, config)), ())
    return ours


def load_weights(net: nn.Module, state: State) -> None:
    """Puts weights under our names into a `Decoder`, all of them.

    Raises:
        ValueError: Weights that are missing, left over or of another shape, by name.
    """
    load_fitting(net, state)


def from_tessera(family: str, state: State, config: DecoderConfig) -> State:
    """Our weights under Hugging Face's names, for its decoder of the same sizes; a tied table is there once.

    Args:
        family: Entry of `TABLES`.
        state: `state_dict()` of `Decoder(config)`.
        config: Our model.

    Raises:
        ValueError: Their model cannot be like ours, with the reason.
    """
    check_expressible(family, config)
    table, stack = TABLES[family], config.stack
    sizes = stack.resolved
    shared = sizes.kv_heads * sizes.head_dim
    rest = {name: table.turn(name, value) for name, value in state.items()}
    theirs = give(table.names(config), rest, (stack.heads * sizes.head_dim, shared, shared))
    check_given(family, rest)
    return theirs
