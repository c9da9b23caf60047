"""GPT-2, Image GPT, Llama, Mistral and Qwen of transformers, converted both ways."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from modules.config import StackConfig, default, require
from modules.models.gpt import Decoder, DecoderConfig
from modules.position import Rotary
from modules.pretrained.family import TransformersFamily
from modules.pretrained.settings import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Settings,
    build_config,
    check_feedforward,
    check_fixed_options,
    check_heads,
    check_position_options,
    check_settings,
    check_unscaled,
    check_values,
    quoted,
    read_options,
    write_options,
)
from modules.pretrained.weights import Layers, Names, weight_names
from modules.rotary_scaling import RotaryScaling
from modules.schema import check_value, from_dict

HEAD = "lm_head"
# What all models of these families have.
COMMON = {
    "order": "pre",
    "final_norm": True,
    "attention": "dot",
    "layer_scale": None,
    "causal": True,
    "embedding_width": None,
}
WINDOW = 4096  # tokens, if files of Mistral and Qwen do not say
FIRST_WINDOW_LAYER = 28  # if files of Qwen do not say
ROPE = ("rope_scaling", "rope_parameters")  # the first counts if both are given
# Kind of scaling of rotary positions: their option -> ours.
SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_length",
    },
}


@dataclass(frozen=True, kw_only=True)
class DecoderFamily(TransformersFamily[DecoderConfig]):
    """One of the families; arguments as `TransformersFamily`, and:

    Args:
        embed: Their table of tokens.
        transposed: Ends of our names of layers whose matrices they keep as (inputs, outputs).
        unpredicted: Tokens at the end of the vocabulary that the output layer leaves out.
        window: Whether attention looks back over a window only: never, always, or in "some" layers
            of some models.
    """

    embed: str
    transposed: tuple[str, ...] = ()
    unpredicted: int = 0
    window: Literal["never", "always", "some"] = "never"
    unused: str = r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$"  # buffers of old files
    heads: tuple[str, ...] = (f"{HEAD}.",)

    # Weights --------------------------------------------------------------------------------------

    def names(self, config: DecoderConfig) -> Names:
        layers: Layers = {"embed": self.embed, "unembed": HEAD, **self.layers}
        return weight_names(layers, config.stack.depth, self.tensors)

    def networks(self, config: DecoderConfig) -> list[nn.Module]:
        return [Decoder(config)]

    def copies(self, config: DecoderConfig) -> dict[str, str]:
        """Returns the output layer, if it is the table of tokens."""
        return {f"{HEAD}.weight": f"{self.embed}.weight"} if config.tied else {}

    def qkv_rows(self, config: DecoderConfig) -> tuple[int, int, int]:
        sizes = config.stack.resolved
        shared = sizes.kv_heads * sizes.head_dim
        return config.stack.heads * sizes.head_dim, shared, shared

    def import_tensor(self, name: str, value: Tensor, config: DecoderConfig) -> Tensor:
        """Transposes matrices of `transposed` layers, in either direction."""
        layer, _, end = name.rpartition(".")
        return value.t() if end == "weight" and layer.endswith(self.transposed) else value

    export_tensor = import_tensor

    # Configs --------------------------------------------------------------------------------------

    def config_from_external(self, settings: Settings) -> DecoderConfig:
        """Returns our config, whose context is at most the window of attention."""
        check_settings(settings, {"is_causal": True})
        options = self.read(settings, StackConfig, DecoderConfig) | {"causal": True}
        options.setdefault("bias", options["qkv_bias"])
        if self.unpredicted:
            options["output_vocabulary"] = options["vocabulary"] - self.unpredicted
        if self.fixed["position"] == "rotary":
            options |= read_rotary(settings, options["max_length"])
        window = self.read_window(settings, options["depth"])
        if window is not None:
            options["sliding_window"] = window
            options["max_length"] = min(options["max_length"], window)
        return build_config(DecoderConfig, options)

    def read_window(self, settings: Settings, depth: int) -> int | None:
        """Returns the window of attention in tokens, or None if all layers see everything."""
        if self.window == "never":
            return None
        width = check_value(int | None, settings.get("sliding_window", WINDOW), "sliding_window")
        if self.window == "always":
            return width
        used = check_value(bool | None, settings.get("use_sliding_window"), "use_sliding_window")
        first = settings.get("max_window_layers", FIRST_WINDOW_LAYER)
        has_window = check_value(int, first, "max_window_layers") < depth
        kind = "sliding_attention" if has_window else "full_attention"
        kinds = check_value(list[str] | None, settings.get("layer_types"), "layer_types") or [kind]
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        require(
            not unknown,
            f"layer_types {', '.join(unknown)} are not supported; choose a model without them.",
        )
        return width if used and "sliding_attention" in kinds else None

    def config_to_external(
        self, config: DecoderConfig, special_tokens: Mapping[str, int] | None = None
    ) -> Settings:
        """Returns the config.json of a model of ours, without dropout rates that the family lacks.

        `special_tokens` are ids of "bos", "eos" and "pad", as far as there are any. Raises
        `ValueError` if no model of theirs can equal ours, with the reason.
        """
        self.check(config)
        settings = write_options(config, self.options, self.activations) | self.only
        if self.window != "never":
            settings["sliding_window"] = config.sliding_window
        if self.window == "some" and config.sliding_window is not None:
            settings |= {"use_sliding_window": True, "max_window_layers": 0}
        if config.position == "rotary":
            settings |= write_rotary(config)
        for role in ("bos", "eos", "pad"):
            settings[f"{role}_token_id"] = (special_tokens or {}).get(role)
        return settings | {"model_type": self.name, "architectures": [self.architecture]}

    def check(self, config: DecoderConfig) -> None:
        stack = config.stack
        outputs = (config.vocabulary or 0) - self.unpredicted if self.unpredicted else None
        check_fixed_options(self.name, config, {"output_vocabulary": outputs})
        check_fixed_options(self.name, config, {**COMMON, "bias": stack.qkv_bias, **self.fixed})
        check_position_options(self.name, config, {"fraction": 1}, free=("base", "scaling"))
        check_unscaled(self.name, config)
        check_feedforward(self.name, config, self.activations)
        check_values(self.name, stack)
        if self.window == "never":
            check_fixed_options(self.name, config, {"sliding_window": None})
        if self.name in ("gpt2", "imagegpt"):
            check_heads(self.name, stack)
        if self.name == "llama":
            require(
                stack.width % stack.heads == 0,
                f"llama models need heads that divide width {stack.width}, unlike {stack.heads}.",
            )


def read_rotary(settings: Settings, length: int) -> Settings:
    """Returns our options of rotary positions, from `rope_parameters` or older spellings."""
    given = [check_value(dict[str, Any] | None, settings.get(name), name) for name in ROPE]
    rope: Settings = given[0] or given[1] or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    nested = any(isinstance(value, dict) for value in rope.values())
    require(
        not nested,
        "rope_parameters of each layer are not supported; choose a model without them.",
    )
    known = ("default", *SCALING)
    require(
        isinstance(kind, str) and kind in known,
        f"rope_type {quoted(kind)} is not supported; choose a model with {' or '.join(known)}.",
    )
    name = "partial_rotary_factor"
    check_settings({name: rope.get(name) or settings.get(name) or 1}, {name: 1})
    base = rope.get("rope_theta")
    if base is None:
        base = settings.get("rope_theta")
    base = float(check_value(float, default(base, Rotary.default_base), "rope_theta"))
    require(base > 0, f"rope_theta is {base}; it must be above 0.")
    if kind == "default":
        return {"position_options": {"base": base}}
    names = SCALING[kind]
    original = "original_max_position_embeddings"
    rope = {original: length, **rope}
    if settings.get(original) is not None:  # takes precedence in transformers
        rope[original] = settings[original]
    options = read_options(rope, names, names.values(), RotaryScaling)
    scaling = RotaryScaling(**{"kind": kind, **options})
    return {"position_options": {"base": base, "scaling": asdict(scaling)}}


def write_rotary(config: DecoderConfig) -> Settings:
    """Returns rotary positions as transformers writes them now and did before version 5."""
    base = default(config.position_options.get("base"), Rotary.default_base)
    found: Settings = {}
    if config.position_options.get("scaling") is not None:
        scaling = from_dict(RotaryScaling, config.position_options["scaling"])
        found = {theirs: getattr(scaling, ours) for theirs, ours in SCALING[scaling.kind].items()}
        found["rope_type"] = scaling.kind
    parameters = {"rope_type": "default", "rope_theta": base, **found}
    return {"rope_theta": base, "rope_scaling": found or None, "rope_parameters": parameters}


# Names --------------------------------------------------------------------------------------------

REQUIRED_OPTIONS = ("vocabulary", "max_length", "width", "depth", "heads")
WITH_BIAS = {"bias": True, "qkv_bias": True, "mlp_bias": True}
WITHOUT_BIAS = {"bias": False, "qkv_bias": False, "mlp_bias": False}
BLOCK = "stack.blocks.{i}"
GPT2 = DecoderFamily(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    embed="transformer.wte",
    layers={
        f"{BLOCK}.norm1": "transformer.h.{i}.ln_1",
        f"{BLOCK}.attention.qkv": "transformer.h.{i}.attn.c_attn",
        f"{BLOCK}.attention.output": "transformer.h.{i}.attn.c_proj",
        f"{BLOCK}.norm2": "transformer.h.{i}.ln_2",
        f"{BLOCK}.feedforward.up": "transformer.h.{i}.mlp.c_fc",
        f"{BLOCK}.feedforward.down": "transformer.h.{i}.mlp.c_proj",
        "stack.norm": "transformer.ln_f",
    },
    tensors={"position.table": "transformer.wpe.weight"},
    transposed=("attention.qkv", "attention.output", "feedforward.up", "feedforward.down"),
    options={
        "vocab_size": "vocabulary",
        "n_positions": "max_length",
        "n_embd": "width",
        "n_layer": "depth",
        "n_head": "heads",
        "n_inner": "mlp_width",
        "activation_function": "feedforward",
        "layer_norm_epsilon": "norm_eps",
        "embd_pdrop": "dropout",
        "resid_pdrop": "dropout",  # this one counts if the two differ
        "attn_pdrop": "attention_dropout",
        "tie_word_embeddings": "tied",
    },
    required=REQUIRED_OPTIONS,
    defaults={
        "norm_eps": 1e-5,
        "feedforward": "gelu_new",
        "dropout": 0.1,
        "mlp_dropout": 0.0,
        "attention_dropout": 0.1,
        "init": "gpt2",
    },
    fixed={"position": "learned", "norm": "layernorm", "qk_norm": False, **WITH_BIAS},
    typical={"position": "learned"},
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    activations=ACTIVATIONS,
)
IMAGEGPT = replace(  # its last token begins an image
    GPT2,
    name="imagegpt",
    architecture="ImageGPTForCausalImageModeling",
    unpredicted=1,
    defaults={**GPT2.defaults, "feedforward": "quick_gelu"},
    fixed={**GPT2.fixed, "norm": "rmsnorm", "tied": False},
    typical={"position": "learned", "norm": "rmsnorm"},
)
LLAMA_LAYERS: Layers = {
    f"{BLOCK}.norm1": "model.layers.{i}.input_layernorm",
    f"{BLOCK}.attention.qkv": (
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.k_proj",
        "model.layers.{i}.self_attn.v_proj",
    ),
    f"{BLOCK}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
    f"{BLOCK}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
    f"{BLOCK}.attention.output": "model.layers.{i}.self_attn.o_proj",
    f"{BLOCK}.norm2": "model.layers.{i}.post_attention_layernorm",
    f"{BLOCK}.feedforward.gate": "model.layers.{i}.mlp.gate_proj",
    f"{BLOCK}.feedforward.up": "model.layers.{i}.mlp.up_proj",
    f"{BLOCK}.feedforward.down": "model.layers.{i}.mlp.down_proj",
    "stack.norm": "model.norm",
}
LLAMA_OPTIONS = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "max_length",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_width",
    "hidden_act": "feedforward",
    "rms_norm_eps": "norm_eps",
    "attention_dropout": "attention_dropout",
    "tie_word_embeddings": "tied",
}


def llama(
    name: str,
    architecture: str,
    fixed: Settings,
    options: Mapping[str, str] | None = None,
    window: Literal["never", "always", "some"] = "never",
) -> DecoderFamily:
    """Returns a family with the RMSNorm, rotary positions and gates of Llama (Touvron 2023).

    Args:
        name, architecture, window: As in `DecoderFamily`.
        fixed, options: The same, but only what not all of these families have.
    """
    return DecoderFamily(
        name=name,
        architecture=architecture,
        prefix="model.",
        embed="model.embed_tokens",
        layers=LLAMA_LAYERS,
        options={**LLAMA_OPTIONS, **(options or {})},
        required=(*REQUIRED_OPTIONS, "mlp_width"),
        defaults={
            "norm_eps": 1e-6,
            "feedforward": "silu",
            "tied": False,
            "qkv_bias": False,
            "mlp_bias": False,
        },
        fixed={"position": "rotary", "norm": "rmsnorm", "qk_norm": False, **fixed},
        activations=GATED_ACTIVATIONS,
        window=window,
    )


BIAS_OPTIONS = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}
FAMILIES = {
    family.name: family
    for family in (
        GPT2,
        llama("llama", "LlamaForCausalLM", {}, BIAS_OPTIONS),
        llama("mistral", "MistralForCausalLM", WITHOUT_BIAS, window="always"),
        llama("qwen2", "Qwen2ForCausalLM", {**WITHOUT_BIAS, "qkv_bias": True}, window="some"),
        replace(
            llama(
                "qwen3",
                "Qwen3ForCausalLM",
                {"mlp_bias": False, "qk_norm": True},
                {"attention_bias": "qkv_bias"},
                "some",
            ),
            typical={"qk_norm": True},
        ),
    )
}
IMAGE_FAMILIES = {IMAGEGPT.name: IMAGEGPT}
