"""Marian, BART and T5 of transformers: weights and configs, converted both ways.

Where they compute differently, the weights make up for it: Marian's channels are put in another
order, T5's queries and the last norm of its decoder take up the scales of scores and logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from modules.config import GATED, StackConfig, require
from modules.init import RESIDUAL
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from modules.models.seq2seq_config import TyingName
from modules.pretrained.family import TransformersFamily
from modules.pretrained.family import matching_family as first_matching
from modules.pretrained.settings import (
    ACTIVATIONS,
    Settings,
    build_config,
    check_aliases,
    check_feedforward,
    check_heads,
    check_options,
    check_position_options,
    check_settings,
    get_option,
    read_options,
    write_options,
)
from modules.pretrained.weights import Layers, Names, State, weight_names
from modules.schema import checked

HEAD = "lm_head"
BIAS = "final_logits_bias"
SIDES: dict[str, Settings] = {
    "encoder": {},
    "decoder": {"causal": True, "cross_attention": True},
}
POSITION_OPTIONS = {"base": 10000, "buckets": 32, "max_distance": 128}
DROPOUTS = ("dropout", "attention_dropout", "mlp_dropout")
MODEL_OPTIONS = {field.name for field in fields(Seq2SeqConfig)}


@dataclass(frozen=True, kw_only=True)
class Seq2SeqFamily(TransformersFamily[Seq2SeqConfig]):
    """One of the families; arguments as `TransformersFamily`, `layers` outside of blocks, and:

    Args:
        prefix: Of all names but those of the output layer; files of bare models leave it out.
        block: Their name of a block; "{side}" stands for encoder or decoder.
        blocks: "encoder" and "decoder" -> names of layers in a block.
        side_options: "encoder" and "decoder" -> their option -> ours, where the two may differ.
        stack_fixed: Options of both stacks that all models of the family have.
        tying_options: Their options that say which tables are tied.
        tying: Values of those -> ours.
        tying_defaults: Values of those if the file does not say.
    """

    prefix: str
    block: str
    blocks: dict[str, Layers]
    side_options: dict[str, dict[str, str]]
    stack_fixed: Settings
    tying_options: tuple[str, ...]
    tying: dict[tuple[bool, ...], TyingName]
    tying_defaults: dict[str, bool] = field(default_factory=dict)
    required: tuple[str, ...] = ("source_vocabulary", "width", "heads", "mlp_width")
    unused: str = r"\.version$"

    # Weights --------------------------------------------------------------------------------------

    def names(self, config: Seq2SeqConfig) -> Names:
        """Returns all of our names with theirs."""
        names = self.token_names(config) | weight_names(self.layers, 1, self.tensors)
        for side, layers in self.blocks.items():
            block = self.block.replace("{side}", side)
            full: Layers = {}
            for ours, theirs in layers.items():
                parts = (theirs,) if isinstance(theirs, str) else theirs
                full[f"{side}.stack.blocks.{{i}}.{ours}"] = tuple(f"{block}.{p}" for p in parts)
            names |= weight_names(full, getattr(config, side).depth)
        return names

    def token_names(self, config: Seq2SeqConfig) -> Names:
        """Returns our names of the tables of tokens with theirs."""
        if config.tying in ("all", "inputs"):
            names: Names = {"embed.weight": (f"{self.prefix}shared.weight",)}
        else:
            names = {
                "source_embed.weight": (f"{self.prefix}encoder.embed_tokens.weight",),
                "embed.weight": (f"{self.prefix}decoder.embed_tokens.weight",),
            }
        if config.tying not in ("all", "target"):
            names["unembed.weight"] = (f"{HEAD}.weight",)
        return names

    def copies(self, config: Seq2SeqConfig) -> dict[str, str]:
        """Returns their names of tied tables, each with the name of the original."""
        shared = f"{self.prefix}shared.weight"
        copies = {}
        if config.tying in ("all", "inputs"):
            copies[f"{self.prefix}encoder.embed_tokens.weight"] = shared
            copies[f"{self.prefix}decoder.embed_tokens.weight"] = shared
        if config.tying in ("all", "target"):
            copies[f"{HEAD}.weight"] = self.token_names(config)["embed.weight"][0]
        return copies

    def networks(self, config: Seq2SeqConfig) -> list[nn.Module]:
        """Builds the encoder-decoder."""
        return [Seq2Seq(config)]

    def full_name(self, name: str) -> str:
        """Adds the prefix of a bare model."""
        full = name.startswith((self.prefix, HEAD, BIAS))
        return name if full else self.prefix + name

    def complete(self, rest: State, config: Seq2SeqConfig) -> None:
        """Adds an output layer that the file has as the table of tokens, and a bias of zeros."""
        shared = f"{self.prefix}shared.weight"
        if config.tying == "inputs" and shared in rest:
            rest.setdefault(f"{HEAD}.weight", rest[shared])
        if config.output_bias:
            rest.setdefault(BIAS, torch.zeros(1, config.target_vocabulary or 0))

    def weights_to_external(self, state: State, config: Seq2SeqConfig) -> State:
        """As in the base class; a bias that our model lacks is zero."""
        self.check(config)
        if "head.bias" in self.tensors and "head.bias" not in state:
            state = {**state, "head.bias": torch.zeros(config.target_vocabulary or 0)}
        return super().weights_to_external(state, config)

    # Configs --------------------------------------------------------------------------------------

    def config_from_external(self, settings: Settings) -> Seq2SeqConfig:
        """Returns our config."""
        check_settings(settings, {"is_encoder_decoder": True, "is_causal": True})
        settings = self.with_defaults(settings)
        options = self.read(settings, StackConfig, Seq2SeqConfig)
        options.setdefault("target_vocabulary", options["source_vocabulary"])
        options.setdefault("attention_dropout", options["dropout"])
        options = {"output_bias": True, **options, **self.stack_fixed}
        options["tying"] = self.read_tying(settings)
        del options["final_norm"]  # follows from the order
        stacks = {}
        for side, names in self.side_options.items():
            sizes = read_options(settings, names, names.values(), StackConfig)
            stacks[side] = sizes | SIDES[side]
        check_aliases(settings, ("depth", "heads"), {**options, **stacks["encoder"]})
        return build_config(Seq2SeqConfig, options, stacks)

    def with_defaults(self, settings: Settings) -> Settings:
        """Returns the config.json with options that follow from others."""
        return settings

    def read_tying(self, settings: Settings) -> TyingName:
        """Returns which tables are tied."""
        values = []
        for name in self.tying_options:
            value = settings.get(name)
            values.append(
                checked(bool, self.tying_defaults[name] if value is None else value, name)
            )
        pairs = zip(self.tying_options, values, strict=True)
        said = " and ".join(f"{name} {value}" for name, value in pairs)
        known = tuple(values) in self.tying
        require(known, f"{said} is not supported; choose a model that ties its tables otherwise.")
        return self.tying[tuple(values)]

    def config_to_external(
        self, config: Seq2SeqConfig, special_tokens: Mapping[str, int] | None = None
    ) -> Settings:
        """Returns the config.json of a model of ours, without dropout rates that the family lacks.

        Args:
            config: Our model.
            special_tokens: Ids of those of "decoder_start", "bos", "eos" and "pad" that there are.

        Raises:
            ValueError: No model of theirs can equal ours, with the reason.
        """
        self.check(config)
        settings = dict(self.only)
        for theirs, ours in self.options.items():
            source = config if ours in MODEL_OPTIONS else config.encoder
            settings |= write_options(source, {theirs: ours}, self.activations)
        for side, names in self.side_options.items():
            settings |= write_options(getattr(config, side), names, self.activations)
        if "activation_dropout" in settings:
            settings["activation_dropout"] = config.encoder.resolved.mlp_dropout
        values = next(values for values, tying in self.tying.items() if tying == config.tying)
        settings |= dict(zip(self.tying_options, values, strict=True))
        settings["tie_word_embeddings"] = config.tying in ("all", "target")
        for role in ("decoder_start", "bos", "eos", "pad"):
            settings[f"{role}_token_id"] = (special_tokens or {}).get(role)
        return settings | {
            "forced_eos_token_id": None,
            "model_type": self.name,
            "architectures": [self.architecture],
            "is_encoder_decoder": True,
        }

    def check(self, config: Seq2SeqConfig) -> None:
        """Raises `ValueError` if no model of this family can equal ours, with the reason."""
        name = self.name
        check_options(name, config, {"architecture": "encoder_decoder", **self.fixed})
        known = sorted(set(self.tying.values()))
        require(
            config.tying in known,
            f"{name} models have tying {' or '.join(known)}, but this one has {config.tying}.",
        )
        check_position_options(name, config, POSITION_OPTIONS)
        for stack in (config.encoder, config.decoder):
            check_options(name, stack, self.stack_fixed)
            check_feedforward(name, stack, self.activations)
            if "head_dim" not in self.options.values():
                check_heads(name, stack)
            equal = stack.resolved.kv_heads == stack.heads
            require(equal, f"{name} models have as many kv_heads as heads.")
        for option in sorted({*self.options.values()} - MODEL_OPTIONS - {*DROPOUTS}):
            encoder = get_option(config.encoder, option)
            decoder = get_option(config.decoder, option)
            require(
                encoder == decoder,
                f"{name} models have the same {option} in encoder and decoder, "
                f"not {encoder} and {decoder}.",
            )


class BartFamily(Seq2SeqFamily):
    """BART (Lewis 2020): two rows before the first position have no use; the bias has two axes."""

    def import_tensor(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Positions (2 + N, E) -> (N, E), bias (1, V) -> (V,)."""
        if name.endswith("position.table"):
            return value[2:]
        return value[0] if name == "head.bias" else value

    def export_tensor(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Positions (N, E) -> (2 + N, E), bias (V,) -> (1, V)."""
        if name.endswith("position.table"):
            return torch.cat((value.new_zeros(2, value.shape[1]), value))  # (2 + N, E)
        return value[None] if name == "head.bias" else value


class MarianFamily(BartFamily):
    """Marian (Junczys-Dowmunt 2018): in its positions all sines come first; ours alternate.

    Channels have no order in a Transformer, so theirs are put into the order of ours.
    """

    def import_tensor(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Their channels in our order."""
        value = super().import_tensor(name, value, config)
        return reorder_channels(name, value, alternating(config.encoder.width))

    def export_tensor(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Our channels in their order."""
        value = reorder_channels(name, value, alternating(config.encoder.width).argsort())
        return super().export_tensor(name, value, config)


def alternating(width: int) -> Tensor:
    """Returns where alternating sines and cosines stand if all sines come first: (E,)."""
    sines = torch.arange(0, width, 2)
    cosines = torch.arange(1, width, 2)
    return torch.cat((sines, cosines)).argsort()  # (E,)


def reorder_channels(name: str, value: Tensor, order: Tensor) -> Tensor:
    """Reorders the channels of token vectors in the axis of a weight that has them."""
    layer, end = name.split(".")[-2:]
    if layer in RESIDUAL or "norm" in layer:
        return value[order]
    return value[:, order] if end == "weight" else value


class T5Family(Seq2SeqFamily):
    """T5 (Raffel 2020): vectors before a tied table are divided by sqrt(E), scores not at all."""

    def names(self, config: Seq2SeqConfig) -> Names:
        """As in the base class; with a gate, two layers take the place of one."""
        names = super().names(config)
        if config.encoder.feedforward not in GATED:
            return names
        gated = {}
        for ours, (theirs, *_) in names.items():
            if ".feedforward.up." in ours:
                gated[ours] = (theirs.replace(".wi.", ".wi_1."),)
                gated[ours.replace(".up.", ".gate.")] = (theirs.replace(".wi.", ".wi_0."),)
        return names | gated

    def import_tensor(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Scales weights; distances (buckets, H) -> (1, buckets, H)."""
        value = value[None] if name.endswith("position.table") else value
        return self.scale(name, value, config, 1.0)

    def export_tensor(self, name: str, value: Tensor, config: Seq2SeqConfig) -> Tensor:
        """Scales weights back; distances (1, buckets, H) -> (buckets, H)."""
        value = value[0] if name.endswith("position.table") else value
        return self.scale(name, value, config, -1.0)

    @staticmethod
    def scale(name: str, value: Tensor, config: Seq2SeqConfig, power: float) -> Tensor:
        """Multiplies queries by sqrt(D) and divides the last norm before a shared table by sqrt(E).

        Both factors are raised to `power`; the shape stays.
        """
        stack = config.encoder
        if name.endswith((".qkv.weight", ".query.weight")):
            head_dim = stack.resolved.head_dim
            rows = stack.heads * head_dim
            queries = value[:rows] * head_dim ** (power / 2)
            return torch.cat((queries, value[rows:]))
        if name == "decoder.stack.norm.weight" and config.tying == "all":
            return value * stack.width ** (-power / 2)
        return value

    def with_defaults(self, settings: Settings) -> Settings:
        """Adds options that follow from others; refuses those that contradict each other."""
        given = {name: value for name, value in settings.items() if value is not None}
        name = checked(str, given.get("feed_forward_proj", "relu"), "feed_forward_proj")
        gate, _, act = name.rpartition("-")
        act = "gelu_new" if name == "gated-gelu" else act
        check_settings(settings, {"is_gated_act": gate == "gated", "dense_act_fn": act})
        tied = given.get("tie_word_embeddings", True)  # older files mean the scale as well
        scaled = settings.get("scale_decoder_outputs", tied)
        return given | {
            "scale_decoder_outputs": False if scaled is None else scaled,
            "num_decoder_layers": given.get("num_decoder_layers", given.get("num_layers")),
        }


def matching_family(config: Seq2SeqConfig) -> Seq2SeqFamily:
    """Returns the first family with a model that equals ours.

    Raises:
        ValueError: None has one; with the reason of the nearest.
    """
    nearest = {"learned": "bart", "t5": "t5"}.get(config.position)
    return first_matching(config, FAMILIES, nearest)


# Names --------------------------------------------------------------------------------------------

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
BART_OPTIONS = {
    "vocab_size": "source_vocabulary",
    "max_position_embeddings": "max_length",
    "d_model": "width",
    "activation_function": "feedforward",
    "scale_embedding": "scale_embedding",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "mlp_dropout",
}
EVERY_STACK: Settings = {"attention": "dot", "qk_norm": False, "layer_scale": None}
BART_COMMON: dict[str, Any] = {
    "prefix": "model.",
    "block": "model.{side}.layers.{i}",
    "blocks": {"encoder": BART_BLOCK, "decoder": BART_BLOCK | BART_CROSS},
    "side_options": {
        side: {
            f"{side}_layers": "depth",
            f"{side}_attention_heads": "heads",
            f"{side}_ffn_dim": "mlp_width",
        }
        for side in SIDES
    },
    "required": ("source_vocabulary", "width"),
    "defaults": {
        "max_length": 1024,
        "feedforward": "gelu",
        "scale_embedding": False,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "mlp_dropout": 0.0,
    },
    "stack_fixed": {
        **EVERY_STACK,
        "order": "post",
        "final_norm": False,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "bias": True,
        "qkv_bias": True,
        "mlp_bias": True,
    },
    "tying_defaults": {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True},
    "activations": ACTIVATIONS,
}
MARIAN = MarianFamily(
    name="marian",
    architecture="MarianMTModel",
    tensors={"head.bias": BIAS},
    unused=r"\.version$|\.embed_positions\.weight$",
    options={**BART_OPTIONS, "decoder_vocab_size": "target_vocabulary"},
    fixed={"position": "sinusoidal", "embedding_norm": False},
    only={"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
    tying_options=("share_encoder_decoder_embeddings", "tie_word_embeddings"),
    tying={(True, True): "all", (False, True): "target", (False, False): "none"},
    **BART_COMMON,
)
BART = BartFamily(
    name="bart",
    architecture="BartForConditionalGeneration",
    layers={
        "encoder.norm": "model.encoder.layernorm_embedding",
        "decoder.norm": "model.decoder.layernorm_embedding",
    },
    tensors={
        "encoder.position.table": "model.encoder.embed_positions.weight",
        "decoder.position.table": "model.decoder.embed_positions.weight",
        "head.bias": BIAS,
    },
    options=BART_OPTIONS,
    fixed={"position": "learned", "embedding_norm": True},
    only={"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False},
    tying_options=("tie_word_embeddings",),
    tying={(True,): "all"},
    **BART_COMMON,
)
T5_ATTENTION: Layers = {
    "norm1": "layer.0.layer_norm",
    "attention.qkv": (
        "layer.0.SelfAttention.q",
        "layer.0.SelfAttention.k",
        "layer.0.SelfAttention.v",
    ),
    "attention.output": "layer.0.SelfAttention.o",
}
T5_CROSS: Layers = {
    "cross_norm": "layer.1.layer_norm",
    "cross_attention.query": "layer.1.EncDecAttention.q",
    "cross_attention.key_value": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "cross_attention.output": "layer.1.EncDecAttention.o",
}


def t5_feedforward(number: int) -> Layers:
    """Returns the feed-forward layer of a T5 block, whose parts are numbered."""
    return {
        "norm2": f"layer.{number}.layer_norm",
        "feedforward.up": f"layer.{number}.DenseReluDense.wi",
        "feedforward.down": f"layer.{number}.DenseReluDense.wo",
    }


T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
T5 = T5Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    prefix="",
    block="{side}.block.{i}",
    blocks={
        "encoder": T5_ATTENTION | t5_feedforward(1),
        "decoder": T5_ATTENTION | T5_CROSS | t5_feedforward(2),
    },
    layers={f"{side}.stack.norm": f"{side}.final_layer_norm" for side in SIDES},
    tensors={f"{side}.position.table": f"{side}.{T5_BIAS}" for side in SIDES},
    unused=r"\.EncDecAttention\.relative_attention_bias\.weight$",  # in old files
    options={
        "vocab_size": "source_vocabulary",
        "n_positions": "max_length",
        "d_model": "width",
        "d_kv": "head_dim",
        "d_ff": "mlp_width",
        "num_heads": "heads",
        "feed_forward_proj": "feedforward",
        "layer_norm_epsilon": "norm_eps",
        "dropout_rate": "dropout",
    },
    side_options={
        "encoder": {"num_layers": "depth"},
        "decoder": {"num_decoder_layers": "depth"},
    },
    defaults={
        "max_length": 512,
        "head_dim": 64,
        "feedforward": "relu",
        "norm_eps": 1e-6,
        "dropout": 0.1,
    },
    fixed={
        "position": "t5",
        "embedding_norm": False,
        "scale_embedding": False,
        "output_bias": False,
    },
    stack_fixed={
        **EVERY_STACK,
        "order": "pre",
        "final_norm": True,
        "norm": "rmsnorm",
        "bias": False,
        "qkv_bias": False,
        "mlp_bias": False,
    },
    only={"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    tying_options=("scale_decoder_outputs",),
    tying={(True,): "all", (False,): "inputs"},  # versions 1.0 and 1.1
    activations=ACTIVATIONS | {"gated-gelu": "geglu_tanh", "gated-silu": "swiglu"},
)
FAMILIES: dict[str, Seq2SeqFamily] = {family.name: family for family in (MARIAN, BART, T5)}
