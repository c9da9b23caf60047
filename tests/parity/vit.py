"""Random models of timm and ours, and how far they are from each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from modules.config import StackConfig
from modules.models.vit import ViT, ViTConfig
from modules.pretrained.vit_transformers import FAMILIES

PLAIN = ViTConfig(32, 8, 3, 5, stack=StackConfig(width=48, depth=2, heads=4))


def on_meta(build: Any, *arguments: Any, **options: Any) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return build(*arguments, **options)


def timm_model(name: str, **options: Any) -> Any:
    """A registered model of timm with random weights."""
    return randomise(on_meta(timm.create_model, name, **options))


def randomise(model: Any) -> Any:
    """Gives a model weights among which no zeros or ones hide a mistake."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Logits of size 1, so that differences are absolute.
            is_head = name.startswith(("head", "classifier"))
            parameter.normal_(std=0.02 if is_head else 0.05, generator=generator)
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter += 1.0  # norms and scales
    return model.eval()


def cached_torchvision(
    monkeypatch: pytest.MonkeyPatch, name: str = "shufflenet_v2_x0_5", **options: Any
) -> tuple[Any, Path]:
    """A model of torchvision with random weights in torch's cache, and their file.

    They are there as a download leaves them. BatchNorm knows the means of random images: with
    others, the logits would hardly depend on the image.
    """
    monkeypatch.setenv("TORCH_HOME", str(Path("home").resolve()))
    net = torchvision.models.get_model(name, **options)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the mean of all batches
    with torch.no_grad():
        net.train()(torch.randn(8, 3, 224, 224))
    net.eval()
    url = torchvision.models.get_model_weights(name)["DEFAULT"].url
    file = Path("home/hub/checkpoints", Path(url).name)
    file.parent.mkdir(parents=True)
    torch.save(net.state_dict(), file)
    return net, file


def our_vit(theirs: nn.Module, config: ViTConfig, family: str = "timm", **options: Any) -> ViT:
    """Our ViT with the weights of theirs."""
    net = on_meta(ViT, config).eval()
    state = FAMILIES[family].weights_from_external(theirs.state_dict(), config, **options)
    net.load_state_dict(state, assign=True)
    return net


def difference(net: ViT, theirs: nn.Module, size: int = 0) -> float:
    """Largest difference of logits."""
    size = size or net.config.image_size
    images = torch.rand(2, net.config.channels or 0, size, size) * 2 - 1
    with torch.inference_mode():
        expected = theirs(images)
        found = net(images)
    expected = getattr(expected, "logits", expected)
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def tiny_timm(**options: Any) -> Any:
    """A small model of timm's class with random weights."""
    sizes: Any = {
        "img_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
    }
    return randomise(on_meta(VisionTransformer, **{**sizes, **options}))


def changed(option: str, value: Any) -> ViT:
    """A random network that differs from `PLAIN` in one option."""
    torch.manual_seed(0)
    own = option.removeprefix("stack.")
    if own == option:
        return ViT(replace(PLAIN, **{option: value})).eval()
    return ViT(replace(PLAIN, stack=replace(PLAIN.stack, **{own: value}))).eval()
