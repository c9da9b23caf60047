"""Test-time augmentation: averages over views, in test, predict and Python."""

import json
from pathlib import Path

import pytest
import tessera
import torch
from torch import Tensor
from torchvision.transforms.functional import center_crop, hflip, resize, ten_crop

from datamodules.utils.errors import UsageError
from datamodules.vision.views import VIEWS, average_over_views
from tests.helpers.command import Console
from tests.helpers.refusals import refused
from tests.helpers.results import logged, summary, table
from tests.helpers.tiny import picture


class Pixel:
    """A network whose logits are the first pixels of an image; counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images[:, 0, 0, :3]  # (B, 3)


def test_logits_are_averaged_over_the_views() -> None:
    images = torch.rand(4, 3, 14, 14)
    left, right = images[:, 0, 0, :3], images[:, 0, 0, -3:].flip(-1)
    net = Pixel()
    assert average_over_views(net, images, "none").equal(left) and net.calls == 1
    torch.testing.assert_close(average_over_views(net, images, "flip"), (left + right) / 2)
    views = ten_crop(resize(images, [16, 16], antialias=True), [14, 14])
    expected = torch.stack([view[:, 0, 0, :3] for view in views]).mean(0)
    torch.testing.assert_close(average_over_views(net, images, "ten_crop"), expected)


@pytest.mark.parametrize("name", VIEWS)
def test_views_have_the_shape_of_the_images(name: str) -> None:
    images = torch.rand(2, 1, 9, 9)
    for view in VIEWS[name](images):  # type: ignore[index]
        assert view.shape == images.shape


def test_the_last_view_is_that_of_embeddings() -> None:
    """The image as it is, or the centre of the larger one."""
    images = torch.rand(2, 1, 14, 14)
    assert VIEWS["flip"](images)[-1].equal(images)
    larger = resize(images, [16, 16], antialias=True)
    assert VIEWS["ten_crop"](images)[-1].equal(larger[..., 1:-1, 1:-1])


def probabilities(path: Path) -> dict[str, float]:
    """The columns of classes of predictions.csv with one row."""
    (row,) = table(path)
    return {name: float(row[name]) for name in "0123456789"}


def test_predict_test_and_python_average_the_same(best: Path, console: Console) -> None:
    picture(8, "L").save("a.png")
    model = tessera.load(best, kind=tessera.ImageClassifier)
    pixels = model.pixels("a.png")  # (1, 8, 8)
    both = (model.logits(pixels) + model.logits(hflip(pixels))) / 2
    expected = both.softmax(-1)
    console.printed(f"predict --ckpt_path {best} --input a.png --model.tta flip --output a.csv")
    assert [*probabilities(Path("a.csv")).values()] == pytest.approx(expected.tolist(), abs=1e-5)
    found = model.predict("a.png", tta="flip")
    assert isinstance(found, tessera.Prediction)
    ordered = [found.probabilities[name] for name in model.class_names]
    assert ordered == pytest.approx(expected.tolist(), abs=1e-5)
    plain = model.predict("a.png")
    assert isinstance(plain, tessera.Prediction)
    assert plain.probability == pytest.approx(float(model.logits(pixels).softmax(-1).max()))
    with refused(UsageError, "flip"):
        model.predict("a.png", tta="mirror")  # type: ignore[call-overload]
    console.refused(f"predict --ckpt_path {best} --input a.png --model.tta mirror", "ten_crop")

    console.printed(f"test --ckpt_path {best} --model.tta flip --output out")
    console.printed(f"test --ckpt_path {best} --output plain")
    found_test, plain_test = (
        json.loads(Path(name, "test.json").read_text()) for name in ("out", "plain")
    )
    assert found_test["test/loss"] != plain_test["test/loss"]


@pytest.mark.slow
def test_training_validates_without_it(console: Console) -> None:
    line = "fit --trainer.max_epochs 1 --trainer.limit_train_batches 2 --seed_everything 3"
    losses = []
    for name in VIEWS:
        console.printed(f"{line} --model.tta {name} --run_dir {name}")
        losses.append((logged(name, "val/loss")[-1], summary(name)["test/loss"]))
    assert len({val for val, _ in losses}) == 1 and len({test for _, test in losses}) == len(VIEWS)


def test_ten_crop_enlarges_by_an_eighth() -> None:
    images = torch.rand(1, 3, 224, 224)
    larger = resize(images, [256, 256], antialias=True)
    assert torch.equal(VIEWS["ten_crop"](images)[-1], center_crop(larger, [224, 224]))
