"""Configs of BERT, DistilBERT and RoBERTa from and to the `config.json` of Hugging Face."""

from dataclasses import dataclass, field
from typing import Any

from modules.config import PoolerName, StackConfig, require
from modules.models.bert import BertConfig
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    activation,
    built,
    check_aliases,
    check_feedforward,
    check_heads,
    check_options,
    check_settings,
    known_family,
    quoted,
    renamed,
    written,
)
from modules.schema import checked


@dataclass(frozen=True)
class Family:
    """What a config.json says, and what it leaves out.

    Args:
        model: What the names of their classes begin with.
        pooler: The layer before the classifier.
        settings: Their option -> ours, in `BertConfig` or its stack.
        fixed: Options of ours that are the same in all models of the family.
        padding: Number of the padding token where none is given.
        offset: Positions start behind the number of the padding token, rather than at 0.
        only: Options of theirs that are supported at this value alone.
    """

    model: str
    pooler: PoolerName
    settings: dict[str, str]
    fixed: dict[str, Any]
    padding: int = 0
    offset: bool = False
    only: dict[str, Any] = field(default_factory=dict)

    def first_position(self, config: BertConfig) -> int:
        """The row of their table where positions start."""
        return config.padding + 1 if self.offset else 0


SHARED = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "max_length",
    "pad_token_id": "padding",
}
BERT_SETTINGS = SHARED | {
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
DISTILBERT_SETTINGS = SHARED | {
    "dim": "width",
    "n_layers": "depth",
    "n_heads": "heads",
    "hidden_dim": "mlp_width",
    "activation": "feedforward",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "seq_classif_dropout": "head_dropout",
}
FAMILIES: dict[str, Family] = {
    "bert": Family("Bert", "tanh", BERT_SETTINGS, {}),
    "distilbert": Family(
        "DistilBert", "relu", DISTILBERT_SETTINGS, {"segments": 0, "norm_eps": 1e-12}
    ),
    "roberta": Family(
        "Roberta",
        "tanh",
        BERT_SETTINGS,
        {"feedforward": "gelu"},
        padding=1,
        offset=True,
        only={"hidden_act": "gelu"},  # its head for masked tokens has this activation in any case
    ),
}
ALWAYS = {
    "position": "learned",
    "embedding_norm": True,
    "order": "post",
    "norm": "layernorm",
    "final_norm": False,
    "attention": "dot",
    "bias": True,
    "qkv_bias": True,
    "mlp_bias": True,
}
USUAL = {
    "max_length": 512,
    "segments": 2,
    "feedforward": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "norm_eps": 1e-12,
}
NEEDED = ("vocabulary", "width", "depth", "heads", "mlp_width")
ONLY = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "pruned_heads": {},
}


def config_from_huggingface(settings: Settings) -> tuple[str, BertConfig]:
    """Family and config of a model, read off its config.json.

    Returns:
        Entry of `FAMILIES`, and our config; `num_classes` is null unless the file is about a classifier.

    Raises:
        ValueError: The model has parts that ours does not, or the file lacks a size, by name.
    """
    name = known_family(settings, FAMILIES)
    family = FAMILIES[name]
    kind = settings.get("position_embedding_type") or "absolute"
    require(
        kind == "absolute",
        f'position_embedding_type {quoted(kind)} is not supported; choose a model with "absolute".',
    )
    check_settings(settings, ONLY | family.only)
    given = renamed(settings, family.settings, NEEDED, StackConfig, BertConfig)
    check_aliases(settings, family.settings)
    options = {**USUAL, "padding": family.padding, **given, **family.fixed}
    options["feedforward"] = activation(options["feedforward"], ACTIVATIONS)
    options.setdefault("head_dropout", options["dropout"])
    if family.offset:
        options["max_length"] -= options["padding"] + 1
        options["pooler_dropout"] = options["head_dropout"]
    options |= {"num_classes": _classes(settings), "embedding_norm": True, "pooler": family.pooler}
    return name, built(BertConfig, {**options, "order": "post", "mlp_dropout": 0.0})


def _classes(settings: Settings) -> int | None:
    """Number of classes of a classifier; their files leave it out where it is 2."""
    count = checked(int | None, settings.get("num_labels"), "num_labels")
    names = checked(dict[Any, Any] | None, settings.get("id2label"), "id2label")
    if not any("SequenceClassification" in name for name in settings.get("architectures") or ()):
        return None
    return count or len(names or (0, 1))


def config_to_huggingface(
    family: str, config: BertConfig, class_names: list[str] | None = None
) -> Settings:
    """The config.json of a model of ours.

    Args:
        family: Entry of `FAMILIES`.
        config: Our model.
        class_names: One name per class; None: it is a masked language model, which may know sentences, too.

    Raises:
        ValueError: Their model cannot be like ours, with the reason.
    """
    check_expressible(family, config, classifies=class_names is not None)
    kind = FAMILIES[family]
    settings = written(config, kind.settings, ACTIVATIONS)
    settings["max_position_embeddings"] += kind.first_position(config)
    if "type_vocab_size" in settings:
        settings["type_vocab_size"] = max(1, config.segments)
    pretraining = "PreTraining" if config.next_sentence else "MaskedLM"
    task = pretraining if class_names is None else "SequenceClassification"
    settings |= {"model_type": family, "architectures": [f"{kind.model}For{task}"]}
    if class_names is not None:
        settings["id2label"] = {str(i): name for i, name in enumerate(class_names)}
        settings["label2id"] = {name: i for i, name in enumerate(class_names)}
    return settings


def check_expressible(family: str, config: BertConfig, classifies: bool) -> None:
    """Raises `ValueError` where a model of `family` cannot be like ours."""
    wanted = ALWAYS | FAMILIES[family].fixed
    if classifies:
        wanted |= {"pool": "cls", "pooler": FAMILIES[family].pooler}
    check_options(family, config, wanted)
    check_feedforward(family, config, ACTIVATIONS)
    check_heads(family, config.stack)
