"""Training step of a masked autoencoder, ours against Hugging Face's ViTMAE.

    python -m tests.benchmarks.mae_step

32 x 32 pixels, patch 4, of which 3 in 4 are masked; encoder 192 wide, 6 layers, decoder 96 wide, 1
layer; batch 64, float32, two threads; forward, backward, AdamW.
"""

from argparse import Namespace
from typing import Any

import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

BATCH = 64
STEPS = 8  # in each round


def their_config() -> Any:
    """Sizes in the words of transformers."""
    from transformers import ViTMAEConfig

    decoder = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 3}
    return ViTMAEConfig(
        image_size=32,
        patch_size=4,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=768,
        decoder_intermediate_size=384,
        norm_pix_loss=True,
        **{f"decoder_{name}": value for name, value in decoder.items()},
    )


def hugging_face(_: Namespace) -> Round:
    """Hugging Face's model, with AdamW as its trainer chooses it."""
    from transformers import ViTMAEForPreTraining

    net = ViTMAEForPreTraining(their_config()).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05, fused=True)

    def loss() -> tuple[torch.Tensor, int]:
        return net(torch.randn(BATCH, 3, 32, 32)).loss, BATCH

    return _compare.training(optimizer, loss, STEPS)


def tessera(_: Namespace) -> Round:
    """Our model and optimizer, as `fit` has them."""
    from modules.models.mae import MaskedAutoencoder
    from modules.pretrained.mae import MAE
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    net = MaskedAutoencoder(MAE.config_from_external(their_config().to_dict()))

    def loss() -> tuple[torch.Tensor, int]:
        images = torch.randn(BATCH, 3, 32, 32)
        kept, masked = net.split(torch.rand(BATCH, net.config.num_patches))  # (B, K), (B, M)
        return net.loss(net(images, kept, masked), images, masked), BATCH

    return _compare.training(_compare.our_optimizer(net), loss, STEPS)


COMPETITORS = {"hugging face": hugging_face, "tessera": tessera}


def main() -> None:
    """Parses the command line and prints the table."""
    options = _compare.parse(_compare.arguments(__doc__, 10), COMPETITORS)
    print(_compare.table(_compare.interleave(COMPETITORS, options.rounds), "images/s"))


if __name__ == "__main__":
    main()
