"""Batched augmentation: each image has its own random numbers; one image is as in torchvision."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from datamodules.vision.augment import Augment, AugmentConfig, normalise, random_boxes
from datamodules.vision.rand_augment import OPERATIONS, RandAugment


def photos(count: int, channels: int = 3, side: int = 32) -> Tensor:
    """Smooth pictures with some noise: uint8 (B, C, H, W)."""
    torch.manual_seed(1)
    coarse = torch.rand(count, channels, 5, 5) * 200
    smooth = F.interpolate(coarse, (side, side), mode="bicubic")
    noise = 20 * torch.rand(count, channels, side, side)
    return (smooth + noise).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize(
    ("options", "min_distinct"),
    [
        ({"resized_crop": 0.3}, 20),
        ({"crop_padding": 4}, 20),
        ({"flip": 0.5}, 2),
        ({"rand_augment_ops": 2}, 20),
        ({"resized_crop": 0.3, "rand_augment_ops": 3}, 40),
    ],
)
def test_each_image_draws_its_own_and_the_seed_fixes_it_under_autocast_too(
    options: dict[str, float], min_distinct: int
) -> None:
    augment = Augment(AugmentConfig(**options))
    same = photos(1).expand(64, -1, -1, -1)
    torch.manual_seed(0)
    first = augment(same)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(same), first)
    assert not torch.equal(augment(same), first)
    assert first.dtype == torch.uint8
    assert first.shape == same.shape
    assert len(first.flatten(1).unique(dim=0)) >= min_distinct


def test_the_default_type_does_not_matter() -> None:
    images = photos(4)
    augment = Augment(AugmentConfig(resized_crop=0.3))
    torch.manual_seed(0)
    expected = augment(images)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        assert torch.equal(augment(images), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_does_nothing() -> None:
    augment = Augment(AugmentConfig())
    images = photos(3)
    labels = torch.tensor([2, 0, 1])
    assert torch.equal(augment(images), images)
    assert augment.erase(images) is images
    mixed, targets = augment.mix(images, F.one_hot(labels, 3).float())
    assert mixed is images
    assert torch.equal(targets, F.one_hot(labels, 3).float())


def test_crops_are_all_windows_of_the_padded_image() -> None:
    image = photos(1)
    crops = Augment(AugmentConfig(crop_padding=2))(image.expand(200, -1, -1, -1))
    padded = F.pad(image[0], [2, 2, 2, 2])
    windows = [padded[:, y : y + 32, x : x + 32] for y, x in product(range(5), range(5))]
    found = torch.stack([(crops == window).flatten(1).all(1) for window in windows])
    assert (found.sum(0) == 1).all()
    assert found.any(1).all()


def test_flips_with_the_probability_given() -> None:
    image = photos(1)
    flipped = Augment(AugmentConfig(flip=0.3))(image.expand(2000, -1, -1, -1))
    mirrored = (flipped == image.flip(-1)).flatten(1).all(1)
    assert (flipped[~mirrored] == image).all()
    assert 0.25 < mirrored.float().mean() < 0.35


def test_resized_crops_have_the_area_and_ratio_given_and_stay_inside() -> None:
    side = 64
    ramp = torch.arange(side, dtype=torch.float).mul(3).to(torch.uint8)
    image = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)])
    augment = Augment(AugmentConfig(resized_crop=0.25))
    out = augment(image.expand(2000, -1, -1, -1)).float() / 3  # column and row of each pixel
    width = (out[:, 0, 0, -1] - out[:, 0, 0, 0]) / (side - 1)
    height = (out[:, 1, -1, 0] - out[:, 1, 0, 0]) / (side - 1)
    area = width * height
    ratio = width / height
    assert 0.24 < area.min() < 0.3
    assert 0.9 < area.max() <= 1.01
    assert 0.72 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.38
    assert 0.58 < area.mean() < 0.67  # uniform from 0.25 to 1
    small = area < 0.5  # whose places vary most
    left = out[small, 0, 0, 0] / side / (1 - width[small])  # 0 to 1
    top = out[small, 1, 0, 0] / side / (1 - height[small])
    assert abs(left.mean() - 0.5) < 0.06 and abs(top.mean() - 0.5) < 0.06
    assert abs(torch.corrcoef(torch.stack([left, top]))[0, 1]) < 0.15


@pytest.mark.parametrize("smallest", [0.6, 0.9, 1.0])
def test_large_crops_keep_the_smallest_area(smallest: float) -> None:
    side = 64
    ramp = torch.arange(side, dtype=torch.float).mul(3).to(torch.uint8)
    image = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)])
    out = Augment(AugmentConfig(resized_crop=smallest))(image.expand(500, -1, -1, -1)).float() / 3
    width = (out[:, 0, 0, -1] - out[:, 0, 0, 0]) / (side - 1)
    height = (out[:, 1, -1, 0] - out[:, 1, 0, 0]) / (side - 1)
    assert (width * height).min() > smallest - 0.02


@pytest.mark.parametrize("name", v2.RandAugment._AUGMENTATION_SPACE)
def test_operation_equals_torchvision_on_single_images(name: str) -> None:
    op = OPERATIONS[name]
    for magnitude, channels in product((0, 9, 17, 30), (1, 3)):
        theirs = v2.RandAugment(magnitude=magnitude)
        magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
        strengths = magnitudes(31, 32, 32)
        strength = 0.0 if strengths is None else float(strengths[magnitude])
        assert op.signed == signed
        assert op.strength(magnitude / 30, 32) == pytest.approx(strength, abs=1e-4)
        images = photos(6, channels)
        for sign in (1, -1) if signed else (1,):
            ours = op.apply(images, sign * op.strength(magnitude / 30, 32)).int()
            expected = theirs._apply_image_or_video_transform(
                images, name, sign * strength, "nearest", {}
            )
            difference = (ours - expected.int()).abs()
            if name in ("ShearX", "ShearY", "Rotate"):  # halfway between two pixels either is right
                assert (difference > 0).float().mean() <= 0.01
            else:
                assert difference.max() <= (
                    name in ("Brightness", "Color", "Contrast", "Sharpness")
                )


def test_rand_augment_draws_operation_and_sign_evenly_and_keeps_the_order_of_images() -> None:
    assert list(OPERATIONS) == list(v2.RandAugment._AUGMENTATION_SPACE)
    images = photos(40).repeat(70, 1, 1, 1)
    torch.manual_seed(0)
    out = RandAugment(1, 9)(images)
    explained = torch.zeros(len(images), dtype=torch.bool)
    for name, op in OPERATIONS.items():
        signs = (1.0, -1.0) if op.signed else (1.0,)
        for sign in signs:
            expected = op.apply(images, sign * op.strength(0.3, 32))
            equal = (out == expected).flatten(1).all(1)
            explained |= equal
            assert 0.6 < equal.float().mean() * len(OPERATIONS) * len(signs) < 1.4, name
    assert explained.all()


def test_normalise_equals_torchvision() -> None:
    images = photos(4)
    mean = [0.4914, 0.4822, 0.4465]
    std = [0.247, 0.2435, 0.2616]
    expected = v2.functional.normalize(v2.functional.to_dtype(images, scale=True), mean, std)
    torch.testing.assert_close(normalise(images, mean, std), expected, atol=1e-6, rtol=1e-5)


def test_erase_blanks_one_rectangle_of_each_chosen_image() -> None:
    out = Augment(AugmentConfig(erase=0.5)).erase(torch.ones(1000, 3, 32, 32))
    blank = (out == 0).all(1)
    assert torch.equal(blank, (out == 0).any(1))
    assert 0.44 < blank.flatten(1).any(1).float().mean() < 0.56
    area = blank.flatten(1).sum(1)
    assert torch.equal(blank.any(2).sum(1) * blank.any(1).sum(1), area)
    assert area.max() <= 0.36 * 32 * 32
    assert len(area.unique()) > 50


@pytest.mark.parametrize(
    "options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}]
)
def test_targets_are_the_fraction_of_each_class_in_the_pixels(options: dict[str, float]) -> None:
    config = AugmentConfig(**options)
    labels = torch.arange(64) % 10
    images = F.one_hot(labels, 10).float()[:, :, None, None].expand(-1, -1, 16, 16)
    mixed, targets = Augment(config).mix(images, F.one_hot(labels, 10).float())
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    torch.testing.assert_close(targets, mixed.mean((2, 3)))
    assert len(targets.gather(1, labels[:, None]).unique()) > 15
    whole = (mixed == mixed[:, :, :1, :1]).flatten(1).all(1)  # images without a pasted rectangle
    if config.mixup == 0:
        assert set(mixed.unique().tolist()) <= {0.0, 1.0}
    elif config.cutmix == 0:
        assert whole.all()
    else:
        assert 10 < whole.sum() < 54


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_mixing_weights_are_drawn_from_beta(alpha: float) -> None:
    classes = torch.arange(8000) % 200
    targets = F.one_hot(classes).float()

    def drawn(**alphas: float) -> tuple[Tensor, Tensor]:
        """The weight of each image's own label, and whether rectangles were pasted."""
        _, mixed = Augment(AugmentConfig(**alphas)).mix(torch.zeros(8000, 1, 32, 32), targets)
        weight = mixed.gather(1, classes[:, None])[:, 0]
        return weight, (weight * 32**2).frac() == 0

    weight, is_cutmix = drawn(mixup=alpha, cutmix=9 - alpha)
    assert 0.45 < is_cutmix.float().mean() < 0.55
    variance = float(weight[~is_cutmix].var())
    assert variance == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.12)
    weight, is_cutmix = drawn(mixup=9 - alpha, cutmix=alpha)
    small = float((1 - weight[is_cutmix] < 0.05).float().mean())
    beta = torch.distributions.Beta(alpha, alpha).sample((8000,))
    assert small == pytest.approx(float((beta < 0.05).float().mean()), abs=0.08)


def test_boxes_are_anywhere() -> None:
    boxes = random_boxes(torch.full((4000,), 0.25), torch.ones(4000), 32, 32)
    covered = boxes.float().mean((0, 1))  # (H, W)
    for flipped in (covered.flip(0), covered.flip(1)):
        torch.testing.assert_close(covered, flipped, atol=0.08, rtol=0)
    assert covered[16, 16] == pytest.approx(0.25, abs=0.03)


def test_erased_rectangles_have_the_published_areas_and_ratios() -> None:
    blank = (Augment(AugmentConfig(erase=1.0)).erase(torch.ones(4000, 1, 64, 64)) == 0)[:, 0]
    cut = blank[:, 0].any(1) | blank[:, -1].any(1) | blank[:, :, 0].any(1) | blank[:, :, -1].any(1)
    height, width = (blank.any(axis).sum(1)[~cut] for axis in (2, 1))
    area = height * width / 64**2
    assert 0.01 < area.min() < 0.04 and 0.25 < area.max() < 0.36  # 0.02 to 0.33
    assert 0.28 < (height / width).min() < 0.4 and 2.5 < (height / width).max() < 3.6
