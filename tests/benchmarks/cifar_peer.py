"""What a peer reaches on CIFAR-10 in given minutes: a Compact Convolutional Transformer, as its users run it.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.cifar_peer --minutes 25

Sizes and recipe are those of Hassani (2021) in SHI-Labs/Compact-Transformers (`cct_7-3x1_cifar10_300epochs.yml`,
trained there with timm's script): timm's transforms, Mixup and drop path, AdamW, a plain loop in float32. The
300 + 10 epochs of the schedule are squeezed into the minutes: its place follows the clock, so it ends at its end.
`--recipe short` leaves out RandAugment, Mixup and CutMix, crops with a padding of 4 and flips: what takes_onednn few epochs.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, EPOCHS, COOLDOWN, WARMUP, MIXUP_OFF = 128, 300, 10, 10, 175
LR, LOWEST_LR, WEIGHT_DECAY, SMOOTHING = 55e-5, 1e-5, 6e-2, 0.1
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# name: (width, layers, heads, feed-forward ratio, convolutions)
SIZES = {
    "cct_2_3x2": (128, 2, 2, 1, 2),
    "cct_4_3x2": (128, 4, 2, 1, 2),
    "cct_6_3x1": (256, 6, 4, 2, 1),
    "cct_7_3x1": (256, 7, 4, 2, 1),
}


class Layer(nn.Module):
    """CCT's encoder layer: a norm before attention, another whose result goes on as the residual."""

    def __init__(self, width: int, heads: int, ratio: int, drop_path: float) -> None:
        from timm.layers import DropPath

        super().__init__()
        self.heads = heads
        self.pre_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)
        self.attention_dropout, self.drop_path = nn.Dropout(0.1), DropPath(drop_path)

    def attend(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        b, n, e = x.shape
        q, k, v = (
            self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )  # each (B, H, N, D)
        weights = (q @ k.mT * (e // self.heads) ** -0.5).softmax(-1)  # (B, H, N, N)
        return self.proj(
            (self.attention_dropout(weights) @ v).transpose(1, 2).reshape(b, n, e)
        )  # (B, N, E)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        x = self.norm(x + self.drop_path(self.attend(self.pre_norm(x))))
        return x + self.drop_path(self.down(F.gelu(self.up(x))))


class CCT(nn.Module):
    """3x3 convolutions, each with ReLU and a 3x3 max pool of stride 2; layers; pooling by learned weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        width, depth, heads, ratio, convolutions = SIZES[name]
        channels = [3, *[64] * (convolutions - 1), width]
        stem: list[nn.Module] = []
        for before, after in zip(channels, channels[1:], strict=False):
            stem += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
            ]
        self.stem = nn.Sequential(*stem)
        self.position = nn.Parameter(torch.empty(1, (32 >> convolutions) ** 2, width))
        rates = torch.linspace(0, 0.1, depth).tolist()
        self.layers = nn.Sequential(*(Layer(width, heads, ratio, rate) for rate in rates))
        self.norm, self.pool, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, 1),
            nn.Linear(width, 10),
        )
        nn.init.trunc_normal_(self.position, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> logits (B, 10)."""
        x = self.stem(images).flatten(2).mT + self.position  # (B, N, E)
        x = self.norm(self.layers(x))
        return self.head(
            (self.pool(x).softmax(1).mT @ x).squeeze(1)
        )  # (B, 1, N) @ (B, N, E) -> (B, E)


class Images(Dataset):
    """Decoded images as PIL objects with a transform for each, as torchvision's own CIFAR10 gives them."""

    def __init__(self, file: Path, transform: Any) -> None:
        import io

        from PIL import Image
        from pyarrow import parquet

        table = parquet.read_table(file)
        self.images = [
            Image.open(io.BytesIO(cell["bytes"])).convert("RGB")
            for cell in table.column("img").to_pylist()
        ]
        self.labels, self.transform = table.column("label").to_pylist(), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(self.images[i]), self.labels[i]


def transforms(recipe: str) -> tuple[Any, Any]:
    """Those of training and of testing."""
    from PIL import ImageOps
    from timm.data import create_transform
    from torchvision import transforms as tv

    posterize = (
        ImageOps.posterize
    )  # Pillow now refuses the 0 bits that timm's random magnitudes may ask for
    ImageOps.posterize = lambda image, bits: posterize(image, max(1, bits))

    plain = [tv.ToTensor(), tv.Normalize(MEAN, STD)]
    if recipe == "short":
        return tv.Compose(
            [tv.RandomCrop(32, padding=4), tv.RandomHorizontalFlip(), *plain]
        ), tv.Compose(plain)
    colours = {"auto_augment": "rand-m9-mstd0.5-inc1", "mean": MEAN, "std": STD}
    return create_transform(
        32, True, scale=(0.8, 1.0), interpolation="random", **colours
    ), tv.Compose(plain)


def learning_rate(epoch: float) -> float:
    """Linear warm-up, cosine, cool-down at the lowest rate, where the whole run is 310 epochs."""
    if epoch < WARMUP:
        return LOWEST_LR + (LR - LOWEST_LR) * epoch / WARMUP
    return LOWEST_LR + (LR - LOWEST_LR) * (1 + math.cos(math.pi * min(1.0, epoch / EPOCHS))) / 2


def forever(loader: DataLoader) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def train(net: nn.Module, loader: DataLoader, minutes: float, recipe: str) -> tuple[int, float]:
    """Trains for the minutes, counted from the first batch on; number of images seen, and seconds."""
    from timm.data import Mixup

    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=SMOOTHING, num_classes=10)
    mixup.mixup_enabled = recipe == "published"  # without, it still makes the smoothed targets
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY}]
    groups += [{"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    batches, steps, reported = forever(loader), 0, 0.0
    batch, start = next(batches), time.perf_counter()
    net.train()
    while (seconds := time.perf_counter() - start) < minutes * 60:
        epoch = (EPOCHS + COOLDOWN) * seconds / (minutes * 60)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch)
        if epoch >= MIXUP_OFF:
            mixup.mixup_enabled = False
        images, targets = mixup(*batch)
        loss = F.cross_entropy(net(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch, steps = next(batches), steps + 1
        if seconds >= reported:
            print(f"minute {seconds / 60:4.1f}  step {steps:5}  loss {loss.item():.3f}", flush=True)
            reported += 60
    return steps * BATCH, seconds


@torch.no_grad()
def accuracy(net: nn.Module, loader: DataLoader) -> float:
    """Share of the images that are classified rightly."""
    net.eval()
    hits = [(net(images).argmax(1) == labels).float() for images, labels in loader]
    return float(torch.cat(hits).mean())


def main() -> None:
    """Trains, tests and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training")
    parser.add_argument("--model", choices=SIZES, default="cct_2_3x2")
    parser.add_argument("--recipe", choices=("published", "short"), default="published")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="processes that transform images")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not os.environ.get("TESSERA_DATA"):
        raise SystemExit("TESSERA_DATA is not set: it names the folder that holds cifar10_jpeg/.")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    folder = Path(os.environ["TESSERA_DATA"]) / "cifar10_jpeg"
    sets = [
        Images(folder / f"{split}-00000-of-00001.parquet", transform)
        for split, transform in zip(("train", "test"), transforms(options.recipe), strict=True)
    ]
    shared = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loader = DataLoader(sets[0], BATCH, shuffle=True, drop_last=True, **shared)
    net = CCT(options.model)
    count = sum(p.numel() for p in net.parameters())
    print(
        f"{options.model}, {count:,} parameters, recipe {options.recipe}, {options.minutes:g} minutes",
        flush=True,
    )
    images, seconds = train(net, loader, options.minutes, options.recipe)
    found = accuracy(net, DataLoader(sets[1], 250))
    print(f"test accuracy {found:.4f}   images/s {images / seconds:.0f}   minutes {seconds / 60:.1f}   "
          f"epochs {images / len(sets[0]):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
