"""Batched augmentation: each image its own draw, and for one image what torchvision computes."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from datamodules.vision.augment import Augment, AugmentConfig, normalise
from datamodules.vision.rand_augment import OPERATIONS, RandAugment

ON = {
    "resized_crop": AugmentConfig(resized_crop=0.3),
    "crop": AugmentConfig(crop_padding=4),
    "flip": AugmentConfig(flip=0.5),
    "rand_augment": AugmentConfig(rand_augment_ops=2),
}


def photos(count: int, channels: int = 3, side: int = 32) -> Tensor:
    """Smooth pictures with some noise, unlike in each channel: (B, C, Y, X)."""
    torch.manual_seed(1)
    coarse = torch.rand(count, channels, 5, 5) * 200
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    return (smooth + 20 * torch.rand(count, channels, side, side)).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("name", ON)
def test_each_image_draws_its_own(name: str) -> None:
    augment = Augment(ON[name])
    same = photos(1).expand(64, -1, -1, -1)
    torch.manual_seed(0)
    first = augment(same)
    torch.manual_seed(0)
    assert torch.equal(augment(same), first)
    assert not torch.equal(augment(same), first)
    assert first.dtype == torch.uint8 and first.shape == same.shape
    assert len(first.flatten(1).unique(dim=0)) >= (2 if name == "flip" else 20)


def test_off_by_default() -> None:
    images = photos(4)
    assert torch.equal(Augment(AugmentConfig())(images), images)


def test_crop_is_a_window_of_the_padded_image() -> None:
    image = photos(1)
    crops = Augment(AugmentConfig(crop_padding=2))(image.expand(200, -1, -1, -1))
    padded = v2.functional.pad(image[0], [2, 2, 2, 2])
    windows = {
        padded[:, y : y + 32, x : x + 32].contiguous().numpy().tobytes()
        for y in range(5)
        for x in range(5)
    }
    assert {crop.contiguous().numpy().tobytes() for crop in crops} == windows


def test_flip_mirrors_the_share_it_is_given() -> None:
    image = photos(1)
    flipped = Augment(AugmentConfig(flip=0.3))(image.expand(2000, -1, -1, -1))
    mirrored = (flipped == image.flip(-1)).flatten(1).all(1)
    assert torch.equal(flipped[~mirrored][0], image[0])
    assert 0.25 < mirrored.float().mean() < 0.35


def test_resized_crop_takes_the_share_it_is_given_and_keeps_within_the_image() -> None:
    side = 64
    ramp = torch.arange(side, dtype=torch.float).mul(3).to(torch.uint8)
    image = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)])[
        None
    ]  # column, row
    out = Augment(AugmentConfig(resized_crop=0.25))(image.expand(500, -1, -1, -1)).float() / 3
    width = (out[:, 0, 0, -1] - out[:, 0, 0, 0]) / (side - 1)
    height = (out[:, 1, -1, 0] - out[:, 1, 0, 0]) / (side - 1)
    area, ratio = width * height, width / height
    assert 0.24 < area.min() < 0.3 and 0.9 < area.max() <= 1.01
    assert ratio.min() > 0.72 and ratio.max() < 1.38


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_torchvision_on_single_images(
    name: str, magnitude: int, channels: int
) -> None:
    theirs = v2.RandAugment(magnitude=magnitude)
    op, images = OPERATIONS[name], photos(6, channels)
    magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
    strengths = magnitudes(31, 32, 32)
    strength = 0.0 if strengths is None else float(strengths[magnitude])
    assert op.signed == signed
    assert op.strength(magnitude / 30, 32) == pytest.approx(strength, abs=1e-4)
    for sign in (1, -1) if signed else (1,):
        ours = op.apply(images, sign * op.strength(magnitude / 30, 32)).int()
        expected = theirs._apply_image_or_video_transform(
            images, name, sign * strength, "nearest", {}
        )
        apart = (ours - expected.int()).abs()
        if name in ("ShearX", "ShearY", "Rotate"):  # halfway between two pixels either is right
            assert (apart > 0).float().mean() <= 0.01
        else:
            assert apart.max() <= (name in ("Brightness", "Color", "Contrast", "Sharpness"))


def test_operations_are_those_of_torchvision() -> None:
    assert list(OPERATIONS) == list(v2.RandAugment._AUGMENTATION_SPACE)


def test_rand_augment_draws_operation_and_sign_evenly() -> None:
    torch.manual_seed(0)
    image = photos(1)
    out = RandAugment(1, 9)(image.expand(2800, -1, -1, -1))
    for name, op in OPERATIONS.items():
        for sign in (1.0, -1.0) if op.signed else (1.0,):
            expected = op.apply(image, sign * op.strength(0.3, 32))
            share = (out == expected).flatten(1).all(1).float().mean() * len(OPERATIONS)
            assert 0.6 < share * (2 if op.signed else 1) < 1.4, name


def test_rand_augment_keeps_images_in_their_places() -> None:
    images = photos(40)
    out = RandAugment(1, 9)(images)
    found = [
        op.apply(images, sign * op.strength(0.3, 32)) == out
        for op in OPERATIONS.values()
        for sign in ((1, -1) if op.signed else (1,))
    ]
    assert torch.stack(found).flatten(2).all(2).any(0).all()


def test_normalise_equals_torchvision() -> None:
    images, mean, std = photos(4), [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]
    expected = v2.functional.normalize(v2.functional.to_dtype(images, scale=True), mean, std)
    torch.testing.assert_close(normalise(images, mean, std), expected, atol=1e-6, rtol=1e-5)


def test_erase_blanks_one_rectangle_of_each_chosen_image() -> None:
    out = Augment(AugmentConfig(erase=0.5)).erase(torch.ones(1000, 3, 32, 32))
    blank = (out == 0).all(1)
    assert torch.equal(blank, (out == 0).any(1))
    erased = blank.flatten(1).any(1)
    assert 0.44 < erased.float().mean() < 0.56
    rows, columns = blank.any(2).sum(1), blank.any(1).sum(1)
    area = blank.flatten(1).sum(1)
    assert torch.equal(rows * columns, area)
    assert area.max() <= 0.36 * 32 * 32 and len(area.unique()) > 50


@pytest.mark.parametrize(
    "config",
    [AugmentConfig(mixup=0.4), AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.4, cutmix=1.0)],
    ids=["mixup", "cutmix", "both"],
)
def test_mixed_labels_are_the_share_of_each_class_in_the_pixels(config: AugmentConfig) -> None:
    torch.manual_seed(0)
    labels = torch.arange(64) % 10
    images = (
        torch.nn.functional.one_hot(labels, 10).float()[:, :, None, None].expand(-1, -1, 16, 16)
    )
    mixed, targets = Augment(config).mix(images, labels, 10)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    torch.testing.assert_close(targets, mixed.mean((2, 3)))
    assert len(targets.gather(1, labels[:, None]).unique()) > 15
    if config.mixup == 0:
        assert set(mixed.unique().tolist()) <= {0.0, 1.0}
    if config.cutmix == 0:
        assert torch.equal(mixed[:, :, :1, :1].expand_as(mixed), mixed)


def test_mix_off_gives_hard_targets() -> None:
    images, labels = torch.rand(3, 1, 4, 4), torch.tensor([2, 0, 1])
    mixed, targets = Augment(AugmentConfig()).mix(images, labels, 3)
    assert (
        mixed is images
        and torch.equal(targets.argmax(1), labels)
        and torch.equal(targets.sum(1), torch.ones(3))
    )


def test_autocast_does_not_move_pixels() -> None:
    augment, images = Augment(AugmentConfig(resized_crop=0.3, rand_augment_ops=3)), photos(32)
    torch.manual_seed(0)
    plain = augment(images)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(images), plain)


@pytest.mark.parametrize(
    "wrong", [{"flip": 1.5}, {"crop_padding": -1}, {"rand_augment_magnitude": 31}, {"mixup": -0.1}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AugmentConfig(**wrong)  # type: ignore[arg-type]
