"""Training step of a ViT, ours against timm's as its users run it.

    python -m tests.benchmarks.vit_step [--preset swin] [--profile]

32 x 32 pixels, batch 64, float32, two threads; forward, backward, AdamW. The ViT has patch 4, 192
wide, 9 layers, 3 heads; DeiT and the Mixer the same sizes; Swin and its second version are
`swin_cifar`. "tessera" keeps freed memory as `fit` does, "plain malloc" leaves the allocator alone.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

BATCH = 64
STEPS = 4  # in each round


def training(net: Any, optimizer: Any) -> Round:
    """Rounds of steps on random images."""
    images = torch.randn(BATCH, 3, 32, 32)
    labels = torch.randint(0, 10, (BATCH,))

    def loss() -> tuple[torch.Tensor, int]:
        return F.cross_entropy(net(images), labels), BATCH

    return _compare.training(optimizer, loss, STEPS)


def config_of(preset: str) -> Any:
    """The config of a network."""
    from modules.models.images import IMAGE_PRESETS
    from modules.models.swin import second_version

    if preset.startswith("swin"):
        config: Any = IMAGE_PRESETS["swin_cifar"]
        return second_version(config) if preset == "swinv2" else config
    config = IMAGE_PRESETS["cifar_tiny"]
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
}


def timm(options: Namespace) -> Round:
    """timm's model with PyTorch's AdamW as it comes."""
    import timm.models

    from modules.pretrained.images import conversion

    config = config_of(options.preset)
    net = getattr(timm.models, CLASSES[options.preset])(**conversion(config).arguments(config))
    return training(net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05))


def plain_malloc(options: Namespace) -> Round:
    """Our model with our optimizer, the allocator left alone."""
    from modules.models.images import build_image_net

    net = build_image_net(config_of(options.preset))
    return training(net, _compare.our_optimizer(net))


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
