"""BERT, DistilBERT and RoBERTa of transformers: weights and configs, converted both ways."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from modules.config import PoolerName, StackConfig, require
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.family import TransformersFamily
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    build_config,
    check_feedforward,
    check_fixed_options,
    check_heads,
    check_settings,
    check_unscaled,
    count_classes,
    quoted,
    write_options,
)
from modules.pretrained.weights import Layers, Names, State, drop_other_classifier, weight_names

HEADS = ("pool.", "pooler.", "head.", "sentence.")  # need not be in a file
POSITION_TABLE = "encoder.position.table"
SEGMENTS = "encoder.segment.weight"
# What all models of these families have.
COMMON = {
    "position": "learned",
    "embedding_norm": True,
    "embedding_width": None,
    "order": "post",
    "norm": "layernorm",
    "final_norm": False,
    "attention": "dot",
    "bias": True,
    "qkv_bias": True,
    "mlp_bias": True,
}
DEFAULTS = {
    "max_length": 512,
    "segments": 2,
    "feedforward": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "norm_eps": 1e-12,
}
ONLY = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "pruned_heads": {},
}


@dataclass(frozen=True, kw_only=True)
class BertFamily(TransformersFamily[BertConfig]):
    """One of the three; arguments as `TransformersFamily`, and:

    Args:
        pooler: The layer before the classifier.
        token_bias: Their name of the masked language model's bias of each token.
        tied: Their names of tied weights, each with the name of the original.
        pad_id: The padding token if the file does not say.
        offset_positions: Whether positions start after the number of the padding token, not at 0.
    """

    pooler: PoolerName
    token_bias: str
    tied: dict[str, str]
    pad_id: int = 0
    offset_positions: bool = False
    optional: tuple[str, ...] = HEADS
    required: tuple[str, ...] = ("vocabulary", "width", "depth", "heads", "mlp_width")
    activations: Any = field(default_factory=lambda: ACTIVATIONS)

    def first_position(self, config: BertConfig) -> int:
        """Returns the row of their table where positions start."""
        return config.pad_id + 1 if self.offset_positions else 0

    # Weights --------------------------------------------------------------------------------------

    def names(self, config: BertConfig) -> Names:
        embeddings = f"{self.name}.embeddings"
        layers: Layers = {
            "encoder.embed": f"{embeddings}.word_embeddings",
            "encoder.norm": f"{embeddings}.LayerNorm",
            **self.layers,
        }
        tensors = {
            POSITION_TABLE: f"{embeddings}.position_embeddings.weight",
            SEGMENTS: f"{embeddings}.token_type_embeddings.weight",
            "head.tokens.bias": self.token_bias,
        }
        return weight_names(layers, config.stack.depth, tensors)

    def networks(self, config: BertConfig) -> list[nn.Module]:
        """Builds both models, with all heads that a file may hold."""
        full = replace(
            config,
            num_classes=config.num_classes or 1,
            pooler=self.pooler,
            next_sentence=config.segments > 1,
        )
        return [BertClassifier(full), BertMaskedLM(full)]

    def copies(self, config: BertConfig) -> dict[str, str]:
        return self.tied

    def full_name(self, name: str) -> str:
        """Adds the prefix of a bare encoder; norms of old files have gamma and beta."""
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        bare = re.match(r"(embeddings|encoder|transformer|pooler)\.", name)
        return f"{self.name}.{name}" if bare else name

    def import_tensor(self, name: str, value: Tensor, config: BertConfig) -> Tensor:
        """Drops the positions that no token has."""
        return value[self.first_position(config) :] if name == POSITION_TABLE else value  # (N, E)

    def export_tensor(self, name: str, value: Tensor, config: BertConfig) -> Tensor:
        """Adds zeros for the positions that no token has."""
        if name != POSITION_TABLE:
            return value
        unused = value.new_zeros(self.first_position(config), value.shape[1])
        return torch.cat((unused, value))  # (first + N, E)

    def weights_from_external(self, state: State, config: BertConfig) -> State:
        """As in the base class; a classifier for another number of classes is left out."""
        return drop_other_classifier(
            super().weights_from_external(state, config), config.num_classes
        )

    def weights_to_external(self, state: State, config: BertConfig) -> State:
        """As in the base class, and the copies of tied weights."""
        self.check(config)
        if "head.linear.weight" in state:
            self.check_classifier(config)
        has_segments = config.segments or "segments" in self.fixed
        if not has_segments:
            state = {**state, SEGMENTS: state[POSITION_TABLE].new_zeros(1, config.stack.width)}
        theirs = super().weights_to_external(state, config)
        if self.token_bias in theirs:
            theirs |= {copy: theirs[original].clone() for copy, original in self.tied.items()}
        return theirs

    # Configs --------------------------------------------------------------------------------------

    def config_from_external(self, settings: Settings) -> BertConfig:
        """Returns our config; `num_classes` is null unless the file describes a classifier."""
        kind = settings.get("position_embedding_type") or "absolute"
        require(
            kind == "absolute",
            f"position_embedding_type {quoted(kind)} is not supported; "
            'choose a model with "absolute".',
        )
        check_settings(settings, ONLY)
        options = {"pad_id": self.pad_id, **self.read(settings, StackConfig, BertConfig)}
        options.setdefault("head_dropout", options["dropout"])
        if self.offset_positions:
            options["max_length"] -= options["pad_id"] + 1
            options["pooler_dropout"] = options["head_dropout"]
        options |= {
            "num_classes": count_classes(settings, "SequenceClassification"),
            "embedding_norm": True,
            "pooler": self.pooler,
            "order": "post",
            "mlp_dropout": 0.0,
        }
        return build_config(BertConfig, options)

    def config_to_external(
        self, config: BertConfig, class_names: list[str] | None = None
    ) -> Settings:
        """Returns the config.json of a model of ours: a classifier, or None: a masked LM.

        Raises `ValueError` if no model of theirs can equal ours, with the reason.
        """
        self.check(config)
        settings = write_options(config, self.options, self.activations)
        settings["max_position_embeddings"] += self.first_position(config)
        settings["model_type"] = self.name
        if "type_vocab_size" in settings:
            settings["type_vocab_size"] = max(1, config.segments)
        task = "PreTraining" if config.next_sentence else "MaskedLM"
        if class_names is not None:
            self.check_classifier(config)
            task = "SequenceClassification"
            settings["id2label"] = {str(i): name for i, name in enumerate(class_names)}
            settings["label2id"] = {name: i for i, name in enumerate(class_names)}
        settings["architectures"] = [f"{self.architecture}For{task}"]
        return settings

    def check(self, config: BertConfig) -> None:
        check_fixed_options(self.name, config, COMMON | self.fixed)
        check_unscaled(self.name, config)
        check_feedforward(self.name, config, self.activations)
        check_heads(self.name, config.stack)

    def check_classifier(self, config: BertConfig) -> None:
        """The same for what comes after the encoder in a classifier."""
        check_fixed_options(self.name, config, {"pool": "cls", "pooler": self.pooler})


# Names --------------------------------------------------------------------------------------------

BLOCK = "encoder.stack.blocks.{i}"
COMMON_OPTIONS = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "max_length",
    "pad_token_id": "pad_id",
}
BERT_OPTIONS = COMMON_OPTIONS | {
    "type_vocab_size": "segments",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_width",
    "hidden_act": "feedforward",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_eps",
    "classifier_dropout": "head_dropout",
}
DISTILBERT_OPTIONS = COMMON_OPTIONS | {
    "dim": "width",
    "n_layers": "depth",
    "n_heads": "heads",
    "hidden_dim": "mlp_width",
    "activation": "feedforward",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "seq_classif_dropout": "head_dropout",
}


def bert_blocks(block: str) -> Layers:
    """Returns the layers of a block of BERT and RoBERTa; `block` is their name of it."""
    attention = f"{block}.attention.self"
    return {
        f"{BLOCK}.attention.qkv": (f"{attention}.query", f"{attention}.key", f"{attention}.value"),
        f"{BLOCK}.attention.output": f"{block}.attention.output.dense",
        f"{BLOCK}.norm1": f"{block}.attention.output.LayerNorm",
        f"{BLOCK}.feedforward.up": f"{block}.intermediate.dense",
        f"{BLOCK}.feedforward.down": f"{block}.output.dense",
        f"{BLOCK}.norm2": f"{block}.output.LayerNorm",
    }


DISTILBERT_BLOCK = "distilbert.transformer.layer.{i}"
BERT = BertFamily(
    name="bert",
    architecture="Bert",
    layers={
        **bert_blocks("bert.encoder.layer.{i}"),
        "pooler.dense": "bert.pooler.dense",
        "head.linear": "classifier",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "sentence.linear": "cls.seq_relationship",
    },
    unused=r"embeddings\.position_ids$",
    token_bias="cls.predictions.bias",
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    pooler="tanh",
    options=BERT_OPTIONS,
    defaults=DEFAULTS,
)
DISTILBERT = BertFamily(
    name="distilbert",
    architecture="DistilBert",
    layers={
        f"{BLOCK}.attention.qkv": (
            f"{DISTILBERT_BLOCK}.attention.q_lin",
            f"{DISTILBERT_BLOCK}.attention.k_lin",
            f"{DISTILBERT_BLOCK}.attention.v_lin",
        ),
        f"{BLOCK}.attention.output": f"{DISTILBERT_BLOCK}.attention.out_lin",
        f"{BLOCK}.norm1": f"{DISTILBERT_BLOCK}.sa_layer_norm",
        f"{BLOCK}.feedforward.up": f"{DISTILBERT_BLOCK}.ffn.lin1",
        f"{BLOCK}.feedforward.down": f"{DISTILBERT_BLOCK}.ffn.lin2",
        f"{BLOCK}.norm2": f"{DISTILBERT_BLOCK}.output_layer_norm",
        "pooler.dense": "pre_classifier",
        "head.linear": "classifier",
        "head.dense": "vocab_transform",
        "head.norm": "vocab_layer_norm",
    },
    unused=r"embeddings\.position_ids$",
    token_bias="vocab_projector.bias",
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    pooler="relu",
    options=DISTILBERT_OPTIONS,
    defaults=DEFAULTS,
    fixed={"segments": 0, "norm_eps": 1e-12},
)
ROBERTA = BertFamily(
    name="roberta",
    architecture="Roberta",
    layers={
        **bert_blocks("roberta.encoder.layer.{i}"),
        "pooler.dense": "classifier.dense",
        "head.linear": "classifier.out_proj",
        "head.dense": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
    },
    unused=r"embeddings\.position_ids$|^(roberta\.)?pooler\.",  # its classifier has its own layer
    token_bias="lm_head.bias",
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    pooler="tanh",
    options=BERT_OPTIONS,
    defaults=DEFAULTS,
    fixed={"feedforward": "gelu"},
    only={"hidden_act": "gelu"},  # its head for masked tokens has this activation in any case
    pad_id=1,
    offset_positions=True,
)
FAMILIES = {family.name: family for family in (BERT, DISTILBERT, ROBERTA)}
