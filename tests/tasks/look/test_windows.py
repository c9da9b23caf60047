"""`look` of a Swin: weights in windows, in the grid of each stage."""

import math
import warnings

import pytest
import tessera
import torch
from torch import Tensor

from modules.config import StackConfig
from modules.models.swin import Swin, SwinConfig
from tasks.look.inspector import Component, Interventions
from tasks.look.inspectors import inspector_of
from tasks.look.views import Heads, Matrix, Table
from tests.helpers.tiny_models import close, shaken

FAST = Interventions(effects=False)
METADATA = {
    "class_names": ["a", "b", "c"],
    "channels": 1,
    "mean": [0.5],
    "std": [0.5],
    "problem_type": "single_label_classification",
    "target_mean": 0.0,
    "target_std": 1.0,
}


def classifier(size: int = 12) -> tessera.ImageClassifier:
    """Of images of 12 x 12 pixels grids of 6 x 6 and 3 x 3 tokens, the second in one window."""
    torch.manual_seed(0)
    config = SwinConfig(size, 2, 1, 3, depths=(2, 1), window_size=3, stack=StackConfig(8, 3, 2))
    return tessera.ImageClassifier(shaken(Swin(config)), {**METADATA, "image_size": size}, "swin")


def image(size: int = 12) -> Tensor:
    return torch.randint(0, 256, (1, size, size), dtype=torch.uint8)


def test_stages_have_grids_and_distances_of_their_own() -> None:
    model = classifier()
    pixels = image()
    tabs = inspector_of("vit", model).sample("", (pixels,), Interventions()).tabs
    first, second = tabs["attention"]
    assert isinstance(first, Heads) and isinstance(second, Heads)
    assert first.weights.shape == (1, 2, 2, 36, 36) and second.weights.shape == (1, 1, 4, 9, 9)
    assert (first.grid, second.grid) == ((6, 6), (3, 3))
    assert first.image is not None and torch.equal(first.image, pixels)
    assert (first.keys[6], second.keys[3]) == ("2,1", "2,1")
    entropies, distances, *later = [view for view in tabs["heads"] if isinstance(view, Matrix)]
    points = torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0)) * 2  # pixels
    expected = (first.weights[0] * torch.cdist(points, points)).sum(-1).mean(-1)
    close(distances.values, expected)
    points = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)) * 4
    expected = (second.weights[0] * torch.cdist(points, points)).sum(-1).mean(-1)
    close(later[1].values, expected)
    assert entropies.limits == pytest.approx((0, math.log(9)))  # 9 tokens in a window
    assert (entropies.values < math.log(9)).all()
    prediction = model.predict(pixels).probabilities
    table, *effects = tabs["prediction"] + tabs["ablation"]
    assert isinstance(table, Table) and dict(table.rows) == pytest.approx(prediction)
    assert [view.values.shape for view in effects if isinstance(view, Matrix)] == [(2, 3), (1, 5)]


def test_a_head_of_a_stage_is_ablated() -> None:
    model = classifier()
    pixels = image()
    ablate = Component(0, 3, "stages.1")
    tabs = inspector_of("vit", model).sample("", (pixels,), Interventions(ablate)).tabs
    table = tabs["ablation"][0]
    assert isinstance(table, Table)
    output = model.net.stages[1].stack.blocks[0].attention.attention.output
    with torch.no_grad():
        output.weight[:, 12:] = 0  # what head 3 of 4, each 4 wide, adds
    for name, _, after, _ in table.rows[:-1]:
        assert after == pytest.approx(model.predict(pixels).probabilities[name], abs=1e-6)


def test_a_grid_that_2x2_tokens_do_not_fill() -> None:
    """Of 5 x 5 tokens: the last of 3 x 3 reach beyond the picture, which becomes larger."""
    pixels = image(10)
    sample = inspector_of("vit", classifier(10)).sample("", (pixels,), FAST)
    first, second = sample.tabs["attention"]
    assert isinstance(first, Heads) and isinstance(second, Heads)
    assert first.image is not None and second.image is not None
    assert torch.equal(first.image, pixels)
    assert second.image.shape == (1, 12, 12) and torch.equal(second.image[:, :10, :10], pixels)
    assert not second.image[:, 10:].any()


def test_stages_of_many_tokens_are_left_out() -> None:
    pixels = image(66)
    with pytest.warns(UserWarning, match="stage 0 has 1,089 tokens"):
        sample = inspector_of("vit", classifier(66)).sample("", (pixels,), FAST)
    assert [view.title for view in sample.tabs["attention"]] == [
        "self-attention in windows of stage 1"
    ]
    with warnings.catch_warnings(action="error"):
        sample = inspector_of("vit", classifier(64)).sample("", (image(64),), FAST)
    assert len(sample.tabs["attention"]) == 2
