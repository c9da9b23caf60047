"""Configs of GPT-2, Llama, Mistral and Qwen decoders from and to the `config.json` of Hugging Face."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from modules.config import FeedForwardName, StackConfig, require
from modules.models.gpt import DecoderConfig
from modules.position import RotaryScaling
from modules.pretrained.settings import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
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
    quoted,
    renamed,
    written,
)
from modules.schema import checked, from_dict

WindowName = Literal["never", "always", "some"]


@dataclass(frozen=True)
class Family:
    """What a config.json says, and what it leaves out.

    Args:
        architecture: Name of their class.
        settings: Their option -> ours, in `DecoderConfig` or its stack.
        fixed: Options of ours that are the same in all models of the family.
        usual: What options of ours are where the file does not say, other than by default.
        needed: Options of ours that the file must say.
        activations: Their name of an activation -> ours.
        only: Options of theirs that are supported at this value alone; files of ours say so.
        window: Whether attention looks back over a window only: never, always, or in "some" layers of some models.
    """

    architecture: str
    settings: dict[str, str]
    fixed: dict[str, Any]
    usual: dict[str, Any]
    needed: tuple[str, ...]
    activations: Mapping[str, FeedForwardName]
    only: dict[str, Any] = field(default_factory=dict)
    window: WindowName = "never"


SIZES = ("vocabulary", "max_length", "width", "depth", "heads")
GPT2_SETTINGS = {
    "vocab_size": "vocabulary",
    "n_positions": "max_length",
    "n_embd": "width",
    "n_layer": "depth",
    "n_head": "heads",
    "n_inner": "mlp_width",
    "activation_function": "feedforward",
    "layer_norm_epsilon": "norm_eps",
    "embd_pdrop": "dropout",
    "resid_pdrop": "dropout",  # this one counts where the two differ
    "attn_pdrop": "attention_dropout",
    "tie_word_embeddings": "tied",
}
ROTARY_SETTINGS = {
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
WITH_BIASES = {"bias": True, "qkv_bias": True, "mlp_bias": True}
WITHOUT_BIASES = {"bias": False, "qkv_bias": False, "mlp_bias": False}


def rotary(
    architecture: str, names: dict[str, str], fixed: Settings, window: WindowName = "never"
) -> Family:
    """A family with RMSNorm, rotary positions and gates, as Llama has them (Touvron 2023).

    Args:
        architecture, window: As in `Family`.
        names, fixed: As `settings` and `fixed` in `Family`, but only what not all of these families have.
    """
    return Family(
        architecture,
        ROTARY_SETTINGS | names,
        {"position": "rotary", "norm": "rmsnorm", "qk_norm": False, **fixed},
        {
            "norm_eps": 1e-6,
            "feedforward": "silu",
            "tied": False,
            "qkv_bias": False,
            "mlp_bias": False,
        },
        (*SIZES, "mlp_width"),
        GATED_ACTIVATIONS,
        window=window,
    )


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2_SETTINGS,
        {"position": "learned", "norm": "layernorm", "qk_norm": False, **WITH_BIASES},
        {
            "norm_eps": 1e-5,
            "feedforward": "gelu_new",
            "dropout": 0.1,
            "mlp_dropout": 0.0,
            "attention_dropout": 0.1,
            "init": "gpt2",
        },
        SIZES,
        ACTIVATIONS,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "llama": rotary("LlamaForCausalLM", {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}, {}),
    "mistral": rotary("MistralForCausalLM", {}, WITHOUT_BIASES, "always"),
    "qwen2": rotary("Qwen2ForCausalLM", {}, {**WITHOUT_BIASES, "qkv_bias": True}, "some"),
    "qwen3": rotary(
        "Qwen3ForCausalLM",
        {"attention_bias": "qkv_bias"},
        {"mlp_bias": False, "qk_norm": True},
        "some",
    ),
}
ALWAYS = {
    "order": "pre",
    "final_norm": True,
    "attention": "dot",
    "layer_scale": None,
}
WINDOW = 4096  # tokens, where files of Mistral and Qwen do not say
FIRST_WINDOW = 28  # the first layer with a window, where files of Qwen do not say
ROPE = ("rope_scaling", "rope_parameters")  # the first counts where both are given
SCALING = {  # of rotary positions: their option -> ours, for each kind
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_length",
    },
}


def config_from_huggingface(settings: Settings) -> tuple[str, DecoderConfig]:
    """Family and config of a model, read off its config.json.

    Where attention looks back over a window only, the context is no longer than the window: both are the same there.

    Returns:
        Entry of `FAMILIES`, and our config.

    Raises:
        ValueError: The model has parts that ours does not, or the file lacks a size, by name.
    """
    name = known_family(settings, FAMILIES)
    family = FAMILIES[name]
    check_settings(settings, {"is_causal": True, **family.only})
    given = renamed(settings, family.settings, family.needed, StackConfig, DecoderConfig)
    check_aliases(settings, family.settings)
    options = {**family.usual, **given, **family.fixed, "causal": True}
    options["feedforward"] = activation(options["feedforward"], family.activations)
    options.setdefault("bias", options["qkv_bias"])
    if family.fixed["position"] == "rotary":
        options |= _rotation(settings, options["max_length"])
    if (width := _window(family, settings, options["depth"])) is not None:
        options |= {"sliding_window": width, "max_length": min(options["max_length"], width)}
    return name, built(DecoderConfig, options)


def _window(family: Family, settings: Settings, depth: int) -> int | None:
    """How many tokens attention looks back over, itself included, where any layer does not see all; else None."""
    if family.window == "never":
        return None
    width = checked(int | None, settings.get("sliding_window", WINDOW), "sliding_window")
    if family.window == "always":
        return width
    used = checked(bool | None, settings.get("use_sliding_window"), "use_sliding_window")
    first = checked(int, settings.get("max_window_layers", FIRST_WINDOW), "max_window_layers")
    usual = "sliding_attention" if first < depth else "full_attention"
    kinds = checked(list[str] | None, settings.get("layer_types"), "layer_types") or [usual]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    require(
        not unknown,
        f"layer_types {', '.join(sorted(unknown))} are not supported; choose a model without them.",
    )
    return width if used and "sliding_attention" in kinds else None


def _rotation(settings: Settings, length: int) -> Settings:
    """Our options of rotary positions, from today's `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    said = [checked(dict[str, Any] | None, settings.get(name), name) for name in ROPE]
    given: Settings = next(filter(None, said), {})
    kind = next((given[name] for name in ("rope_type", "type") if given.get(name)), "default")
    same = not any(isinstance(value, dict) for value in given.values())
    require(
        same,
        "rope_parameters that differ from layer to layer are not supported; choose a model without.",
    )
    known = ("default", *SCALING)
    suits = isinstance(kind, str) and kind in known
    require(
        suits,
        f"rope_type {quoted(kind)} is not supported; choose a model with one of {', '.join(known)}.",
    )
    share = given.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1
    check_settings({"partial_rotary_factor": share}, {"partial_rotary_factor": 1})
    bases = [
        places["rope_theta"] for places in (given, settings) if places.get("rope_theta") is not None
    ]
    base = float(checked(float, bases[0] if bases else 10000.0, "rope_theta"))
    require(base > 0, f"rope_theta is {base}; it must be above 0.")
    if kind == "default":
        return {"position_options": {"base": base}}
    names, first = SCALING[kind], {"original_max_position_embeddings": length}
    found = renamed(first | given, names, tuple(names.values()), RotaryScaling)
    scaling = RotaryScaling(**{"kind": kind, **found})
    return {"position_options": {"base": base, "scaling": asdict(scaling)}}


def config_to_huggingface(
    family: str, config: DecoderConfig, special: Mapping[str, int] | None = None
) -> Settings:
    """The config.json of a model of ours; rates of dropout that the family does not have are left out.

    Args:
        family: Entry of `FAMILIES`.
        config: Our model.
        special: Numbers of the tokens "bos", "eos" and "pad", of those that there are.

    Raises:
        ValueError: Their model cannot be like ours, with the reason.
    """
    check_expressible(family, config)
    kind = FAMILIES[family]
    settings = written(config, kind.settings, kind.activations) | kind.only
    if kind.window != "never":
        settings["sliding_window"] = config.sliding_window
    if kind.window == "some" and config.sliding_window is not None:
        settings |= {"use_sliding_window": True, "max_window_layers": 0}
    if config.position == "rotary":
        settings |= _rope(config)
    settings |= {f"{name}_token_id": (special or {}).get(name) for name in ("bos", "eos", "pad")}
    return settings | {"model_type": family, "architectures": [kind.architecture]}


def _rope(config: DecoderConfig) -> Settings:
    """Rotary positions in the spelling of today's transformers and of those before version 5."""
    base = config.position_options.get("base", 10000.0)
    scaling = config.position_options.get("scaling")
    found: Settings = {}
    if scaling is not None:
        full = from_dict(RotaryScaling, scaling)
        found = {theirs: getattr(full, ours) for theirs, ours in SCALING[full.kind].items()}
        found["rope_type"] = full.kind
    today = {"rope_type": "default", "rope_theta": base, **found}
    return {"rope_theta": base, "rope_scaling": found or None, "rope_parameters": today}


def suited_family(config: DecoderConfig) -> str:
    """The first of `FAMILIES` whose models can be like ours.

    Raises:
        ValueError: None can; with what keeps it from the nearest.
    """
    reasons: dict[str, str] = {}
    for family in FAMILIES:
        try:
            check_expressible(family, config)
        except ValueError as error:
            reasons[family] = str(error)
        else:
            return family
    nearest = (
        "gpt2" if config.position == "learned" else "qwen3" if config.stack.qk_norm else "llama"
    )
    raise ValueError(reasons[nearest])


def check_expressible(family: str, config: DecoderConfig) -> None:
    """Raises `ValueError` where a model of `family` cannot be like ours."""
    kind, stack = FAMILIES[family], config.stack
    check_options(family, config, {**ALWAYS, "bias": stack.qkv_bias, **kind.fixed})
    check_position_options(family, config, {"fraction": 1}, free=("base", "scaling"))
    check_feedforward(family, config, kind.activations)
    if kind.window == "never":
        check_options(family, config, {"sliding_window": None})
    if family == "gpt2":
        check_heads(family, stack)
    split = family != "llama" or stack.width % stack.heads == 0
    require(
        split,
        f"llama models have a width that heads divide, but {stack.heads} does not divide {stack.width}.",
    )
