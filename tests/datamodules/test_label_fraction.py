"""Learning from a part of the labels: which samples stay, and what is left alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.images import ImageData, LoadingOptions
from datamodules.reviews import ReviewData
from datamodules.sources import TextDatasetOptions
from datamodules.text import TextLoading
from datamodules.utils.errors import UsageError
from datamodules.utils.splits import stratified_subset
from tests.helpers.refusals import refused
from tests.helpers.tables import write


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.37, 1.0])
def test_each_class_keeps_its_part_and_one_at_least(fraction: float) -> None:
    counts = torch.tensor([1, 4, 100, 0, 57])
    labels = torch.arange(5).repeat_interleave(counts)[torch.randperm(162)]
    kept = stratified_subset(labels, fraction, seed=3)
    assert torch.equal(kept, kept.unique())  # sorted, none twice
    expected = (counts * fraction).round().clamp(min=1).minimum(counts)
    assert torch.equal(labels[kept].bincount(minlength=5), expected.long())
    assert torch.equal(kept, stratified_subset(labels, fraction, seed=3))
    larger = stratified_subset(labels, min(1.0, 2 * fraction), seed=3)
    assert set(kept.tolist()) <= set(larger.tolist())
    if 0.01 < fraction < 1:
        assert not torch.equal(kept, stratified_subset(labels, fraction, seed=4))


def data_of(kind: str, seed: int = 0, **options: Any) -> Any:
    if kind == "images":
        return ImageData(loading=LoadingOptions(seed=seed), **options)
    return ReviewData(loading=TextLoading(seed=seed), **options)


def labels_of(data: Any, split: str) -> Tensor:
    data.setup("test" if split == "test" else "fit")
    labels: Tensor = data.dataset(split).labels
    return labels


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_validation_and_test_stay_whole(kind: str) -> None:
    whole = data_of(kind)
    part = data_of(kind, label_fraction=0.1)
    for split in ("val", "test"):
        assert torch.equal(labels_of(part, split), labels_of(whole, split))
        assert part.sample_names(split) == whole.sample_names(split)
    every = labels_of(whole, "train").bincount()
    kept = labels_of(part, "train").bincount()
    assert torch.equal(kept, (every * 0.1).round().long())
    names = part.sample_names("train")[1]
    assert set(names) < set(whole.sample_names("train")[1])
    assert names == data_of(kind, label_fraction=0.1).sample_names("train")[1]
    assert names != data_of(kind, seed=1, label_fraction=0.1).sample_names("train")[1]


def test_numbers_have_no_classes(tmp_path: Any) -> None:
    rows = [{"text": f"film {i}", "label": i / 7} for i in range(40)]
    write(tmp_path / "train.csv", rows)
    write(tmp_path / "val.csv", rows[:9])
    options = TextDatasetOptions(problem_type="regression")
    data = ReviewData("csv", str(tmp_path), label_fraction=0.25, dataset=options)
    assert len(labels_of(data, "train")) == 10
    assert len(labels_of(data, "val")) == 9


def test_of_several_labels_each_is_kept(tmp_path: Any) -> None:
    labels = ["often"] * 90 + ["often,rare"] * 2 + ["seldom"] * 8
    write(tmp_path / "train.csv", [{"text": f"film {i}", "label": x} for i, x in enumerate(labels)])
    write(tmp_path / "val.csv", [{"text": "one", "label": "often"}] * 3)
    options = TextDatasetOptions(problem_type="multi_label_classification")
    kept: list[set[str]] = []
    for fraction in (0.02, 0.1, 0.5, 1.0):
        data = ReviewData("csv", str(tmp_path), label_fraction=fraction, dataset=options)
        assert (labels_of(data, "train").sum(0) > 0).all()
        assert abs(len(data.dataset("train")) - 100 * fraction) <= 3
        kept.append({*data.sample_names("train")[1]})
    assert all(smaller < larger for smaller, larger in pairwise(kept))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
@pytest.mark.parametrize("kind", ["images", "texts"])
def test_no_fraction_is_refused(kind: str, fraction: float) -> None:
    with refused(UsageError, "--data.label_fraction"):
        data_of(kind, label_fraction=fraction)
