"""Shared by the benchmarks of decoders: their sizes, and the same model in our code and in that of others."""

import importlib.util
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

# Pieces of parameter names, ours and theirs, in the order in which they are replaced.
GPT2_NAMES = {
    "embed.": "transformer.wte.",
    "position.table": "transformer.wpe.weight",
    "stack.blocks.": "transformer.h.",
    "stack.norm.": "transformer.ln_f.",
    ".norm1.": ".ln_1.",
    ".norm2.": ".ln_2.",
    ".attention.qkv.": ".attn.c_attn.",
    ".attention.output.": ".attn.c_proj.",
    ".feedforward.up.": ".mlp.c_fc.",
    ".feedforward.down.": ".mlp.c_proj.",
}
LITGPT_NAMES = GPT2_NAMES | {
    ".norm1.": ".norm_1.",
    ".norm2.": ".norm_2.",
    ".attention.qkv.": ".attn.qkv.",
    ".attention.output.": ".attn.proj.",
    ".feedforward.up.": ".mlp.fc.",
    ".feedforward.down.": ".mlp.proj.",
}


@dataclass(frozen=True)
class Sizes:
    """A decoder and its training batches: GPT-2's blocks with an exact GELU, tied tables, no dropout.

    Args:
        layers: Number of blocks L.
        heads: Number of heads.
        width: Size E of vectors.
        length: Context T.
        batch: Windows B in a batch.
        vocabulary: Number V of tokens.
        steps: Training steps in each round.
    """

    layers: int
    heads: int
    width: int
    length: int
    batch: int
    vocabulary: int
    steps: int

    @property
    def weights(self) -> int:
        """Numbers that matrix products read, once for each token: blocks and output layer, no biases."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    @property
    def operations(self) -> int:
        """Floating-point operations of a training step for one token (Chowdhery 2022, appendix B)."""
        return 6 * self.weights + 12 * self.layers * self.width * self.length


SIZES = {
    "small": Sizes(6, 6, 384, 256, 8, 50_257, 1),
    "tiny": Sizes(4, 4, 128, 64, 12, 65, 20),
    "gpt2": Sizes(
        12, 12, 768, 1024, 12, 50_304, 20
    ),  # nanoGPT's table, quantize_rows up to a multiple of 64
}


def tessera(sizes: Sizes, position: str = "learned") -> Any:
    """Our decoder; `position` "rotary" is for comparison with litgpt, which has no learned positions."""
    from modules.config import StackConfig
    from modules.models.gpt import Decoder, DecoderConfig

    stack = StackConfig(
        sizes.width, sizes.layers, sizes.heads, norm_eps=1e-5, causal=True, init="gpt2"
    )
    return Decoder(DecoderConfig(sizes.vocabulary, sizes.length, position, stack=stack))  # type: ignore[arg-type]


def nanogpt_model(folder: str, **sizes: Any) -> Any:
    """nanoGPT's model, from a checkout; `sizes` are those of its `GPTConfig`."""
    file = Path(folder, "model.py")
    if not file.is_file():
        raise SystemExit(
            f"{folder} holds no model.py: give a checkout of github.com/karpathy/nanoGPT."
        )
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    assert spec and spec.loader
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with redirect_stdout(StringIO()):
        return module.GPT(module.GPTConfig(**sizes))


def nanogpt(sizes: Sizes, folder: str) -> Any:
    """nanoGPT's model with biases, as in GPT-2."""
    names = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
    return nanogpt_model(folder, block_size=sizes.length, vocab_size=sizes.vocabulary, **names)


def hugging_face(sizes: Sizes) -> Any:
    """Hugging Face's GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=sizes.length,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def litgpt(sizes: Sizes) -> Any:
    """litgpt's model, with rotary positions and its tables tied."""
    from litgpt import GPT, Config

    config = Config(
        block_size=sizes.length,
        padded_vocab_size=sizes.vocabulary,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_embd=sizes.width,
        rotary_percentage=1.0,
        parallel_residual=False,
        attn_bias=True,
    )
    net = GPT(config)
    net.apply(net._init_weights)
    net.lm_head.weight = net.transformer.wte.weight
    return net


@torch.no_grad()
def copy_weights(ours: Any, theirs: Any, names: dict[str, str]) -> None:
    """Gives a peer our weights; Hugging Face's matrices in the blocks are stored the other way round."""
    left, turned = dict(theirs.named_parameters()), "transformers" in type(theirs).__module__
    for name, value in ours.named_parameters():
        for own, other in names.items():
            name = name.replace(own, other)
        parameter = left.pop(name if name in left else name.replace("transformer.wte", "lm_head"))
        parameter.copy_(value.T if turned and ".c_" in name and name.endswith("weight") else value)
    assert not left, f"left without weights: {list(left)}"


def all_logits(net: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, N, V) of tokens (B, N), whosever the model is."""
    if hasattr(net, "stack"):
        return net.logits(net(tokens))
    found = net(tokens, targets=tokens) if type(net).__module__ == "nanogpt_model" else net(tokens)
    found = getattr(found, "logits", found)
    return found[0] if isinstance(found, tuple) else found


def loss(net: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy as each side's own training computes it."""
    if hasattr(net, "stack"):
        return net.loss(net(tokens), targets)[0]
    if hasattr(net, "generation_config"):  # Hugging Face's shifts the targets itself
        return net(tokens, labels=tokens, use_cache=False).loss
    if hasattr(net, "max_seq_length"):
        from litgpt.utils import chunked_cross_entropy

        return chunked_cross_entropy(net(tokens), targets)
    return net(tokens, targets)[1]


def peers(names: Iterable[str], folder: str = "") -> list[str]:
    """Which other libraries are here, of `names`; says what to do about those that are not."""
    found = []
    for name in names:
        if name == "nanogpt":
            here, remedy = (
                bool(folder),
                "clone github.com/karpathy/nanoGPT and give the folder with --nanogpt",
            )
        else:
            package = {"hugging face": "transformers"}.get(name, name)
            here, remedy = importlib.util.find_spec(package) is not None, f"pip install {package}"
        if here:
            found.append(name)
        else:
            print(f"{name} is left out: {remedy}.")
    return found


def build_peer(name: str, sizes: Sizes, folder: str) -> Any:
    """The model of one of `peers`."""
    return (
        nanogpt(sizes, folder)
        if name == "nanogpt"
        else {"hugging face": hugging_face, "litgpt": litgpt}[name](sizes)
    )


@torch.inference_mode()
def difference(name: str, sizes: Sizes, folder: str) -> float:
    """Largest difference of a peer's logits from ours, with equal weights."""
    torch.manual_seed(0)
    ours = tessera(sizes, "rotary" if name == "litgpt" else "learned").eval()
    theirs = build_peer(name, sizes, folder).eval()
    copy_weights(ours, theirs, LITGPT_NAMES if name == "litgpt" else GPT2_NAMES)
    tokens = torch.randint(sizes.vocabulary, (2, sizes.length))
    return float((all_logits(ours, tokens) - all_logits(theirs, tokens)).abs().max())


def check(names: list[str], sizes: Sizes, folder: str) -> None:
    """Prints how far the logits of each peer are from ours; ends the program if they are not equal."""
    for name in names:
        print(
            f"largest difference of the logits from {name}'s {(largest := difference(name, sizes, folder)):.1e}"
        )
        if largest > 1e-4:
            raise SystemExit("The outputs are not equal: the times say nothing.")
