"""Training step of an Image GPT, ours against Hugging Face's ImageGPT.

    python -m tests.benchmarks.igpt_step

16 x 16 pixels of 256 colours, 128 wide, 8 layers, 4 heads, batch 32, float32, two threads; forward,
backward, AdamW.
"""

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

BATCH, PIXELS, COLOURS = 32, 256, 256
STEPS = 2  # in each round


def training(net: Any, optimizer: Any, loss: Any) -> Round:
    """Rounds of steps on random pixels (B, N), each predicted from those before it."""

    def step() -> tuple[torch.Tensor, int]:
        pixels = torch.randint(COLOURS, (BATCH, PIXELS))
        begin = torch.full((BATCH, 1), COLOURS)
        return loss(torch.cat((begin, pixels[:, :-1]), dim=1), pixels), BATCH

    net.train()
    return _compare.training(optimizer, step, STEPS)


def hugging_face(_: Namespace) -> Round:
    """Hugging Face's model without dropout, with AdamW as its trainer chooses it.

    Its own loss shifts the labels by one, so that it leaves out the first pixel; here none is.
    """
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_positions": PIXELS, "n_embd": 128, "n_layer": 8, "n_head": 4}
    net = ImageGPTForCausalImageModeling(ImageGPTConfig(vocab_size=COLOURS + 1, **shape, **rates))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = net(inputs, use_cache=False).logits  # (B, N, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return training(net, optimizer, loss)


def tessera(_: Namespace) -> Round:
    """Our model and optimizer, as `fit` has them."""
    from dataclasses import replace

    from modules.models.gpt import IMAGEGPT_PRESETS, Decoder
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    preset = IMAGEGPT_PRESETS["cifar_cpu"]
    net = Decoder(
        replace(preset, vocabulary=COLOURS + 1, output_vocabulary=COLOURS, max_length=PIXELS)
    )

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return net.loss(net(inputs), targets)[0]

    return training(net, _compare.our_optimizer(net), loss)


COMPETITORS = {"hugging face": hugging_face, "tessera": tessera}


def main() -> None:
    """Parses the command line and prints the table."""
    options = _compare.parse(_compare.arguments(__doc__, 10), COMPETITORS)
    print(_compare.table(_compare.interleave(COMPETITORS, options.rounds), "images/s"))


if __name__ == "__main__":
    main()
