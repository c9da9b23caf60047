"""What a peer reaches on CIFAR-10 in given minutes: a Compact Convolutional Transformer.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.cifar_peer --minutes 25

CCT-2/3x2 with the recipe of CCT-7 of Hassani (2021) in SHI-Labs/Compact-Transformers
(`cct_7-3x1_cifar10_300epochs.yml`, trained there with timm's script): timm's transforms, Mixup and
drop path, AdamW, a plain loop in float32, two threads. The 300 + 10 epochs of the schedule are
squeezed into the minutes: the learning rate follows the clock.
"""

import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from pyarrow import parquet
from timm.data import Mixup, create_transform
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as tv

from tests.benchmarks import _compare

BATCH = 128
EPOCHS = 300
COOLDOWN = 10
WARMUP = 10
MIXUP_OFF = 175
LR = 55e-5
LOWEST_LR = 1e-5
WEIGHT_DECAY = 6e-2
SMOOTHING = 0.1
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
WIDTH = 128
HEADS = 2


class Layer(nn.Module):
    """CCT's encoder layer: a norm before attention, and one whose result is the residual."""

    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.attention_dropout = nn.Dropout(0.1)
        self.drop_path = DropPath(drop_path)

    def attend(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        b, n, e = x.shape
        qkv = self.qkv(x).view(b, n, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, N, D)
        weights = (q @ k.mT * (e // HEADS) ** -0.5).softmax(-1)  # (B, H, N, N)
        out = self.attention_dropout(weights) @ v  # (B, H, N, D)
        return self.proj(out.transpose(1, 2).reshape(b, n, e))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        x = self.norm(x + self.drop_path(self.attend(self.pre_norm(x))))
        return x + self.drop_path(self.down(F.gelu(self.up(x))))


class CCT(nn.Module):
    """3x3 convolutions, each with ReLU and a 3x3 max pool of stride 2; layers; weighted pooling."""

    def __init__(self) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        for before, after in ((3, 64), (64, WIDTH)):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            stem += [convolution, nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*stem)
        self.position = nn.Parameter(torch.empty(1, 64, WIDTH))
        self.layers = nn.Sequential(Layer(0.0), Layer(0.1))
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 10)
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
        pooled = self.pool(x).softmax(1).mT @ x  # (B, 1, N) @ (B, N, E)
        return self.head(pooled.squeeze(1))


class PilImages(Dataset):
    """Decoded PIL images and a transform for each, as torchvision's own CIFAR10 gives them."""

    def __init__(self, folder: Path, split: str, transform: Any) -> None:
        table = parquet.read_table(folder / f"{split}-00000-of-00001.parquet")
        cells = table.column("img").to_pylist()
        self.images = [Image.open(io.BytesIO(cell["bytes"])).convert("RGB") for cell in cells]
        self.labels = table.column("label").to_pylist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(self.images[i]), self.labels[i]


def transforms() -> dict[str, Any]:
    """Those of the splits."""
    posterize = ImageOps.posterize  # refuses the 0 bits that timm's random magnitudes may ask for
    ImageOps.posterize = lambda image, bits: posterize(image, max(1, bits))
    settings = {"auto_augment": "rand-m9-mstd0.5-inc1", "mean": MEAN, "std": STD}
    train = create_transform(32, True, scale=(0.8, 1.0), interpolation="random", **settings)
    return {"train": train, "test": tv.Compose([tv.ToTensor(), tv.Normalize(MEAN, STD)])}


def learning_rate(epoch: float) -> float:
    """Linear warm-up, cosine, cool-down at the lowest rate; the whole run is 310 epochs."""
    if epoch < WARMUP:
        return LOWEST_LR + (LR - LOWEST_LR) * epoch / WARMUP
    return LOWEST_LR + (LR - LOWEST_LR) * (1 + math.cos(math.pi * min(1.0, epoch / EPOCHS))) / 2


def forever(loader: DataLoader) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def train(net: nn.Module, loader: DataLoader, minutes: float) -> tuple[int, float]:
    """Trains for the minutes, from the first batch on; number of images seen, and seconds."""
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=SMOOTHING, num_classes=10)
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY}]
    groups += [{"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    batches = forever(loader)
    batch = next(batches)
    net.train()
    steps = 0
    reported = 0.0
    start = time.perf_counter()
    while (seconds := time.perf_counter() - start) < minutes * 60:
        epoch = (EPOCHS + COOLDOWN) * seconds / (minutes * 60)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch)
        if epoch >= MIXUP_OFF:
            mixup.mixup_enabled = False  # it still makes the smoothed targets
        images, targets = mixup(*batch)
        loss = F.cross_entropy(net(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch = next(batches)
        steps += 1
        if seconds >= reported:
            print(f"minute {seconds / 60:4.1f}  step {steps:5}  loss {loss.item():.3f}", flush=True)
            reported += 60
    return steps * BATCH, seconds


@torch.no_grad()
def accuracy(net: nn.Module, loader: DataLoader) -> float:
    """Fraction of the images that are classified correctly."""
    net.eval()
    hits = [(net(images).argmax(1) == labels).float() for images, labels in loader]
    return float(torch.cat(hits).mean())


def main() -> None:
    """Trains, tests and prints one line."""
    parser = _compare.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="of training")
    options = parser.parse_args()
    folder = _compare.data_folder("cifar10_jpeg")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    found = transforms()
    images = {split: PilImages(folder, split, transform) for split, transform in found.items()}
    workers = {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(images["train"], BATCH, shuffle=True, drop_last=True, **workers)
    net = CCT()
    size = sum(parameter.numel() for parameter in net.parameters())
    print(_compare.machine(), flush=True)
    print(f"CCT-2/3x2, {size:,} parameters, {options.minutes:g} minutes", flush=True)
    seen, seconds = train(net, loader, options.minutes)
    correct = accuracy(net, DataLoader(images["test"], 250))
    print(
        f"test accuracy {correct:.4f}   images/s {seen / seconds:.0f}   minutes {seconds / 60:.1f}"
        f"   epochs {seen / len(images['train']):.1f}"
    )


if __name__ == "__main__":
    main()
