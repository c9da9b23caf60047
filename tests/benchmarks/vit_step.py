"""Training step of a ViT, ours against timm's as its users run it.

    python -m tests.benchmarks.vit_step [--preset swin] [--profile]

32 x 32 pixels, batch 64, float32, two threads; forward, backward, AdamW. The ViT has patch 4, 192
wide, 9 layers, 3 heads; DeiT, the Mixer and `22b`, a ViT with blocks of ViT-22B, have the same
sizes; Swin and its second version are `swin_cifar`; the hybrid is R+Ti/16 on 224 x 224 pixels,
batch 8.
"tessera" keeps freed memory as `fit` does, "plain malloc" leaves the allocator alone.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

STEPS = 4  # in each round


def training(net: Any, optimizer: Any, size: int) -> Round:
    """Rounds of steps on random images of size x size pixels."""
    batch = 64 if size == 32 else 8
    images = torch.randn(batch, 3, size, size)
    labels = torch.randint(0, 10, (batch,))

    def loss() -> tuple[torch.Tensor, int]:
        return F.cross_entropy(net(images), labels), batch

    return _compare.training(optimizer, loss, STEPS)


def config_of(preset: str) -> Any:
    """The config of a network."""
    from modules.models.images import IMAGE_PRESETS
    from modules.models.swin import second_version

    if preset.startswith("swin"):
        config: Any = IMAGE_PRESETS["swin_cifar"]
        return second_version(config) if preset == "swinv2" else config
    if preset == "hybrid":
        return replace(IMAGE_PRESETS["hybrid_tiny"], num_classes=10)
    config = IMAGE_PRESETS["cifar_tiny"]
    if preset == "22b":
        stack = replace(IMAGE_PRESETS["22b"].stack, width=192, depth=9, heads=3)
        config = replace(config, pool="mean", stack=stack)
    if preset == "deit":
        config = replace(config, distillation_token=True)
    if preset == "mixer":
        stack = replace(config.stack, order="mixer")
        config = replace(config, pool="mean", position="none", stack=stack)
    return config


CLASSES = {
    "cifar_tiny": "VisionTransformer",
    "deit": "VisionTransformerDistilled",
    "mixer": "MlpMixer",
    "swin": "SwinTransformer",
    "swinv2": "SwinTransformerV2",
    "22b": "VisionTransformer",
    "hybrid": "vit_tiny_r_s16_p8_224",  # made by a function
}


def timm_net(preset: str) -> Any:
    """timm's network of the same sizes."""
    import timm.models
    from timm.models.vision_transformer import ParallelScalingBlock

    from modules.pretrained.images import conversion

    make = getattr(timm.models, CLASSES[preset])
    if preset == "hybrid":
        return make(num_classes=10)
    config = config_of(preset)
    arguments = conversion(config).arguments(config)
    if preset == "22b":
        arguments |= {"block_fn": ParallelScalingBlock, "norm_layer": "rmsnorm"}
    return make(**arguments)


def timm(options: Namespace) -> Round:
    """timm's model with PyTorch's AdamW as it comes."""
    net = timm_net(options.preset)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    return training(net, optimizer, config_of(options.preset).image_size)


def plain_malloc(options: Namespace) -> Round:
    """Our model with our optimizer, the allocator left alone."""
    from modules.models.images import build_image_net

    config = config_of(options.preset)
    net = build_image_net(config)
    return training(net, _compare.our_optimizer(net), config.image_size)


def tessera(options: Namespace) -> Round:
    """The same with the allocator tuned as `fit` does it."""
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    return plain_malloc(options)


COMPETITORS = {"timm": timm, "tessera": tessera, "tessera, plain malloc": plain_malloc}


def profile(name: str, run: Round) -> None:
    """Prints which operations take the time of a round."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"{name}: {total / 1000 / STEPS:.0f} ms a step")
    for event in events[:16]:
        print(f"  {event.self_cpu_time_total / total:>6.1%}  {event.key}")


def main() -> None:
    """Parses the command line and prints the table."""
    parser = _compare.arguments(__doc__, 10)
    parser.add_argument("--preset", default="cifar_tiny", choices=CLASSES, help="the network")
    parser.add_argument("--profile", action="store_true", help="print which operations take time")
    options = _compare.parse(parser, COMPETITORS)
    print(_compare.table(_compare.interleave(COMPETITORS, options.rounds), "images/s"))
    if options.profile:
        for name in ("timm", "tessera"):
            profile(name, COMPETITORS[name](options))


if __name__ == "__main__":
    main()
