"""One family of published models: weights and config.json, converted both ways."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from modules.config import require
from modules.pretrained.settings import (
    Activations,
    Settings,
    check_aliases,
    check_model_type,
    check_settings,
    get_option,
    quoted,
    read_options,
)
from modules.pretrained.weights import (
    Layers,
    Names,
    State,
    build_on_meta,
    check_fit,
    drop_copies,
    from_external,
    to_external,
)

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class Family(ABC, Generic[Config]):
    """How another library names the weights of a model.

    Args:
        name: Of the family.
        layers: Our name of a layer -> theirs, without ".weight" / ".bias". Several of theirs are
            rows of ours, one below the other; "{i}" stands for the number of a block.
        tensors: Our full name -> theirs, for tensors that end differently on the two sides.
        unused: Regular expression of weights that files may hold and no model here uses.
        optional: Prefixes of our names that may be missing or of another shape.
    """

    name: str
    layers: Layers = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    unused: str = r"$^"
    optional: tuple[str, ...] = ()

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raises `ValueError` if no model of this family can equal ours, with the reason."""

    @abstractmethod
    def networks(self, config: Config) -> list[nn.Module]:
        """Builds the networks that have all weights of a file."""

    @abstractmethod
    def names(self, config: Config) -> Names:
        """Returns all of our names with theirs."""

    def copies(self, config: Config) -> dict[str, str]:
        """Returns their names of tied weights, each with the name of the original."""
        return {}

    def qkv_rows(self, config: Config) -> tuple[int, int, int] | None:
        """Returns the rows of queries, keys and values in our weight; None: equally many."""
        return None

    def full_name(self, name: str) -> str:
        """Returns the current full name of a weight; old files and bare models shorten it."""
        return name

    def import_tensor(self, name: str, value: Tensor, config: Config) -> Tensor:
        """Converts one of their weights into ours, given our name."""
        return value

    def export_tensor(self, name: str, value: Tensor, config: Config) -> Tensor:
        """Converts one of our weights into theirs, given our name."""
        return value

    def complete(self, rest: State, config: Config) -> None:
        """Adds to their weights those that a file may leave out."""

    def weights_from_external(self, state: State, config: Config) -> State:
        """Returns their weights, of a file or `state_dict()`, under our names for `load_weights`.

        Weights that are equal on both sides are shared, not copied. Raises `ValueError` if a weight
        is unexpected, missing or of another shape; by name.
        """
        rest = {
            self.full_name(name): value
            for name, value in state.items()
            if not re.search(self.unused, name)
        }
        drop_copies(self.copies(config), rest)
        self.complete(rest, config)
        ours = from_external(
            self.names(config), rest, lambda name, value: self.import_tensor(name, value, config)
        )
        wanted: dict[str, Tensor] = {}
        for net in build_on_meta(lambda: self.networks(config)):
            wanted |= net.state_dict()
        check_fit(self.name, ours, rest, wanted, self.optional)
        return ours

    def weights_to_external(self, state: State, config: Config) -> State:
        """Returns our weights under their names; tied weights are there once.

        Raises `ValueError` if no model of theirs can equal ours, with the reason.
        """
        self.check(config)
        rest = {name: self.export_tensor(name, value, config) for name, value in state.items()}
        theirs = to_external(self.names(config), rest, self.qkv_rows(config))
        unknown = ", ".join(sorted(rest)[:3])
        require(not rest, f"{self.name} has no place for {unknown}; build the model without it.")
        return theirs


@dataclass(frozen=True, kw_only=True)
class TransformersFamily(Family[Config]):
    """A family of transformers, whose config.json says the sizes.

    Args:
        architecture: Name of their class.
        options: Their option -> ours, in the config of our model or its stacks.
        required: Options of ours that the file must say.
        defaults: Options of ours if the file does not say.
        fixed: Options of ours that all models of the family have.
        typical: Options of ours by which a model that no family has is nearest to this one.
        only: Options of theirs that are supported at one value only.
        activations: Their name of an activation -> ours.
        prefix: Of the names of most weights; files of bare models leave it out.
        heads: Beginnings of names without this prefix, those of output layers.
    """

    architecture: str
    options: dict[str, str]
    required: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    typical: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    activations: Activations
    prefix: str = ""
    heads: tuple[str, ...] = ()

    def full_name(self, name: str) -> str:
        """Adds the prefix of a bare model."""
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def count_typical(self, config: Config) -> int:
        """Returns the number of `typical` options; -1 if the config has another value of one."""
        equal = all(get_option(config, name) == value for name, value in self.typical.items())
        return len(self.typical) if equal else -1

    def read(self, settings: Settings, *kinds: type) -> dict[str, Any]:
        """Returns the options of a config.json, under our names, with defaults.

        `kinds` are dataclasses that have the type of each option. Raises `ValueError` if an option
        is missing, of another type or not supported; by name.
        """
        check_settings(settings, self.only)
        given = read_options(settings, self.options, self.required, *kinds)
        options = {**self.defaults, **given, **self.fixed}
        check_aliases(settings, self.options.values(), options)
        act = options["feedforward"]
        known = ", ".join(self.activations)
        require(act in self.activations, f"activation {quoted(act)} is none of {known}.")
        return options | {"feedforward": self.activations[act]}

    def check_saved(self, state: State, config: Config) -> None:
        """Raises `ValueError` if weights that could be resized have other sizes than config.json.

        `state` has their full names.
        """

    @abstractmethod
    def config_from_external(self, settings: Settings) -> Config:
        """Returns the config of our model for their config.json.

        Raises:
            ValueError: The model has parts that ours lacks, or the file lacks a size; by name.
        """


FamilyType = TypeVar("FamilyType", bound=TransformersFamily)


def config_from_huggingface(
    settings: Settings, families: Mapping[str, TransformersFamily[Config]]
) -> tuple[str, Config]:
    """Returns the family and the config of the model that a config.json describes.

    Raises:
        ValueError: It is of no family, has parts that our models lack, or lacks a size; by name.
    """
    name = check_model_type(settings, families)
    return name, families[name].config_from_external(settings)


def matching_family(config: Any, families: Mapping[str, FamilyType]) -> FamilyType:
    """Returns the first family with a model that equals ours.

    Raises `ValueError` if none has one, with the reason of the nearest.
    """
    reasons: dict[str, ValueError] = {}
    for name, family in families.items():
        try:
            family.check(config)
        except ValueError as error:
            reasons[name] = error
        else:
            return family
    raise reasons[max(families, key=lambda name: families[name].count_typical(config))]
