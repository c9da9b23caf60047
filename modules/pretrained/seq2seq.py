"""Marian, BART and T5 of transformers: weights and configs, converted both ways.

Where they compute differently, the weights make up for it: Marian's channels are put in another
order, T5's queries and the last norm of its decoder take up the scales of scores and logits.
"""

from typing import Any

import torch
from torch import Tensor

from modules.config import GATED
from modules.init import RESIDUAL
from modules.kernels.upcast import upcast
from modules.models.seq2seq import Seq2SeqConfig
from modules.pretrained.seq2seq_family import BIAS, SIDES, Seq2SeqFamily
from modules.pretrained.settings import ACTIVATIONS, Settings, check_settings
from modules.pretrained.weights import Layers, Names
from modules.schema import check_value


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
    """T5 (Raffel 2020): vectors before a tied table are divided by sqrt(E), scores by nothing."""

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
        """Scales weights, in float32; distances (buckets, H) -> (1, buckets, H)."""
        value = value[None] if name.endswith("position.table") else value
        return self.scale(name, upcast(value), config, 1.0)

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
        name = check_value(str, given.get("feed_forward_proj", "relu"), "feed_forward_proj")
        gate, _, act = name.rpartition("-")
        act = "gelu_new" if name == "gated-gelu" else act
        check_settings(settings, {"is_gated_act": gate == "gated", "dense_act_fn": act})
        tied = given.get("tie_word_embeddings", True)  # older files mean the scale as well
        scaled = settings.get("scale_decoder_outputs", tied)
        return given | {
            "scale_decoder_outputs": False if scaled is None else scaled,
            "num_decoder_layers": given.get("num_decoder_layers", given.get("num_layers")),
        }


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
    typical={"position": "learned"},
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
    side_options={"encoder": {"num_layers": "depth"}, "decoder": {"num_decoder_layers": "depth"}},
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
    typical={"position": "t5"},
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
