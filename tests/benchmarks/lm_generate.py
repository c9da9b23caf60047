"""Greedy generation with a decoder, ours beside Hugging Face's `generate` and litgpt's.

    python -m tests.benchmarks.lm_generate [--batch 8] [--plot FILE.png]

128 new tokens after 32; 6 layers, 384 wide, 6 heads, vocabulary 50,257, float32, two threads; Hugging Face's dynamic
cache, litgpt's own. All make the same tokens from the same weights, which is checked before; litgpt has rotary
positions, so ours is there a second time with those, and a third time with int8 weights, whose tokens may differ.
Share of reading: what all weights once a token are of the bytes that two threads read in the same time, measured in
the same turns. `--plot` draws the time per token up to position 1,024 beside attention's own share of its growth.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from tests.benchmarks._compare import arguments, interleave, table, work

NAMES = ["hugging face", "litgpt", "tessera", "tessera, rotary", "tessera, int8", "reading"]
PROMPT, NEW = 32, 128
CONTEXT = 1024  # for the plot


def model(name: str) -> Any:
    """The model of a competitor; all that have the same positions have the same weights."""
    import torch

    from tests.benchmarks._decoders import (
        GPT2_NAMES,
        LITGPT_NAMES,
        SIZES,
        build_peer,
        copy_weights,
        tessera,
    )

    torch.manual_seed(0)
    ours = tessera(
        SIZES["small"], "rotary" if name in ("litgpt", "tessera, rotary") else "learned"
    ).eval()
    if name.startswith("tessera"):
        from modules.generation.quantized import prepare

        return prepare(ours, "int8" if name.endswith("int8") else None)
    theirs = build_peer(name, SIZES["small"], "").eval()
    copy_weights(ours, theirs, LITGPT_NAMES if name == "litgpt" else GPT2_NAMES)
    return theirs


def prompts(batch: int) -> Any:
    """The same random prompts in every process, (B, 32)."""
    import torch

    from tests.benchmarks._decoders import SIZES

    return torch.randint(
        SIZES["small"].vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)
    )


def continuation(name: str, batch: int) -> Callable[[], Any]:
    """A function that makes the new tokens, (B, 128)."""
    import torch

    net, tokens = model(name), prompts(batch)
    if name == "hugging face":
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return lambda: net.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[
            :, PROMPT:
        ]
    if name == "litgpt":
        from litgpt.generate.base import batched_generate_fn, generate_fn

        net.max_seq_length = PROMPT + NEW
        net.set_kv_cache(batch)
        shape = {"include_prompt": False, "include_eos": False}
        if batch == 1:
            return lambda: torch.cat(
                list(generate_fn(net, tokens[0], PROMPT + NEW, temperature=0.0, **shape))
            )[None]
        draw = {"sample_args": {"temperature": 0.0}, **shape}
        return lambda: torch.stack(
            [torch.cat(step) for step in batched_generate_fn(net, tokens, PROMPT + NEW, **draw)], 1
        )

    from modules.generation.generate import generate
    from modules.generation.sampling import GenerationConfig

    rows, config = tokens.tolist(), GenerationConfig(NEW, temperature=0.0)
    return lambda: torch.stack(list(generate(net, rows, config)), 1)


def generation(options: Namespace) -> Callable[[], int]:
    """A round: the new tokens once."""
    if options.worker.startswith("tessera"):
        from tasks.training.allocator import tune_allocator

        tune_allocator()
    make = continuation(options.worker, options.batch)
    return lambda: make().numel()


def reading() -> Callable[[], int]:
    """A round of reading memory; returns the number of bytes."""
    import torch

    numbers = torch.ones(2**27)  # 512 MiB, beyond all caches

    def run() -> int:
        for _ in range(4):
            numbers.sum()
        return 4 * numbers.nbytes

    return run


def check(names: list[str], batch: int) -> None:
    """Ends the program if the tokens of two models with equal weights differ."""
    ours = {"hugging face": "tessera", "litgpt": "tessera, rotary"}
    for name in names:
        if name in ours:
            equal = (continuation(name, batch)() == continuation(ours[name], batch)()).all()
            print(f"batch {batch}: the same {NEW} tokens as {name}: {'yes' if equal else 'no'}")
            if not equal:
                raise SystemExit("The outputs are not equal: the times say nothing.")


def times(runs: int = 5) -> Any:
    """Seconds that each new token takes up to the end of a long context, medians of runs: in all, and for attention."""
    from dataclasses import replace

    import numpy as np

    from modules.attention import MultiHeadAttention
    from modules.generation.generate import generate
    from modules.generation.sampling import GenerationConfig
    from tests.benchmarks._decoders import SIZES, tessera

    net = tessera(replace(SIZES["small"], length=CONTEXT)).eval()
    attend, spent = MultiHeadAttention.attend, 0.0

    def timed(*given: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        found = attend(*given)
        spent += time.perf_counter() - start
        return found

    MultiHeadAttention.attend = timed  # type: ignore[method-assign]
    found = []
    for _ in range(runs + 1):
        seconds, start, spent = [], time.perf_counter(), 0.0
        for _token in generate(
            net, prompts(1).tolist(), GenerationConfig(CONTEXT - PROMPT, temperature=0.0)
        ):
            seconds.append((time.perf_counter() - start, spent))
            start, spent = time.perf_counter(), 0.0
        found.append(seconds[1:])  # the first token comes with the prompt
    MultiHeadAttention.attend = attend  # type: ignore[method-assign]
    return np.median(found[1:], axis=0).T  # (2, tokens)


def plot(file: str) -> None:
    """Draws time per token by position, and prints how much it grows."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    whole, own = times() * 1e3
    places = np.arange(PROMPT + 1, PROMPT + 1 + len(whole))
    lines = [np.polyfit(places, found, 1) for found in (whole, own)]
    growth = [line[0] * (places[-1] - places[0]) for line in lines]
    start = np.polyval(lines[0], places[0])
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(places, whole, ".", markersize=2, label="time per token")
    axes.plot(
        places,
        start + growth[1] * np.linspace(0, 1, len(places)),
        label="start + attention's own growth",
    )
    axes.set(xlabel="position", ylabel="ms", ylim=(0, 1.5 * float(np.median(whole))))
    axes.legend()
    figure.savefig(file, dpi=120)
    print(f"time per token, from position {places[0]} to {places[-1]}: {start:.2f} ms + {growth[0]:.2f} ms, "
          f"of which attention {growth[1]:.2f} ms")  # fmt: skip


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    parser = arguments(__doc__ or "", NAMES, 5)
    parser.add_argument("--batch", type=int, default=1, help="rows that are generated at once")
    parser.add_argument("--plot", metavar="FILE", help="draw the time per token by position")
    options = parser.parse_args()
    if options.worker:
        work(reading() if options.worker == "reading" else generation(options))
    from tests.benchmarks._decoders import SIZES, peers

    names = [*peers(NAMES[:2]), *NAMES[2:]]
    check(names, options.batch)
    results = interleave(
        "tests.benchmarks.lm_generate", names, options.rounds, options=sys.argv[1:]
    )
    speed = results.pop("reading").median
    print(table(results, "tokens/s", names[0]))
    print(f"memory: {speed / 1e9:.1f} GB/s, of which reading all weights once a token is")
    for name, found in results.items():
        size = SIZES["small"].weights * (1 if name.endswith("int8") else 4)
        print(f"{name:<24}{size * found.median / options.batch / speed:>18.1%}")
    if options.plot:
        plot(options.plot)


if __name__ == "__main__":
    main()
