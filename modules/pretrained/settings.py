"""What translating the `config.json` of all families shares: options looked up, renamed, checked and put together."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, get_type_hints

from modules.config import FeedForwardName, ResolvedOptions, StackConfig, require
from modules.schema import checked, shown

Settings = dict[str, Any]  # a config.json
Built = TypeVar("Built")

ACTIVATIONS: dict[str, FeedForwardName] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
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
# Names that options of ours have in transformers, whatever else a family calls them.
ALIASES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "max_length": "max_position_embeddings",
}


def known_family(settings: Settings, families: Collection[str]) -> str:
    """The family that a config.json names.

    Raises:
        ValueError: It is none of `families`, or the weights are quantised or in another file.
    """
    name = settings.get("model_type")
    known = isinstance(name, str) and name in families
    require(
        known,
        f"model_type {quoted(name)} is not supported; choose a model of {', '.join(families)}.",
    )
    quantised = settings.get("quantization_config")
    require(not quantised, "The weights are quantised; choose a model with plain weights.")
    check_settings(settings, {"per_layer_config": None, "transformers_weights": None})
    checked(list[str] | None, settings.get("architectures"), "architectures")
    return str(name)


def quoted(value: Any) -> str:
    """A value in quotes for a message, cut where it is long."""
    return f'"{value[:60] if isinstance(value, str) else shown(value)}"'


def renamed(
    settings: Settings, names: Mapping[str, str], needed: Sequence[str], *kinds: type
) -> dict[str, Any]:
    """Options of a config.json that are not null, under our names.

    Args:
        settings: The config.json.
        names: Their option -> ours.
        needed: Options of ours that have no usual value.
        kinds: The dataclasses that say which type each option has.

    Raises:
        ValueError: One is of another type or beyond any model, or one of those needed is missing; by their
            names.
    """
    types = {ours: kind for each in kinds for ours, kind in get_type_hints(each).items()}
    types["feedforward"] = str  # their name of it
    given = {
        ours: checked(types[ours], settings[theirs], theirs)
        for theirs, ours in names.items()
        if settings.get(theirs) is not None
    }
    for theirs, ours in names.items():
        huge = isinstance(given.get(ours), int) and given[ours] > MAX_SIZE
        require(not huge, f"{theirs} is {shown(given.get(ours))}, which is beyond any model.")
    missing = [theirs for theirs, ours in names.items() if ours in needed and ours not in given]
    require(not missing, f"config.json lacks {', '.join(missing)}.")
    return given


def activation(name: str, known: Mapping[str, FeedForwardName]) -> FeedForwardName:
    """Our name of an activation.

    Raises:
        ValueError: It is none of `known`.
    """
    require(name in known, f"activation {quoted(name)} is none of {', '.join(known)}.")
    return known[name]


def built(
    kind: Callable[..., Built],
    options: Mapping[str, Any],
    stacks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Built:
    """A config of a model.

    Args:
        kind: Of the config.
        options: Its own options and those of its stacks.
        stacks: Name of a stack: what is its alone; None: there is one, `stack`.
    """
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    common = {option: value for option, value in options.items() if option not in own}
    made = {
        name: shortened(StackConfig(**{**common, **more}))
        for name, more in (stacks or {"stack": {}}).items()
    }
    return kind(**{option: value for option, value in options.items() if option in own}, **made)


def shortened(stack: StackConfig) -> StackConfig:
    """The same stack, with null for options that say what null means anyway."""
    for name in ("mlp_width", "mlp_bias", "head_dim", "kv_heads"):
        if name != "head_dim" or stack.width % stack.heads == 0:
            plain = replace(stack, **dict[str, Any]({name: None}))
            stack = plain if plain.resolved == stack.resolved else stack
    return stack


def option(config: Any, name: str) -> Any:
    """An option of a stack, or of a model's config or its stack, with what stands for null."""
    if hasattr(config, "stack") and not hasattr(config, name):
        config = config.stack
    if isinstance(config, StackConfig) and name in ResolvedOptions._fields:
        config = config.resolved
    return getattr(config, name)


def written(
    config: Any, names: Mapping[str, str], activations: Mapping[str, FeedForwardName]
) -> Settings:
    """Options of ours for a config.json, under their names.

    Args:
        config: Of a model, or of a stack.
        names: Their option -> ours.
        activations: Their name of an activation -> ours.
    """
    settings = {theirs: option(config, ours) for theirs, ours in names.items()}
    for theirs in (theirs for theirs, ours in names.items() if ours == "feedforward"):
        settings[theirs] = next(
            name for name, ours in activations.items() if ours == settings[theirs]
        )
    return settings


def check_settings(settings: Settings, wanted: Mapping[str, Any]) -> None:
    """Raises `ValueError` where an option of a config.json is given and not as it must be.

    What is off may be null or empty as well.
    """
    for name, value in wanted.items():
        got = settings.get(name, value)
        same = got == value or not (got or value)
        sentence = f"{name} is {shown(got)}, which is not supported; choose a model where it is"
        require(same, f"{sentence} {value}.")


def check_aliases(settings: Settings, names: Mapping[str, str]) -> None:
    """Raises `ValueError` where an option and its other name differ; `names` as in `renamed`."""
    for theirs, ours in names.items():
        if ours in ALIASES and settings.get(theirs) is not None:
            check_settings(settings, {ALIASES[ours]: settings[theirs]})


def check_options(family: str, config: Any, wanted: Mapping[str, Any]) -> None:
    """Raises `ValueError` where an option of a model or stack of ours is not what all models of `family` have."""
    for name, value in wanted.items():
        got = option(config, name)
        require(got == value, f"{family} models have {name} {value}, but this one has {got}.")


def check_position_options(
    family: str, config: Any, usual: Mapping[str, Any], free: Collection[str] = ()
) -> None:
    """Raises `ValueError` where models of `family` have no such options of positions.

    Args:
        family: Of published models.
        config: Of a model of ours.
        usual: Options that always have one value.
        free: Options that may have any.
    """
    for name, value in config.position_options.items():
        require(
            name in free or usual.get(name) == value,
            f"{family} models have position_options {name} {usual.get(name)}, not {value}.",
        )


def check_feedforward(family: str, config: Any, known: Mapping[str, FeedForwardName]) -> None:
    """Raises `ValueError` where models of `family` have no such feed-forward part."""
    name = option(config, "feedforward")
    require(name in known.values(), f'{family} models have no feedforward "{name}".')


def check_heads(family: str, stack: StackConfig) -> None:
    """Raises `ValueError` unless all heads have keys of their own and share the width among them."""
    sizes = stack.resolved
    plain = sizes.kv_heads == stack.heads and stack.heads * sizes.head_dim == stack.width
    require(plain, f"{family} models have as many kv_heads as heads, each of size width / heads.")
