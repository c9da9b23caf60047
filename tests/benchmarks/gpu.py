"""What one GPU shows, in one table: ours beside its peers.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.gpu [--minutes 20] [--out FOLDER]
        [--nanogpt FOLDER] [--only TEXT] [--tiny]

Training steps (forward, backward, AdamW) on random inputs without dropout: GPT-2 124M, ViT-B/16,
BERT base and Vaswani's base model, each with bfloat16 autocast, the same compiled, and float32.
Greedy generation and beam search, with bfloat16 weights. `fit` as users run it; with two GPUs also
in two processes. Sides measure in turns in one process; rates and ratios are of medians. MFU: the
FLOPs that torch counts in our float32 step, in parts of a large bfloat16 product's. The parts are
in the order of their importance: `--minutes` leaves out the last ones. `--tiny` also runs on a CPU.
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tasks.training.throughput import matmul_peak
from tests.benchmarks import _compare, _decoders, _translators, seq2seq_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = {"bf16": (True, False), "bf16, compiled": (True, True), "float32": (False, False)}
SECONDS = 0.3  # of a round, about
NEW = 128  # generated tokens
TOKENS = "train/tokens_per_s"
Part = Callable[[Namespace], "list[Row]"]


class Work(NamedTuple):
    """The same work for several sides, ours first: how to build a side, and its loss."""

    title: str
    unit: str
    items: int  # in a batch
    sides: dict[str, Callable[[], Any]]
    loss: Callable[[str, Any], Tensor]


@dataclass
class Row:
    """A line of the table: items per second, and memory at the peak in MiB."""

    part: str
    side: str
    rate: float
    unit: str
    ratio: float | None = None  # of our rate to this one
    mfu: float | None = None
    memory: float | None = None


# Training steps


def language_model(options: Namespace) -> Work:
    """GPT-2's size, 12 windows of 1,024 tokens."""
    sizes = _decoders.SIZES["gpt2"]
    if options.tiny:
        sizes = _decoders.Sizes(1, 2, 32, 16, 2, 65, 1)
    tokens, targets = torch.randint(sizes.vocabulary, (2, sizes.batch, sizes.length))
    names = ["tessera", *_decoders.installed(("hugging face", "nanogpt"), options.nanogpt)]
    libraries = {name: _decoders.LIBRARIES[name] for name in names}
    sides = {name: partial(one.build, sizes, options.nanogpt) for name, one in libraries.items()}
    loss = lambda name, net: libraries[name].loss(net, tokens, targets)  # noqa: E731
    return Work("GPT-2 124M", "tokens/s", tokens.numel(), sides, loss)


def images(options: Namespace) -> Work:
    """128 images of 224 x 224."""
    from timm.models.vision_transformer import VisionTransformer

    from modules.models.vit import VIT_PRESETS, ViT

    batch = 2 if options.tiny else 128
    config = replace(VIT_PRESETS["cifar_tiny" if options.tiny else "base"], num_classes=10)
    stack = config.stack
    pixels = torch.randn(batch, 3, config.image_size, config.image_size)
    labels = torch.randint(10, (batch,))
    shape = {"embed_dim": stack.width, "depth": stack.depth, "num_heads": stack.heads}
    size = {"img_size": config.image_size, "patch_size": config.patch_size, "num_classes": 10}
    sides = {"tessera": lambda: ViT(config), "timm": lambda: VisionTransformer(**shape, **size)}
    loss = lambda _, net: F.cross_entropy(net(pixels).float(), labels)  # noqa: E731
    return Work("ViT-B/16", "images/s", batch, sides, loss)


def ragged(batch: int, length: int) -> Tensor:
    """Padding mask (B, N) of texts from half as long to as long."""
    return torch.arange(length) < torch.linspace(length // 2, length, batch)[:, None]


def texts(options: Namespace) -> Work:
    """64 texts of up to 256 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    from modules.models.bert import BERT_PRESETS, BertClassifier

    batch, length = (2, 16) if options.tiny else (64, 256)
    config = BERT_PRESETS["tiny" if options.tiny else "base"]
    stack = replace(config.stack, dropout=0.0, attention_dropout=0.0)
    config = replace(config, vocabulary=30_522, max_length=512, num_classes=2, stack=stack)
    sizes = {"hidden_size": stack.width, "intermediate_size": 4 * stack.width}
    sizes |= {"num_hidden_layers": stack.depth, "num_attention_heads": stack.heads}
    rates = {f"{name}_dropout_prob": 0.0 for name in ("hidden", "attention_probs")}
    theirs = BertConfig(**sizes, **rates)
    tokens = torch.randint(30_522, (batch, length))
    mask = ragged(batch, length)
    labels = torch.randint(2, (batch,))

    def loss(name: str, net: Any) -> Tensor:
        logits = net(tokens, mask) if name == "tessera" else net(tokens, mask.long()).logits
        return F.cross_entropy(logits.float(), labels)

    peer = lambda: BertForSequenceClassification(theirs)  # noqa: E731
    sides = {"tessera": lambda: BertClassifier(config), "hugging face": peer}
    return Work("BERT base", "texts/s", batch, sides, loss)


def translator(name: str, options: Namespace, spread: float = 0.02) -> Any:
    """Vaswani's base model with 32,000 tokens."""
    sizes = _translators.Sizes(512, 6, 8, 2048, 32_000)
    if options.tiny:
        sizes = _translators.Sizes(32, 1, 2, 64, 100)
    build = _translators.tessera if name == "tessera" else _translators.hugging_face
    return build(spread=spread, sizes=sizes)


def pairs(options: Namespace) -> Work:
    """128 pairs of texts of up to 64 tokens."""
    batch, length = (2, 8) if options.tiny else (128, 64)
    source, tokens, targets = torch.randint(7, 100, (3, batch, length))
    given = {"source": source, "tokens": tokens, "targets": targets}
    given["source_padding_mask"] = ragged(batch, length)
    sides = {name: partial(translator, name, options) for name in ("tessera", "hugging face")}
    loss = lambda name, net: _translators.loss(name, net, given)  # noqa: E731
    return Work("translation, base", "target tokens/s", batch * length, sides, loss)


def wait() -> None:
    """Until the GPU is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], times: int) -> float:
    """What calls take, with the GPU's work."""
    wait()
    start = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return time.perf_counter() - start


def in_turns(
    title: str, unit: str, items: int, runs: dict[str, Callable[[], object]], rounds: int
) -> list[Row]:
    """Rounds of all sides, after two calls of each that do not count."""
    times = {}
    for name, run in runs.items():
        run()
        times[name] = max(1, round(SECONDS / seconds(run, 1)))
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            rates[name].append(items * times[name] / seconds(run, times[name]))
    rows = [Row(title, name, statistics.median(rates[name]), unit) for name in runs]
    return [replace(row, ratio=rows[0].rate / row.rate) for row in rows]


def steps(make: Callable[..., Work], mode: str, peak: float, options: Namespace) -> list[Row]:
    """Training steps; `peak` is the FLOP/s of a large product."""
    is_cast, is_compiled = MODES[mode]
    runs: dict[str, Callable[[], object]] = {}
    memory = {}
    flops = 0
    with torch.device(DEVICE):
        work = make(options)
    for name, build in work.sides.items():
        before = torch.cuda.memory_allocated()
        with torch.device(DEVICE):
            net = build().train()
        if not flops:
            with FlopCounterMode(display=False) as counter:
                work.loss(name, net).backward()
            flops = counter.get_total_flops()
            net.zero_grad()
        if is_compiled:
            net.compile(backend="eager" if options.tiny else "inductor")

        def loss(name: str = name, net: Any = net) -> tuple[Tensor, int]:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=is_cast):
                return work.loss(name, net), work.items

        if name == "tessera":
            optimizer = _compare.our_optimizer(net)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        runs[name] = _compare.training(optimizer, loss)
        runs[name]()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        runs[name]()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    rows = in_turns(f"{work.title}, {mode}", work.unit, work.items, runs, options.rounds)
    mfu = flops / work.items / peak
    return [replace(row, mfu=mfu * row.rate, memory=memory[row.side]) for row in rows]


# Generation


def generation(batch: int, options: Namespace) -> list[Row]:
    """Greedy, 128 tokens after 32 with GPT-2 124M."""
    from modules.generation.generate import generate
    from modules.generation.sampling import GenerationConfig

    sizes = _decoders.SIZES["gpt2"]
    new = NEW
    if options.tiny:
        sizes = replace(sizes, layers=1, width=24, length=64, vocabulary=65)
        new = 8
    nets = _decoders.with_our_weights("hugging face", sizes)
    ours, theirs = (net.to(DEVICE, torch.bfloat16) for net in nets)
    tokens = torch.randint(sizes.vocabulary, (batch, 32), device=DEVICE)
    greedy = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    config = GenerationConfig(new, temperature=0.0)
    runs: dict[str, Callable[[], object]] = {
        "tessera": lambda: list(generate(ours, tokens.tolist(), config)),
        "hugging face": lambda: theirs.generate(tokens, attention_mask=mask, **greedy),
    }
    title = f"greedy generation, GPT-2 124M, {batch} at once"
    return in_turns(title, "tokens/s", batch * new, runs, options.rounds)


def beam_search(options: Namespace) -> list[Row]:
    """100 random texts, 5 beams, 50 new tokens."""
    count = 3 if options.tiny else seq2seq_decode.SENTENCES
    rows = torch.randint(7, 100, (count, 16)).tolist()
    runs: dict[str, Callable[[], object]] = {}
    for name, make in reversed(seq2seq_decode.TRANSLATORS.items()):
        net = translator(name, options, seq2seq_decode.SPREAD).eval()
        runs[name] = partial(make(net.to(DEVICE, torch.bfloat16)), rows)
    return in_turns("beam search, translation, base", "texts/s", count, runs, options.rounds)


# The command line


def fit(title: str, line: str, rate: str, options: Namespace) -> list[Row]:
    """A run of `fit`; `rate` is what it logs."""
    if options.tiny:
        line += " --trainer.max_steps 4 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 0"
    found = _compare.fit_medians(f"{line} --trainer.limit_test_batches 1", [rate, "train/mfu"])
    return [Row(f"fit, {title}", "tessera", found[rate], rate[6:], mfu=found.get("train/mfu"))]


def fits(options: Namespace) -> dict[str, Part]:
    """Runs of `fit`, by name."""
    line = "tasks.vit fit --data.source digits"
    if not options.tiny and Path(os.environ.get("TESSERA_DATA", "/-"), "cifar10_jpeg").is_dir():
        line = "tasks.vit fit --config configs/vit/cifar10.yaml --trainer.max_epochs 4"
    gpt2 = "tasks.lm fit --data.source reference --data.batch_size 12 --data.max_length 1024"
    gpt2 += " --model.net.vocabulary 50304 --preset gpt2 --compile --trainer.max_steps 200"
    if options.tiny:
        gpt2 = "tasks.lm fit --preset tiny --data.batch_size 2 --data.max_length 32"
    gpt2 += " --model.samples.every null --trainer.log_every_n_steps 20"
    cifar = partial(fit, "cifar10.yaml", line, "train/samples_per_s")
    found: dict[str, Part] = {"fit vit": cifar, "fit lm": partial(fit, "GPT-2", gpt2, TOKENS)}
    for kind in ("ddp", "fsdp") if torch.cuda.device_count() > 1 else ():
        line = f"{gpt2} --config configs/trainer/{kind}.yaml".replace("--compile", "")
        found[f"fit lm, {kind}"] = partial(fit, f"GPT-2, {kind}", line, TOKENS)
    return found


def markdown(rows: list[Row], heading: str, left_out: list[str]) -> str:
    """The table."""
    lines = [heading, "", "| part | side | rate | ours / this | MFU | peak MiB |", "|" + "---|" * 6]
    for row in rows:
        cells = [row.part, row.side, f"{row.rate:,.1f} {row.unit}"]
        cells += [f"{row.ratio:.2f}x" if row.ratio else "", f"{row.mfu:.1%}" if row.mfu else ""]
        cells.append(f"{row.memory:,.0f}" if row.memory else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"left out: {'; '.join(left_out) or 'nothing'}"])


def write(folder: Path, rows: list[Row], heading: str, left_out: list[str]) -> None:
    """The table as gpu.md and gpu.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(markdown(rows, heading, left_out) + "\n")
    as_json = {"heading": heading, "left_out": left_out, "rows": list(map(asdict, rows))}
    (folder / "gpu.json").write_text(json.dumps(as_json, indent=1))


def main() -> None:
    """Parses the command line, runs the parts and prints the table."""
    parser = _compare.arguments(__doc__, 5)
    parser.add_argument("--minutes", type=float, default=20, help="no part begins after these")
    parser.add_argument("--out", type=Path, help="folder for gpu.md and gpu.json")
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="a checkout of nanoGPT")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts with TEXT in their name")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that all runs")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.tiny:
        raise SystemExit("There is no GPU that torch can use: give --tiny.")
    end = time.monotonic() + 60 * options.minutes
    peak = matmul_peak(torch.device(DEVICE), "bf16")
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    heading = f"{name}, torch {torch.__version__}: {peak / 1e12:.1f} TFLOP/s in bfloat16"
    training: dict[str, Part] = {
        f"{make.__name__}, {mode}": partial(steps, make, mode, peak)
        for mode in MODES
        for make in (language_model, images, texts, pairs)
    }
    order = list(training)
    parts = {name: training[name] for name in order[:5]}
    parts |= {f"generation of {batch}": partial(generation, batch) for batch in (1, 32)}
    parts |= {"beam_search": beam_search} | fits(options)
    parts |= {name: training[name] for name in order[5:]}
    rows: list[Row] = []
    left_out = []
    for title, part in parts.items():
        if options.only not in title:
            continue
        if time.monotonic() > end:
            left_out.append(f"{title} (no time)")
            continue
        try:
            found = part(options)
            rows += found
            print(*found, sep="\n", file=sys.stderr, flush=True)
        except Exception as error:  # a peer that is not installed, or too little memory
            traceback.print_exc()
            left_out.append(f"{title} ({type(error).__name__})")
        torch.compiler.reset()
        gc.collect()
        if options.out:  # after each part, should a later one not end
            write(options.out, rows, heading, left_out)
    if options.out:
        write(options.out, rows, heading, left_out)
    print(markdown(rows, heading, left_out))


if __name__ == "__main__":
    main()
