"""Training step of a ViT, ours against timm's as its users run it: `python -m tests.benchmarks.vit_step [--profile]`.

32 x 32 pixels, patch 4, 192 wide, 9 layers, 3 heads, batch 64, float32, two threads; forward, backward, AdamW.
"""

import argparse
import time
from collections.abc import Callable

from tests.benchmarks._compare import interleave, serve, table

BATCH = 64
STEPS = 4  # in each round


def timm_step() -> Callable[[], None]:
    """timm's model with PyTorch's AdamW as it comes."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=192, depth=9, num_heads=3, num_classes=10
    )
    return step(net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05))


def our_step() -> Callable[[], None]:
    """Our model with our optimizer, the allocator tuned as `python -m tasks.vit fit` does it."""
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    return plain_step()


def plain_step() -> Callable[[], None]:
    """Our model with our optimizer, the allocator left alone."""
    from modules.models.vit import VIT_PRESETS, ViT
    from tasks.training.optim import OptimConfig, build

    net = ViT(VIT_PRESETS["cifar_tiny"])
    return step(net, build(net, OptimConfig(), 1000)["optimizer"])


def step(net, optimizer) -> Callable[[], None]:  # type: ignore[no-untyped-def]
    """One step on random images."""
    import torch
    import torch.nn.functional as F

    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def run() -> None:
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


COMPETITORS = {"timm": timm_step, "tessera": our_step, "tessera, plain malloc": plain_step}


def profile(name: str) -> str:
    """Where the time of three steps goes."""
    import torch

    run = COMPETITORS[name]()
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            run()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    lines = [f"{name}: {total / 3000:.0f} ms a step"]
    for event in events[:16]:
        lines.append(f"  {event.self_cpu_time_total / total:>6.1%}  {event.key}")
    return "\n".join(lines)


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds of {STEPS} steps each")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    parser.add_argument("--worker", choices=COMPETITORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run = COMPETITORS[options.worker]()

        def measure() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                run()
            return STEPS * BATCH / (time.perf_counter() - start)

        serve(measure)
        return
    print(
        table(
            interleave("tests.benchmarks.vit_step", list(COMPETITORS), options.rounds),
            "images/s",
            "timm",
        )
    )
    if options.profile:
        print(profile("timm"))
        print(profile("tessera"))


if __name__ == "__main__":
    main()
