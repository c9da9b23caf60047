"""Masked autoencoders: what is seen, what counts, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modules.config import StackConfig
from modules.models.mae import MAE_PRESETS, MAEConfig, MaskedAutoencoder, moments
from modules.models.vit import VIT_PRESETS, ViT
from modules.patch_embedding import STEMS, cut_patches, join_patches
from modules.position import POSITIONS
from tests.helpers.tiny_models import assert_all_learn, close, shaken

ENCODER = StackConfig(24, 2, 2)
CONFIG = MAEConfig(16, 4, 3, stack=ENCODER, decoder=StackConfig(16, 1, 2))
POSITIONS_OF_IMAGES = [name for name, kind in POSITIONS.items() if 2 in kind.dims]


def masked_autoencoder(**options: Any) -> Any:
    return shaken(MaskedAutoencoder(replace(CONFIG, **options))).eval()


def masks(net: Any, count: int = 3) -> Any:
    """Visible and masked patches."""
    return net.split(torch.rand(count, net.config.num_patches))


def repainted(images: torch.Tensor, patches: torch.Tensor, size: int) -> torch.Tensor:
    """Images with other pixels in some patches (B, M)."""
    changed = images.clone()
    side = images.shape[-1] // size
    for image, numbers in zip(changed, patches.tolist(), strict=True):
        for number in numbers:
            row, column = (size * index for index in divmod(number, side))
            part = image[:, row : row + size, column : column + size]
            part.copy_(torch.randn_like(part))
    return changed


def test_patches_are_cut_row_by_row_and_joined_again() -> None:
    images = torch.randn(2, 3, 8, 8)
    patches = cut_patches(images, 4)
    assert torch.equal(patches[:, 1], images[:, :, :4, 4:].flatten(1))
    assert torch.equal(join_patches(patches, (2, 2), 4), images)


@pytest.mark.parametrize("ratio, visible", [(0.75, 4), (0.5, 8), (0.9, 1), (0.01, 15)])
def test_each_patch_is_either_visible_or_masked(ratio: float, visible: int) -> None:
    kept, masked = masks(masked_autoencoder(mask_ratio=ratio))
    assert kept.shape == (3, visible)
    assert torch.equal(torch.cat((kept, masked), 1).sort(1).values, torch.arange(16).expand(3, -1))
    assert not torch.equal(kept[0].sort().values, kept[1].sort().values) or visible == 15


@pytest.mark.parametrize("position", POSITIONS_OF_IMAGES)
def test_no_images_have_no_patches(position: str) -> None:
    net = masked_autoencoder(position=position)
    visible, masked = masks(net, 0)
    assert net(torch.rand(0, 3, 16, 16), visible, masked).shape == (0, 12, 48)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("position", ["learned", "rotary2d"])
def test_masked_pixels_have_no_influence_and_visible_ones_have(stem: str, position: str) -> None:
    """Also with stems whose filters overlap."""
    net = masked_autoencoder(stem=stem, position=position)
    images = torch.randn(3, 3, 16, 16)
    kept, masked = masks(net)
    predicted = net(images, kept, masked)
    assert predicted.shape == (3, 12, 48)
    close(net(repainted(images, masked, 4), kept, masked), predicted)
    changed = net(repainted(images, kept, 4), kept, masked)
    assert (changed - predicted).abs().mean() > 1e-3


@pytest.mark.parametrize("position", POSITIONS_OF_IMAGES)
def test_the_order_of_visible_patches_does_not_matter_but_their_place_does(position: str) -> None:
    net = masked_autoencoder(position=position, register_tokens=1)
    images = torch.randn(3, 3, 16, 16)
    kept, masked = masks(net)
    predicted = net(images, kept, masked)
    close(net(images, kept.flip(1), masked), predicted)
    close(net(images, kept, masked.flip(1)), predicted.flip(1))
    assert_all_learn(net, net.loss(predicted, images, masked))
    if position != "none":
        assert (predicted[:, 0] - predicted[:, 1]).abs().mean() > 1e-3


def test_all_patches_visible_is_the_encoder_of_the_vit() -> None:
    config = replace(CONFIG, position="rotary2d", pool="mean", num_classes=3)
    net = shaken(MaskedAutoencoder(config)).eval()
    vit = ViT(config.encoder).eval()
    state = {name: value for name, value in net.state_dict().items() if "decoder" not in name}
    missing = vit.load_state_dict(state, strict=False)
    assert {name.partition(".")[0] for name in missing.missing_keys} == {"head"}
    images = torch.randn(2, 3, 16, 16)
    order = torch.rand(2, 16).argsort(1)
    close(net.tokens(images, kept=order).mean(1), vit.features(images))


def test_only_masked_patches_count() -> None:
    net = masked_autoencoder(norm_pixels=False)
    images = torch.randn(3, 3, 16, 16)
    kept, masked = masks(net)
    predicted = torch.zeros(3, 12, 48)
    loss = net.loss(predicted, images, masked)
    hidden = net.hide(images, masked)
    expected = ((images - hidden) ** 2).sum() / predicted.numel()
    close(loss, expected)
    close(net.loss(predicted, repainted(images, kept, 4), masked), loss)


def test_float64_predictions_keep_their_digits() -> None:
    net = masked_autoencoder(norm_pixels=False).double()
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    masked = torch.zeros(3, 1, dtype=torch.int64)
    predicted = cut_patches(images, 4)[:, :1]  # (B, 1, C P P)
    assert net.loss(predicted, images, masked) == 0
    assert torch.equal(net.reconstruct(images, predicted, masked), images)


def test_patches_of_one_colour_have_finite_targets_and_gradients() -> None:
    net = masked_autoencoder(norm_pixels=True)
    images = torch.full((3, 3, 16, 16), 0.7)
    kept, masked = masks(net)
    predicted = net(images, kept, masked)
    loss = net.loss(predicted, images, masked)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in net.parameters())
    close(net.reconstruct(images, torch.zeros_like(predicted), masked), images)


@pytest.mark.parametrize("norm_pixels", [True, False])
def test_a_perfect_prediction_has_no_loss_and_gives_the_image_back(norm_pixels: bool) -> None:
    net = masked_autoencoder(norm_pixels=norm_pixels)
    images = torch.randn(3, 3, 16, 16)
    _, masked = masks(net)
    targets = torch.stack([cut_patches(images, 4)[i, masked[i]] for i in range(3)])
    if norm_pixels:
        targets = (targets - targets.mean(-1, keepdim=True)) / targets.std(-1, keepdim=True)
    assert net.loss(targets, images, masked) < 1e-9
    close(net.reconstruct(images, targets, masked), images, atol=1e-4)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"mask_ratio": 0.0}, "mask_ratio is 0.0"),
        ({"mask_ratio": 1.0}, "mask_ratio is 1.0"),
        ({"mask_ratio": 0.99}, "leaves 0 of 16 patches"),
        ({"patch_size": 16}, "leaves 0 of 1 patches"),
        ({"image_size": 18}, "not a multiple of patch_size"),
        ({"stack": replace(ENCODER, order="mixer")}, "mixer"),
        ({"decoder": StackConfig(18, 1, 2)}, "width that 4 divides"),
        ({"stack": replace(ENCODER, conv_kernel=3)}, "stack.conv_kernel"),
        ({"decoder": StackConfig(16, 1, 2, conv_kernel=3)}, "decoder.conv_kernel"),
        ({"decoder": StackConfig(16, 1, 2, causal=True)}, "decoder.causal"),
        ({"decoder": StackConfig(16, 1, 2, norm="nothing")}, "decoder.norm"),
    ],
)
def test_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(CONFIG, **options)


def test_encoders_are_those_of_the_vit() -> None:
    for name in ("base", "large", "huge"):
        ours, theirs = MAE_PRESETS[name], VIT_PRESETS[name]
        assert replace(ours.encoder, position="learned", num_classes=1000) == theirs


def test_patches_are_normalised_with_the_published_epsilon() -> None:
    patches = 1e-3 * torch.randn(2, 3, 48)
    mean, std = moments(patches)
    close(mean, patches.mean(-1, keepdim=True), atol=1e-9)
    close(std, (patches.var(-1, keepdim=True) + 1e-6).sqrt(), atol=0)
