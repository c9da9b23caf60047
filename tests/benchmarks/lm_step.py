"""Training step of a decoder, ours beside nanoGPT's, Hugging Face's GPT-2 and litgpt's.

    python -m tests.benchmarks.lm_step [--size small|tiny|gpt2] [--nanogpt FOLDER]
        [--device cuda --precision bf16]

Forward, backward, AdamW as each side comes; random tokens, no dropout, two threads. "small": 6
layers, 384 wide, 6 heads, 256 tokens, batch 8, vocabulary 50,257; "tiny": nanoGPT's characters, 4
layers, 128 wide, 64 tokens, batch 12; "gpt2": 124M at 1,024 tokens, batch 12, for a GPU, where all
are compiled. The logits are checked to be equal before. litgpt has rotary positions, so ours is
there a second time with those. The last lines are model FLOPs, attention's included, beside those
of a large matrix product measured in the same turns.
"""

from argparse import Namespace
from typing import Any

import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round
from tests.benchmarks._decoders import LIBRARIES, PEERS, SIZES, check, installed, tessera

PRODUCT = "matrix product"
LR = 1e-4


def autocast(options: Namespace) -> Any:
    """Mixed precision as asked for, with nanoGPT's TF32 on GPUs."""
    precision = "high" if options.device == "cuda" else "highest"
    torch.set_float32_matmul_precision(precision)
    return torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16")


def build(options: Namespace) -> tuple[Any, Any]:
    """Model and optimizer of a worker."""
    sizes = SIZES[options.size]
    device = options.device
    name = options.worker
    if name.startswith("tessera"):
        from tasks.training.allocator import tune_allocator

        tune_allocator()
        net = tessera(sizes, "rotary" if name.endswith("rotary") else "learned").to(device)
        return net, _compare.our_optimizer(net, lr=LR)
    net = PEERS[name].build(sizes, options.nanogpt).to(device)
    if name == "nanogpt":
        return net, net.configure_optimizers(0.1, LR, (0.9, 0.95), device)
    fused = name == "hugging face" or device == "cuda"  # as their trainers choose
    return net, torch.optim.AdamW(net.parameters(), lr=LR, fused=fused)


def training(options: Namespace) -> Round:
    """Rounds of training steps, in tokens."""
    sizes = SIZES[options.size]
    device = options.device
    context = autocast(options)
    torch.manual_seed(0)
    net, optimizer = build(options)
    net.train()
    if device == "cuda":
        net.compile()

    def loss() -> tuple[torch.Tensor, int]:
        shape = (2, sizes.batch, sizes.length)
        tokens, targets = torch.randint(sizes.vocabulary, shape, device=device)
        with context:
            found = LIBRARIES[options.worker].loss(net, tokens, targets)
        return found, sizes.batch * sizes.length

    return synchronised(_compare.training(optimizer, loss, sizes.steps), device)


def product(options: Namespace) -> Round:
    """Rounds of large matrix products, the fastest that this machine has, in FLOPs."""
    from modules.kernels.linear import linear

    context = autocast(options)
    side, times = (8192, 20) if options.device == "cuda" else (2048, 5)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    one, other = torch.randn(2, side, side, device=options.device, dtype=dtype)

    @torch.inference_mode()
    def run() -> int:
        with context:
            for _ in range(times):
                linear(one, other)
        return times * 2 * side**3

    return synchronised(run, options.device)


def synchronised(run: Round, device: str) -> Round:
    """The same rounds, which end when the GPU is done."""

    def whole() -> int | dict[str, float]:
        found = run()
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    return whole


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    parser = _compare.arguments(__doc__, 10)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="a checkout of nanoGPT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    competitors = {**dict.fromkeys(LIBRARIES, training), PRODUCT: product}
    options = _compare.parse(parser, competitors)
    sizes = SIZES[options.size]
    others = installed(PEERS, options.nanogpt)
    check(others, sizes, options.nanogpt)
    names = [name for name in competitors if name in others or name not in PEERS]
    results = _compare.interleave(names, options.rounds)
    peak = results.pop(PRODUCT).median
    print(_compare.table(results, "tokens/s"))
    print(f"a large matrix product: {peak / 1e9:.0f} GFLOP/s, of which the steps make use of")
    for name, found in results.items():
        print(f"{name:<24}{sizes.operations * found.median / peak:>18.1%}")


if __name__ == "__main__":
    main()
