"""Base of the sources of samples with classes, and their options."""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from datamodules.sources.base import HubOptions, Source, shortened
from datamodules.utils.errors import UsageError, require_same
from datamodules.utils.splits import first_of_each_label, stratified_split, stratified_subset

# What a network learns to predict of a sample, under the names of Hugging Face's configs.
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class SourceOptions(HubOptions):
    """What to know about a data set that its files do not say.

    Args:
        problem_type: Kind of target of each sample: one class, any number of labels, or a number.
        label_column: Column with the classes, labels or numbers; null: label, labels or the first
            `ClassLabel`.
        label_separator: Text between the labels of a sample in a table, if they are not a list.
        val_fraction: Fraction of the training samples of each class that is held out if the data
            have no validation split.
        split_seed: Seed of that split; independent of the seed of training, so that runs can be
            compared.
        class_names: Names in the order of the labels, such as bad, good for 0, 1 or for 1, 2; null:
            as the data say.
    """

    problem_type: ProblemType = "single_label_classification"
    label_column: str | None = None
    label_separator: str = ","
    val_fraction: float = 0.1
    split_seed: int = 0
    # YAML reads [1, 2.5] as numbers. What is no name is refused here, with advice.
    class_names: list[str | int | float | bool | list | dict | None] | None = None

    def __post_init__(self) -> None:
        if self.class_names is not None:
            for name in self.class_names:
                if name is None or isinstance(name, bool | list | dict):
                    raise UsageError(
                        f"--data.dataset.class_names has {name}: YAML reads no, yes, off, on, "
                        "false and true without quotes as booleans, null and ~ as nothing, and "
                        "brackets and colons as lists and mappings. Quote such names: "
                        "\"['no', 'yes']\"."
                    )
            object.__setattr__(self, "class_names", [str(name) for name in self.class_names])


class Split(Protocol):
    """Samples of one split with targets for each.

    `labels`: (S,) int64, a class each; (S, K) float32, 1 for each label of a sample, else 0; or
    (S, 1) float32, a number each.
    """

    @property
    def labels(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def select(self, index: Any) -> Any: ...

    def unreadable(self) -> list[str]:
        """Names of the samples that cannot be used, if they are not checked when they are read."""


S = TypeVar("S", bound=Split)


def class_counts(labels: Tensor, num_classes: int) -> Tensor:
    """(K,) int64: samples of each class, from classes (S,) or from labels 0 or 1, (S, K)."""
    return labels.long().sum(0) if labels.ndim == 2 else labels.bincount(minlength=num_classes)


def strata(samples: Split) -> Tensor:
    """(S,) int64, the class of each sample; all the same if samples do not have one each."""
    labels = samples.labels
    return labels if labels.ndim == 1 else torch.zeros(len(samples), dtype=torch.int64)


class LabelledSource(Source, Generic[S]):
    """Base: subclasses have class names, and read the samples of a split."""

    checkpoint_classes: list[str] | None = None  # of the model that is tested or resumed
    checkpoint_labels: list[str] | None = None  # those of its training data, for these classes
    labelled = True  # whether targets are read
    problem_option = "--model.problem_type"  # names the kind of targets on the command line
    needs_every_class = True  # whether the training split must have samples of each class
    problem_types: tuple[str, ...] = ("single_label_classification",)  # that the data can have
    label_fraction = 1.0  # of the training samples of each class that are used
    label_seed = 0  # of their choice

    @property
    def class_names(self) -> list[str]:
        """Names in the order of the labels."""
        raise NotImplementedError

    @property
    def class_labels(self) -> list[str]:
        """The label in the data of each class; it may have another name."""
        return self.class_names

    def use_checkpoint(self, metadata: Mapping[str, Any]) -> None:
        """Takes the classes from a checkpoint's metadata; older checkpoints lack the labels."""
        self.checkpoint_classes = metadata["class_names"]
        self.checkpoint_labels = metadata.get("class_labels")

    @property
    def more_classes(self) -> str:
        """What to do if there is one class only."""
        return f"add {self.noun} of another class"

    @property
    def tested_classes(self) -> list[str] | None:
        """Those of a checkpoint that is tested, of which the data may have only some."""
        if self.needs_every_class and self.has("train"):
            return None
        return self.checkpoint_classes

    def records(self, split: str) -> S | None:
        """Samples of "train", "val" or "test"; None if the data have no such split."""
        raise NotImplementedError

    def keep_labels(self, fraction: float, seed: int) -> None:
        """Uses only a part of each class of the training split; `UsageError` if there is none."""
        if not 0 < fraction <= 1:
            raise UsageError(
                f"--data.label_fraction is {fraction}, but must be above 0 and at most 1."
            )
        self.label_fraction = fraction
        self.label_seed = seed

    def split(self, split: str) -> S:
        """The samples of "train", "val" or "test", as `whole_split`.

        Of the training split only `label_fraction`, at least one sample with each label.
        """
        found = self.whole_split(split)
        if split != "train" or self.label_fraction == 1:
            return found
        index = stratified_subset(strata(found), self.label_fraction, self.label_seed)
        if self.options.problem_type == "multi_label_classification":
            others = first_of_each_label(found.labels, self.label_seed)
            index = torch.cat([index, others]).unique()
        kept: S = found.select(index)
        return kept

    def whole_split(self, split: str) -> S:
        """All samples of "train", "val" or "test".

        Without a validation split, it is `val_fraction` of each class of the training split, or of
        all samples if they do not have one class each;
        without a test split, the validation split is tested, with a warning. Of `unseen` data that
        are not split, both are all samples. Raises `UsageError` if there is no training split, or
        it is too small to hold samples out.
        """
        found = self.records("train" if self.is_evaluated_whole(split) else split)
        if found is not None and (split != "train" or self.has("val")):
            return found
        if split == "test":
            self.warn_untested()
            return self.whole_split("val")
        train = found if split == "train" else self.records("train")
        if train is None:
            raise UsageError(f"{self.origin} has no training split: add files for training.")
        options = self.options
        first, second = stratified_split(strata(train), options.val_fraction, options.split_seed)
        if len(second) == 0:
            bad = train.unreadable()
            also = ""
            if bad:
                also = f", and {len(bad)} of the {len(train)} cannot be read, such as {bad[0]}"
            raise UsageError(
                f"there are too few training {self.noun} to hold some out{also}: add a validation "
                "split."
            )
        return train.select(first if split == "train" else second)

    def split_in_data(self, split: str) -> str:
        """The split of the data that has the samples of `whole_split`."""
        if self.is_evaluated_whole(split):
            return "train"
        if split == "test" and not self.has(split):
            return self.split_in_data("val")
        return split if self.has(split) else "train"

    # Classes.

    def checked_class_names(self) -> list[str]:
        """The class names as the options call them.

        Raises:
            UsageError: The data do not have targets of this problem type; or the options name
                another number of classes, or there are fewer than two.
        """
        problem_type = self.options.problem_type
        if not self.options.label_separator:
            raise UsageError("--data.dataset.label_separator must not be empty.")
        if problem_type not in self.problem_types:
            raise UsageError(
                f"the {self.noun} of {self.origin} have one class each: for {problem_type} read "
                "them from a table, such as a CSV file with a column of labels or numbers."
            )
        names = self.class_names
        given = self.options.class_names or names
        if len(given) != len(names):
            raise UsageError(
                f"--data.dataset.class_names lists {len(given)} classes, the data have "
                f"{len(names)}: {shortened(names)}."
            )
        if len(given) < 2 and problem_type != "regression":
            found = f"one class only ({given[0]})" if given else "no labels"
            raise UsageError(
                f"{self.origin} has {found}, but a classifier needs at least two: "
                f"{self.more_classes}."
            )
        if len(set(given)) < len(given) or "" in given:
            raise UsageError(
                f"--data.dataset.class_names must be different words: {shortened(given)}."
            )
        if self.checkpoint_classes is None:
            self._warn_similar(given)
        return given

    def require_column(self, split: str, found: list[str], wanted: list[str]) -> None:
        """Raises `UsageError` if a split has none of the columns that may hold the labels.

        Upper and lower case count as the same here; the first of `wanted` is named.
        """
        if {name.lower() for name in wanted}.isdisjoint(name.lower() for name in found):
            raise UsageError(
                f"the {split} split of {self.origin} lacks the column {wanted[0]} of the training "
                f"split: add it, or give these {self.noun} to `predict` instead."
            )

    def require_every_class(self, labels: Tensor) -> None:
        """Raises `UsageError` if targets of training, (S,) or (S, K), lack a class."""
        names = self.class_names
        counts = class_counts(labels, len(names)).tolist()
        if 0 in counts:
            advice = f"add {self.noun} of it"
            if self.options.class_names:
                advice += (
                    f", or remove it from --data.dataset.class_names, and its {self.noun} from the "
                    "other splits"
                )
            raise UsageError(
                f"class {names[counts.index(0)]} is missing from the training split of "
                f"{self.origin}: {advice}."
            )

    def _warn_similar(self, names: list[str]) -> None:
        """Warns once of classes whose names differ only in case, spaces or their Unicode form."""
        groups: dict[str, list[str]] = {}
        for name in names:
            key = unicodedata.normalize("NFC", name.strip().casefold())
            groups.setdefault(key, []).append(name)
        similar = [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]
        if similar:
            self.warn_once(
                f"{shortened(similar)} are different classes, though their names differ only in "
                "case, spaces or Unicode form: correct the labels if they are the same."
            )

    def require_classes(self, expected: list[str]) -> None:
        """Compares the classes with those of a checkpoint. Raises `UsageError` if they differ."""
        names = self.checked_class_names()
        if names != expected and self.options.problem_type == "regression":
            raise UsageError(
                f"the data have the numbers {names[0]}, the model {expected[0]}: name the "
                "column with --data.dataset.label_column."
            )
        if names != expected:
            raise UsageError(
                f"the data have {len(names)} classes ({shortened(names)}), the model "
                f"{len(expected)} ({shortened(expected)}): use the data that it was trained for."
            )


def target_metadata(source: LabelledSource[Any]) -> dict[str, Any]:
    """What a model must know of its targets: primitives that a checkpoint keeps.

    Returns:
        problem_type, class_names (list of K, for regression the name of the column), class_labels
        (those of the classes in the data), num_classes (K), target_mean and target_std (of the
        numbers in the training split, for regression; else 0 and 1).
    """
    names = source.checked_class_names()
    mean = 0.0
    std = 1.0
    if source.options.problem_type == "regression":
        numbers = source.split("train").labels.double()  # (S, 1)
        mean = float(numbers.mean())
        std = float(numbers.std(correction=0)) or 1.0
    return {
        "problem_type": source.options.problem_type,
        "class_names": names,
        "class_labels": source.class_labels,
        "num_classes": len(names),
        "target_mean": mean,
        "target_std": std,
    }


def require_same_targets(options: SourceOptions, metadata: Mapping[str, Any]) -> None:
    """Raises `UsageError` if options name other targets than the metadata of a checkpoint."""
    require_same("dataset.class_names", options.class_names, metadata["class_names"])
    if options.problem_type != metadata["problem_type"]:
        raise UsageError(
            f"the problem type is {options.problem_type}, the model was trained with "
            f"{metadata['problem_type']}: add --model.problem_type {metadata['problem_type']}."
        )
