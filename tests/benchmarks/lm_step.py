"""Training step of a decoder, ours beside nanoGPT's, Hugging Face's GPT-2 and litgpt's.

    python -m tests.benchmarks.lm_step [--size small|tiny|gpt2] [--nanogpt FOLDER] [--device cuda --precision bf16]

Forward, backward, AdamW as each side comes; random tokens, no dropout, two threads. "small": 6 layers, 384 wide, 6
heads, 256 tokens, batch 8, vocabulary 50,257; "tiny": nanoGPT's characters, 4 layers, 128 wide, 64 tokens, batch 12;
"gpt2": 124M at 1,024 tokens, batch 12, for a GPU, where all are compiled. The logits are checked to be equal before.
litgpt has rotary positions, so ours is there a second time with those. FLOP share: operations of the model, attention's
included, beside those of a large matrix product measured in the same turns.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from tests.benchmarks._compare import arguments, interleave, table, work

NAMES = ["nanogpt", "hugging face", "litgpt", "tessera", "tessera, rotary", "matrix product"]


def settings(options: Namespace) -> Any:
    """What a GPU run needs: the numbers' type inside matrix products."""
    import torch

    torch.set_float32_matmul_precision(
        "high" if options.device == "cuda" else "highest"
    )  # nanoGPT's setting on GPUs
    return torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16")


def build(options: Namespace) -> tuple[Any, Any]:
    """Model and optimizer of the worker named in `options`."""
    import torch

    from tests.benchmarks._decoders import SIZES, build_peer, tessera

    sizes, device, rate = SIZES[options.size], options.device, 1e-4
    if options.worker.startswith("tessera"):
        from tasks.training.allocator import tune_allocator
        from tasks.training.optim import OptimConfig
        from tasks.training.optim import build as build_optimizer

        tune_allocator()
        net = tessera(sizes, "rotary" if options.worker.endswith("rotary") else "learned").to(
            device
        )
        return net, build_optimizer(net, OptimConfig(lr=rate), 100_000)["optimizer"]
    net = build_peer(options.worker, sizes, options.nanogpt).to(device)
    if options.worker == "nanogpt":
        return net, net.configure_optimizers(0.1, rate, (0.9, 0.95), device)
    fused = options.worker == "hugging face" or device == "cuda"  # as their trainers choose
    return net, torch.optim.AdamW(net.parameters(), lr=rate, fused=fused)


def training(options: Namespace) -> Callable[[], int]:
    """A round of training steps; returns the number of tokens."""
    import torch

    from tests.benchmarks._decoders import SIZES, loss

    sizes, device, context = SIZES[options.size], options.device, settings(options)
    torch.manual_seed(0)
    net, optimizer = build(options)
    net.train()
    if device == "cuda":
        net.compile()

    def run() -> int:
        for _ in range(sizes.steps):
            tokens, targets = torch.randint(
                sizes.vocabulary, (2, sizes.batch, sizes.length), device=device
            )
            with context:
                found = loss(net, tokens, targets)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return sizes.steps * sizes.batch * sizes.length

    return run


def product(options: Namespace) -> Callable[[], int]:
    """A round of large matrix products, the fastest that this machine has; returns the number of operations."""
    import torch

    from modules.kernels.linear import linear

    context, side, times = (
        settings(options),
        *((8192, 20) if options.device == "cuda" else (2048, 5)),
    )
    kind = torch.bfloat16 if options.precision == "bf16" else torch.float32
    one, two = torch.randn(2, side, side, device=options.device, dtype=kind)

    @torch.inference_mode()
    def run() -> int:
        with context:
            for _ in range(times):
                linear(one, two)
        if options.device == "cuda":
            torch.cuda.synchronize()
        return times * 2 * side**3

    return run


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    parser = arguments(__doc__ or "", NAMES, 10)
    parser.add_argument(
        "--size", choices=("small", "tiny", "gpt2"), default="small", help="of the model"
    )
    parser.add_argument(
        "--nanogpt", default="", metavar="FOLDER", help="checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    if options.worker:
        work((product if options.worker == "matrix product" else training)(options))
    from tests.benchmarks._decoders import SIZES, check, peers

    sizes, others = SIZES[options.size], peers(NAMES[:3], options.nanogpt)
    check(others, sizes, options.nanogpt)
    names = [*others, *NAMES[3:]]
    results = interleave("tests.benchmarks.lm_step", names, options.rounds, options=sys.argv[1:])
    peak = results.pop("matrix product").median
    print(table(results, "tokens/s", names[0]))
    print(f"a large matrix product: {peak / 1e9:.0f} GFLOP/s, of which the steps make use of")
    for name, found in results.items():
        print(f"{name:<24}{sizes.operations * found.median / peak:>18.1%}")


if __name__ == "__main__":
    main()
