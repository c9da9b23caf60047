"""Configs of Marian, BART and T5 encoder-decoders from and to the `config.json` of Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from modules.config import FeedForwardName, StackConfig, require
from modules.models.seq2seq_config import Seq2SeqConfig, TyingName
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    activation,
    built,
    check_aliases,
    check_feedforward,
    check_heads,
    check_options,
    check_position_options,
    check_settings,
    known_family,
    option,
    renamed,
    written,
)
from modules.schema import checked

SIDES: dict[str, Settings] = {
    "encoder": {},
    "decoder": {"causal": True, "cross_attention": True},
}


@dataclass(frozen=True)
class Family:
    """What a config.json says, and what it leaves out.

    Args:
        architecture: Name of their class.
        settings: Their option -> ours, in `Seq2SeqConfig` or in both stacks.
        sides: Stack: their option -> ours, where the stacks may differ.
        fixed: Options of `Seq2SeqConfig` that are the same in all models of the family.
        blocks: Options of both stacks that are.
        ties: Options of theirs that say which tables are one.
        tyings: Their values -> `tying`.
        usual: What options of theirs are where the file does not say.
        activations: Their name of an activation -> ours.
        only: Options of theirs that are supported at this value alone.
    """

    architecture: str
    settings: dict[str, str]
    sides: dict[str, dict[str, str]]
    fixed: Settings
    blocks: Settings
    ties: tuple[str, ...]
    tyings: dict[tuple[bool, ...], TyingName]
    usual: Settings
    activations: Mapping[str, FeedForwardName]
    only: Settings


BART_SETTINGS = {
    "vocab_size": "source_vocabulary",
    "max_position_embeddings": "max_length",
    "d_model": "width",
    "activation_function": "feedforward",
    "scale_embedding": "scale_embedding",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "mlp_dropout",
}
BART_SIDES = {
    side: {
        f"{side}_layers": "depth",
        f"{side}_attention_heads": "heads",
        f"{side}_ffn_dim": "mlp_width",
    }
    for side in SIDES
}
BART_USUAL = {
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}
T5_SETTINGS = {
    "vocab_size": "source_vocabulary",
    "n_positions": "max_length",
    "d_model": "width",
    "d_kv": "head_dim",
    "d_ff": "mlp_width",
    "num_heads": "heads",
    "feed_forward_proj": "feedforward",
    "layer_norm_epsilon": "norm_eps",
    "dropout_rate": "dropout",
}
T5_USUAL = {
    "n_positions": 512,
    "d_kv": 64,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.1,
}
RATES = ("dropout", "attention_dropout", "mlp_dropout")
OWN = {field.name for field in fields(Seq2SeqConfig)}
EVERYWHERE = {"attention": "dot", "qk_norm": False, "layer_scale": None}
POST_NORM = EVERYWHERE | {
    "order": "post",
    "final_norm": False,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    **{"bias": True, "qkv_bias": True, "mlp_bias": True},
}
PRE_NORM = EVERYWHERE | {
    "order": "pre",
    "final_norm": True,
    "norm": "rmsnorm",
    **{"bias": False, "qkv_bias": False, "mlp_bias": False},
}
FAMILIES: dict[str, Family] = {
    "marian": Family(
        "MarianMTModel",
        {**BART_SETTINGS, "decoder_vocab_size": "target_vocabulary"},
        BART_SIDES,
        {"position": "sinusoidal", "embedding_norm": False},
        POST_NORM,
        ("share_encoder_decoder_embeddings", "tie_word_embeddings"),
        {(True, True): "all", (False, True): "target", (False, False): "none"},
        BART_USUAL,
        ACTIVATIONS,
        {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        BART_SETTINGS,
        BART_SIDES,
        {"position": "learned", "embedding_norm": True},
        POST_NORM,
        ("tie_word_embeddings",),
        {(True,): "all"},
        BART_USUAL,
        ACTIVATIONS,
        {"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False},
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        T5_SETTINGS,
        {"encoder": {"num_layers": "depth"}, "decoder": {"num_decoder_layers": "depth"}},
        {"position": "t5", "embedding_norm": False, "scale_embedding": False, "output_bias": False},
        PRE_NORM,
        ("scale_decoder_outputs",),
        {(True,): "all", (False,): "inputs"},  # versions 1.0 and 1.1
        T5_USUAL,
        ACTIVATIONS | {"gated-gelu": "geglu_tanh", "gated-silu": "swiglu"},
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    ),
}
NEEDED = ("source_vocabulary", "width", "heads", "mlp_width")


def config_from_huggingface(settings: Settings) -> tuple[str, Seq2SeqConfig]:
    """Family and config of a model, read off its config.json.

    Returns:
        Entry of `FAMILIES`, and our config.

    Raises:
        ValueError: The model has parts that ours does not, or the file lacks a size, by name.
    """
    name = known_family(settings, FAMILIES)
    family = FAMILIES[name]
    check_settings(settings, {"is_encoder_decoder": True, "is_causal": True, **family.only})
    given = {
        **family.usual,
        **{theirs: value for theirs, value in settings.items() if value is not None},
    }
    if name == "t5":
        given |= _t5(settings, given)
    options = renamed(given, family.settings, NEEDED, StackConfig, Seq2SeqConfig)
    check_aliases(given, family.settings | family.sides["encoder"])
    options["feedforward"] = activation(options["feedforward"], family.activations)
    options.setdefault("target_vocabulary", options["source_vocabulary"])
    options.setdefault("attention_dropout", options["dropout"])
    options |= {
        "output_bias": True,
        **family.fixed,
        **family.blocks,
        "tying": _tying(family, given),
    }
    options.pop("final_norm")  # follows from the order
    needed = tuple(family.sides["encoder"].values())
    stacks = {
        side: renamed(given, names, needed, StackConfig) | SIDES[side]
        for side, names in family.sides.items()
    }
    return name, built(Seq2SeqConfig, options, stacks)


def _t5(settings: Settings, given: Settings) -> Settings:
    """What T5's options say of others.

    Args:
        settings: The config.json.
        given: What it says, with the usual values of the rest.

    Raises:
        ValueError: Two options say of the feed-forward part what cannot both be.
    """
    name = checked(str, given["feed_forward_proj"], "feed_forward_proj")
    gate, _, act = name.rpartition("-")
    act = "gelu_new" if name == "gated-gelu" else act
    check_settings(settings, {"is_gated_act": gate == "gated", "dense_act_fn": act})
    tied = given.get("tie_word_embeddings", True)  # older files say it of the scale as well
    scaled: Any = settings.get("scale_decoder_outputs", tied)
    return {
        "scale_decoder_outputs": scaled or False,  # null is no
        "num_decoder_layers": given.get("num_decoder_layers", given.get("num_layers")),
    }


def _tying(family: Family, given: Settings) -> TyingName:
    """Which tables are one, by a config.json with all that `family.ties` names."""
    said = tuple(checked(bool, given[name], name) for name in family.ties)
    words = " and ".join(f"{name} {value}" for name, value in zip(family.ties, said, strict=True))
    require(
        said in family.tyings,
        f"{words} is not supported; choose a model that shares its tables otherwise.",
    )
    return family.tyings[said]


def config_to_huggingface(
    family: str, config: Seq2SeqConfig, special: Mapping[str, int] | None = None
) -> Settings:
    """The config.json of a model of ours; rates of dropout that the family does not have are left out.

    Args:
        family: Entry of `FAMILIES`.
        config: Our model.
        special: Numbers of the tokens "decoder_start", "bos", "eos" and "pad", of those that there are.

    Raises:
        ValueError: Their model cannot be like ours, with the reason.
    """
    check_expressible(family, config)
    kind = FAMILIES[family]
    own = {theirs: ours for theirs, ours in kind.settings.items() if ours in OWN}
    common = {theirs: ours for theirs, ours in kind.settings.items() if ours not in OWN}
    settings = (
        written(config, own, kind.activations)
        | written(config.encoder, common, kind.activations)
        | kind.only
    )
    for side, names in kind.sides.items():
        settings |= written(getattr(config, side), names, kind.activations)
    if "activation_dropout" in settings:
        settings["activation_dropout"] = config.encoder.resolved.mlp_dropout
    said = next(said for said, tying in kind.tyings.items() if tying == config.tying)
    settings |= dict(zip(kind.ties, said, strict=True))
    settings["tie_word_embeddings"] = config.tying in ("all", "target")
    roles = ("decoder_start", "bos", "eos", "pad")
    settings |= {f"{role}_token_id": (special or {}).get(role) for role in roles} | {
        "forced_eos_token_id": None
    }
    return settings | {
        "model_type": family,
        "architectures": [kind.architecture],
        "is_encoder_decoder": True,
    }


def suited_family(config: Seq2SeqConfig) -> str:
    """The first of `FAMILIES` whose models can be like ours.

    Raises:
        ValueError: None can; with what keeps it from the nearest.
    """
    reasons: dict[str, str] = {}
    for family, kind in FAMILIES.items():
        try:
            check_expressible(family, config)
        except ValueError as error:
            reasons[kind.fixed["position"]] = str(error)
        else:
            return family
    raise ValueError(reasons.get(config.position, reasons["sinusoidal"]))


def check_expressible(family: str, config: Seq2SeqConfig) -> None:
    """Raises `ValueError` where a model of `family` cannot be like ours."""
    kind = FAMILIES[family]
    check_options(family, config, {"architecture": "encoder_decoder", **kind.fixed})
    known = sorted(set(kind.tyings.values()))
    require(
        config.tying in known,
        f"{family} models have tying {' or '.join(known)}, but this one has {config.tying}.",
    )
    usual = {"base": 10000, "buckets": 32, "max_distance": 128}
    check_position_options(family, config, usual)
    for stack in (config.encoder, config.decoder):
        check_options(family, stack, kind.blocks)
        check_feedforward(family, stack, kind.activations)
        if "head_dim" in kind.settings.values():
            require(
                stack.resolved.kv_heads == stack.heads,
                f"{family} models have as many kv_heads as heads.",
            )
        else:
            check_heads(family, stack)
    for name in sorted({*kind.settings.values()} - OWN - {*RATES}):
        sizes = option(config.encoder, name), option(config.decoder, name)
        same = f"{family} models have the same {name} in encoder and decoder, not {sizes[0]} and {sizes[1]}."
        require(sizes[0] == sizes[1], same)
