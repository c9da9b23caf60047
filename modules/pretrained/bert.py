"""BERT, DistilBERT and RoBERTa weights from and to Hugging Face: one table of names per family, read both ways."""

import re
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert_configs import FAMILIES, check_expressible
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

HEADS = ("pool.", "pooler.", "head.", "sentence.")
PLACES = "encoder.position.table"


@dataclass(frozen=True)
class Table:
    """How Hugging Face names the weights of one family.

    Args:
        block: Their name of a block.
        parts: Our name of a part of a block -> theirs; "q", "k" and "v" are rows of ours one below the other.
        heads: Our name of a layer of a head -> theirs, without ".weight" / ".bias".
        bias: Their bias of each token in the masked language model.
        copies: Names of theirs that repeat another one.
        ignored: What no model here uses.
        segments: Whether there are segments.
    """

    block: str
    parts: dict[str, str]
    heads: dict[str, str]
    bias: str
    copies: dict[str, str]
    ignored: tuple[str, ...] = ()
    segments: bool = True

    @property
    def embeddings(self) -> str:
        """What the names of their embeddings begin with."""
        return self.block.partition(".")[0] + ".embeddings"

    def names(self, config: BertConfig) -> Names:
        """All of our names with theirs."""
        ours = "encoder.stack.blocks.{i}"
        layers: Layers = {"encoder.embed": f"{self.embeddings}.word_embeddings", **self.heads}
        layers["encoder.norm"] = f"{self.embeddings}.LayerNorm"
        layers[f"{ours}.attention.qkv"] = tuple(
            f"{self.block}.{self.parts[part]}" for part in "qkv"
        )
        layers |= {
            f"{ours}.{part}": f"{self.block}.{name}"
            for part, name in self.parts.items()
            if part not in "qkv"
        }
        raw = {
            PLACES: f"{self.embeddings}.position_embeddings.weight",
            "head.tokens.bias": self.bias,
        }
        if self.segments:
            raw["encoder.segment.weight"] = f"{self.embeddings}.token_type_embeddings.weight"
        return full_names(layers, config.stack.depth, raw)


BERT_PARTS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "attention.output": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "norm2": "output.LayerNorm",
}
DISTILBERT_PARTS = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "norm1": "sa_layer_norm",
    "feedforward.up": "ffn.lin1",
    "feedforward.down": "ffn.lin2",
    "norm2": "output_layer_norm",
}
TABLES: dict[str, Table] = {
    "bert": Table(
        "bert.encoder.layer.{i}",
        BERT_PARTS,
        {
            "pooler.dense": "bert.pooler.dense",
            "head.linear": "classifier",
            "head.dense": "cls.predictions.transform.dense",
            "head.norm": "cls.predictions.transform.LayerNorm",
            "sentence.linear": "cls.seq_relationship",
        },
        "cls.predictions.bias",
        {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    ),
    "distilbert": Table(
        "distilbert.transformer.layer.{i}",
        DISTILBERT_PARTS,
        {
            "pooler.dense": "pre_classifier",
            "head.linear": "classifier",
            "head.dense": "vocab_transform",
            "head.norm": "vocab_layer_norm",
        },
        "vocab_projector.bias",
        {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        segments=False,
    ),
    "roberta": Table(
        "roberta.encoder.layer.{i}",
        BERT_PARTS,
        {
            "pooler.dense": "classifier.dense",
            "head.linear": "classifier.out_proj",
            "head.dense": "lm_head.dense",
            "head.norm": "lm_head.layer_norm",
        },
        "lm_head.bias",
        {
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        (
            "roberta.pooler.dense.weight",
            "roberta.pooler.dense.bias",
        ),  # its own classifier has another layer instead
    ),
}


def to_tessera(family: str, state: State, config: BertConfig) -> State:
    """Hugging Face's weights under our names, those of all heads that `state` has.

    Args:
        family: Entry of `TABLES`.
        state: Their `state_dict()` or file; old files' `gamma` and `beta`, and names without prefix, are understood.
        config: Our model; a classifier for another number of classes is left out.

    Returns:
        What `load_weights` puts into `BertClassifier(config)` or `BertMaskedLM(config)`.

    Raises:
        ValueError: Weights that our models have no place for, or weights of the encoder that are missing, by name.
    """
    table = TABLES[family]
    rest = {_modern(name, family): value for name, value in state.items()}
    for name in (f"{table.embeddings}.position_ids", *table.ignored):
        rest.pop(name, None)
    drop_copies(table.copies, rest, "models with two separate tables are not supported")
    first = FAMILIES[family].first_position(config)

    def change(name: str, value: Tensor) -> Tensor:
        return value[first:] if name == PLACES else value  # (positions, E)

    ours = take(table.names(config), rest, change)
    heads = {"pooler": FAMILIES[family].pooler, "next_sentence": config.segments > 1}
    full = replace(config, num_classes=config.num_classes or 1, **heads)  # type: ignore[arg-type]
    wanted = state_of(partial(BertClassifier, full), partial(BertMaskedLM, full))
    check_fit(family, ours, rest, wanted, HEADS)
    if "head.linear.bias" in ours and ours["head.linear.bias"].shape != (config.num_classes,):
        ours = {name: value for name, value in ours.items() if not name.startswith("head.linear.")}
    return ours


def _modern(name: str, prefix: str) -> str:
    """A name as today's files have it: with the prefix, and with `weight` and `bias` in norms."""
    name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
    return (
        f"{prefix}.{name}" if re.match(r"(embeddings|encoder|transformer|pooler)\.", name) else name
    )


def load_weights(net: nn.Module, state: State) -> list[str]:
    """Puts weights under our names into a model: all of its encoder, and what fits of its heads.

    Args:
        net: `BertClassifier` or `BertMaskedLM`.
        state: What `to_tessera` returned, or the `state_dict()` of either model with the same encoder.

    Returns:
        Names of the weights that keep their start values, all of them in heads.

    Raises:
        ValueError: Weights of the encoder that are missing, left over or of another shape, by name.
    """
    return load_fitting(net, state, HEADS)


def from_tessera(family: str, state: State, config: BertConfig) -> State:
    """Our weights under Hugging Face's names, for its classifier or masked language model of the same sizes.

    Args:
        family: Entry of `TABLES`.
        state: `state_dict()` of `BertClassifier` or `BertMaskedLM`.
        config: Our model.

    Raises:
        ValueError: Their model cannot be like ours, with the reason.
    """
    table, rest = TABLES[family], dict(state)
    check_expressible(family, config, classifies="head.linear.weight" in state)
    unused = rest[PLACES].new_zeros(FAMILIES[family].first_position(config), config.stack.width)
    rest[PLACES] = torch.cat((unused, rest[PLACES]))  # (first + positions, E)
    if table.segments and not config.segments:
        rest["encoder.segment.weight"] = rest[PLACES].new_zeros(1, config.stack.width)
    theirs = give(table.names(config), rest)
    check_given(family, rest)
    copies = table.copies if table.bias in theirs else {}
    return theirs | {copy: theirs[original].clone() for copy, original in copies.items()}
