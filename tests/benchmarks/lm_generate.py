"""Greedy generation with a decoder, ours beside Hugging Face's `generate` and litgpt's.

    python -m tests.benchmarks.lm_generate [--batch 8] [--plot FILE.png]

128 new tokens after 32; 6 layers, 384 wide, 6 heads, vocabulary 50,257, float32, two threads;
Hugging Face's dynamic cache, litgpt's own. All make the same tokens from the same weights, which is
checked before. litgpt has rotary positions, so ours is there a second time with those, and a third
time with int8 weights, whose tokens may differ. The last lines are the bytes of all weights once a
token beside those that two threads read in the same time, measured in the same turns. `--plot`
draws the time per token up to position 1,024, and how much of its growth is attention's.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round
from tests.benchmarks._decoders import SIZES, installed, tessera, with_our_weights

READING = "reading"
PROMPT = 32
NEW = 128
CONTEXT = 1024  # for the plot
SAME = {"hugging face": "tessera", "litgpt": "tessera, rotary"}  # which make the same tokens


def model(name: str) -> Any:
    """The model of a competitor; all that have the same positions have the same weights."""
    if name in SAME:
        return with_our_weights(name, SIZES["small"])[1]
    from modules.generation.quantized import prepare

    torch.manual_seed(0)
    ours = tessera(SIZES["small"], "rotary" if name.endswith("rotary") else "learned").eval()
    return prepare(ours, "int8" if name.endswith("int8") else None)


def prompts(batch: int) -> torch.Tensor:
    """The same random prompts in every process, (B, 32)."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(SIZES["small"].vocabulary, (batch, PROMPT), generator=generator)


def continuation(name: str, batch: int) -> Callable[[], torch.Tensor]:
    """A function that makes the new tokens, (B, 128)."""
    net = model(name)
    tokens = prompts(batch)
    if name == "hugging face":
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        attended = torch.ones_like(tokens)
        return lambda: net.generate(tokens, attention_mask=attended, **options)[:, PROMPT:]
    if name == "litgpt":
        return litgpt_continuation(net, tokens)
    from modules.generation.generate import generate
    from modules.generation.sampling import GenerationConfig

    config = GenerationConfig(NEW, temperature=0.0)
    return lambda: torch.stack(list(generate(net, tokens.tolist(), config)), 1)


def litgpt_continuation(net: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """litgpt's function for one prompt, or that for several."""
    from litgpt.generate.base import batched_generate_fn, generate_fn

    length = PROMPT + NEW
    net.max_seq_length = length
    net.set_kv_cache(len(tokens))
    shape = {"include_prompt": False, "include_eos": False}
    if len(tokens) == 1:
        one = lambda: generate_fn(net, tokens[0], length, temperature=0.0, **shape)  # noqa: E731
        return lambda: torch.cat(list(one()))[None]
    greedy = {"temperature": 0.0}
    several = lambda: batched_generate_fn(net, tokens, length, sample_args=greedy, **shape)  # noqa: E731
    return lambda: torch.stack([torch.cat(step) for step in several()], 1)


def generation(options: Namespace) -> Round:
    """Rounds of the new tokens once."""
    if options.worker.startswith("tessera"):
        from tasks.training.allocator import tune_allocator

        tune_allocator()
    make = continuation(options.worker, options.batch)
    return lambda: make().numel()


def reading(_: Namespace) -> Round:
    """Rounds of reading memory, in bytes."""
    numbers = torch.ones(2**27)  # 512 MiB, beyond all caches

    def run() -> int:
        for _ in range(4):
            numbers.sum()
        return 4 * numbers.nbytes

    return run


def times(runs: int = 5) -> np.ndarray:
    """Seconds of each new token and of its attention, up to a long context: (2, tokens)."""
    from modules import attention as attention_module
    from modules.generation.generate import generate
    from modules.generation.sampling import GenerationConfig

    net = tessera(replace(SIZES["small"], length=CONTEXT)).eval()
    attention = attention_module.attention
    spent = 0.0

    def timed(*given: Any) -> torch.Tensor:
        nonlocal spent
        start = time.perf_counter()
        out = attention(*given)
        spent += time.perf_counter() - start
        return out

    attention_module.attention = timed
    config = GenerationConfig(CONTEXT - PROMPT, temperature=0.0)
    found = []
    for _ in range(runs + 1):
        clock = [(time.perf_counter(), spent)]
        for _token in generate(net, prompts(1).tolist(), config):
            clock.append((time.perf_counter(), spent))
        found.append(np.diff(clock, axis=0)[1:])  # the first token comes with the prompt
    attention_module.attention = attention
    return np.median(found[1:], axis=0).T


def plot(file: str) -> None:
    """Draws time per token by position, and prints how much it grows."""
    whole, attention = times() * 1e3
    positions = np.arange(PROMPT + 1, PROMPT + 1 + len(whole))
    slope, offset = np.polyfit(positions, whole, 1)
    span = positions[-1] - positions[0]
    start = offset + slope * positions[0]
    own_growth = np.polyfit(positions, attention, 1)[0] * span
    with _compare.save_plot(file) as ((axes,),):
        axes.plot(positions, whole, ".", markersize=2, label="time per token")
        line = start + own_growth * np.linspace(0, 1, len(positions))
        axes.plot(positions, line, label="start + attention's own growth")
        axes.set(xlabel="position", ylabel="ms", ylim=(0, 1.5 * float(np.median(whole))))
        axes.legend()
    print(
        f"time per token, from position {positions[0]} to {positions[-1]}: {start:.2f} ms + "
        f"{slope * span:.2f} ms, of which attention {own_growth:.2f} ms"
    )


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    parser = _compare.arguments(__doc__, 5, plot=True)
    parser.add_argument("--batch", type=int, default=1, help="rows that are generated at once")
    own = ["tessera", "tessera, rotary", "tessera, int8"]
    competitors = {**dict.fromkeys([*SAME, *own], generation), READING: reading}
    options = _compare.parse(parser, competitors)
    others = installed(SAME)
    for name in others:
        made = [continuation(one, options.batch)() for one in (name, SAME[name])]
        is_equal = torch.equal(*made)
        print(f"batch {options.batch}: the same {NEW} tokens as {name}: {is_equal}")
        if not is_equal:
            raise SystemExit("The outputs are not equal: the times say nothing.")
    results = _compare.interleave([*others, *own, READING], options.rounds)
    speed = results.pop(READING).median
    print(_compare.table(results, "tokens/s"))
    print(f"memory: {speed / 1e9:.1f} GB/s, of which reading all weights once a token is")
    for name, found in results.items():
        size = SIZES["small"].weights * (1 if name.endswith("int8") else 4)
        print(f"{name:<24}{size * found.median / options.batch / speed:>18.1%}")
    if options.plot:
        plot(options.plot)


if __name__ == "__main__":
    main()
