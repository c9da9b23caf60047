"""Options of a `config.json` of transformers: read, checked and written."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, get_type_hints

from modules.config import FeedForwardName, ResolvedOptions, StackConfig, require
from modules.embedding import is_scaled
from modules.schema import check_value, format_value

Settings = dict[str, Any]  # the content of a config.json
Activations = Mapping[str, FeedForwardName]  # their name -> ours
Config = TypeVar("Config")

ACTIVATIONS: dict[str, FeedForwardName] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
GATED_ACTIVATIONS: dict[str, FeedForwardName] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
}
MAX_SIZE = 2**31 - 1  # of a vocabulary, a width, a context
# Ours -> the general name in transformers, valid beside the family's own (`attribute_map`).
ALIASES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "max_length": "max_position_embeddings",
}


def check_model_type(settings: Settings, families: Collection[str]) -> str:
    """Returns the family of a config.json; `ValueError` if unknown, or weights are quantised."""
    name = settings.get("model_type")
    known = isinstance(name, str) and name in families
    names = ", ".join(families)
    require(known, f"model_type {quoted(name)} is not supported; choose a model of {names}.")
    quantised = settings.get("quantization_config")
    require(not quantised, "The weights are quantised; choose a model with plain weights.")
    check_settings(settings, {"per_layer_config": None, "transformers_weights": None})
    check_value(list[str] | None, settings.get("architectures"), "architectures")
    return str(name)


def quoted(value: Any) -> str:
    """Returns a value in quotes for a message, cut if it is long."""
    return f'"{value[:60]}"' if isinstance(value, str) else f'"{format_value(value)}"'


def read_options(
    settings: Settings, names: Mapping[str, str], required: Collection[str], *kinds: type
) -> dict[str, Any]:
    """Returns the options of a config.json that are not null, under our names.

    Args:
        settings: The config.json.
        names: Their option -> ours.
        required: Options of ours that have no default.
        kinds: Dataclasses that have the type of each option.

    Raises:
        ValueError: An option has another type, is too large or is missing; it names theirs.
    """
    types = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    types["feedforward"] = str  # their name of the activation
    options = {}
    for theirs, ours in names.items():
        if settings.get(theirs) is None:
            continue
        value = check_value(types[ours], settings[theirs], theirs)
        huge = isinstance(value, int) and value > MAX_SIZE
        require(not huge, f"{theirs} is {format_value(value)}, which is beyond any model.")
        options[ours] = value
    missing = [theirs for theirs, ours in names.items() if ours in required and ours not in options]
    require(not missing, f"config.json lacks {', '.join(missing)}.")
    return options


def build_config(
    kind: Callable[..., Config],
    options: Mapping[str, Any],
    stacks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Builds the config of a network from its own options and those of all its stacks.

    `stacks`: the name of each stack -> options that only it has; None: there is one, `stack`.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    own = {name: value for name, value in options.items() if name in names}
    common = {name: value for name, value in options.items() if name not in names}
    for name, more in (stacks or {"stack": {}}).items():
        own[name] = drop_defaults(StackConfig(**{**common, **more}))
    return kind(**own)


def drop_defaults(stack: StackConfig) -> StackConfig:
    """Returns an equal stack in which options that have the value that null stands for are null."""
    for name in ("mlp_width", "mlp_bias", "head_dim", "kv_heads"):
        if name == "head_dim" and stack.width % stack.heads:
            continue
        plain = replace(stack, **dict[str, Any]({name: None}))
        if plain.resolved == stack.resolved:
            stack = plain
    return stack


def get_option(config: Any, name: str) -> Any:
    """Returns an option of a config or its stack; if null, the value that it stands for."""
    if hasattr(config, "stack") and not hasattr(config, name):
        config = config.stack
    if isinstance(config, StackConfig) and name in ResolvedOptions._fields:
        config = config.resolved
    return getattr(config, name)


def write_options(config: Any, names: Mapping[str, str], activations: Activations) -> Settings:
    """Returns options of a network or a stack under their names (theirs -> ours)."""
    settings = {theirs: get_option(config, ours) for theirs, ours in names.items()}
    for theirs, ours in names.items():
        if ours == "feedforward":
            known = (name for name, own in activations.items() if own == settings[theirs])
            settings[theirs] = next(known)
    return settings


def check_settings(settings: Settings, wanted: Mapping[str, Any]) -> None:
    """Raises `ValueError` if an option of a config.json is given and is not as it must be.

    Null, 0 and empty values count as false.
    """
    for name, value in wanted.items():
        got = settings.get(name, value)
        same = got == value or not (got or value)
        reason = f"{name} is {format_value(got)}, which is not supported"
        require(same, f"{reason}; choose a model in which it is {value}.")


def check_aliases(settings: Settings, names: Collection[str], options: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a config.json has another value under an option's name in `ALIASES`.

    `names` are options of ours to compare, `options` their values.
    """
    for name in names:
        if name in ALIASES and options.get(name) is not None:
            check_settings(settings, {ALIASES[name]: options[name]})


def check_fixed_options(family: str, config: Any, wanted: Mapping[str, Any]) -> None:
    """Raises `ValueError` if an option of ours is not what all models of `family` have."""
    for name, value in wanted.items():
        got = get_option(config, name)
        option = name.removeprefix("has_")  # which the property is derived from
        require(got == value, f"{family} models have {option} {value}, but this one has {got}.")


def check_position_options(
    family: str, config: Any, fixed: Mapping[str, Any], free: Collection[str] = ()
) -> None:
    """Raises `ValueError` unless each option is in `free`, or has its value in `fixed`."""
    for name, value in config.position_options.items():
        require(
            name in free or fixed.get(name) == value,
            f"{family} models have position_options {name} {fixed.get(name)}, not {value}.",
        )


def check_unscaled(family: str, config: Any) -> None:
    """Raises `ValueError` if the vectors of tokens are multiplied by sqrt(E)."""
    require(
        not is_scaled(config.scale_embedding, config.position),
        f"{family} models have scale_embedding False, but this one has True.",
    )


def check_feedforward(family: str, config: Any, activations: Activations) -> None:
    """Raises `ValueError` if models of `family` have no such feed-forward layer."""
    name = get_option(config, "feedforward")
    require(name in activations.values(), f'{family} models have no feedforward "{name}".')


def check_heads(family: str, stack: StackConfig) -> None:
    """Raises `ValueError` unless each head has its own keys and an equal part of the width."""
    check_values(family, stack)
    sizes = stack.resolved
    plain = sizes.kv_heads == stack.heads and stack.heads * sizes.head_dim == stack.width
    require(plain, f"{family} models have as many kv_heads as heads, each of size width / heads.")


def check_values(family: str, stack: StackConfig) -> None:
    """Raises `ValueError` unless values are as large as keys."""
    sizes = stack.resolved
    require(
        sizes.value_dim == sizes.head_dim,
        f"{family} models have value_dim {sizes.head_dim}, that of keys, not {sizes.value_dim}.",
    )


def count_classes(settings: Settings, head: str) -> int | None:
    """Returns the number of classes of a classifier; files leave it out if it is 2.

    None if the architecture is not one with this `head`, such as "SequenceClassification".
    """
    count = check_value(int | None, settings.get("num_labels"), "num_labels")
    names = check_value(dict[Any, Any] | None, settings.get("id2label"), "id2label")
    if not any(head in name for name in settings.get("architectures") or ()):
        return None
    return count or len(names or (0, 1))
