"""What the benchmarks of decoders share: sizes, and the same model in several libraries."""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks import _compare

SMALL_VOCABULARY = 1000


@dataclass(frozen=True)
class Sizes:
    """A decoder and its batches: GPT-2's blocks with an exact GELU, tied tables, no dropout.

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
        """Weights that a token is multiplied with: those of blocks and output layer, no biases."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    @property
    def operations(self) -> int:
        """FLOPs of a training step for one token (Chowdhery 2022, appendix B)."""
        return 6 * self.weights + 12 * self.layers * self.width * self.length


SIZES = {
    "small": Sizes(6, 6, 384, 256, 8, 50_257, 1),
    "tiny": Sizes(4, 4, 128, 64, 12, 65, 20),
    "gpt2": Sizes(12, 12, 768, 1024, 12, 50_304, 20),  # nanoGPT's vocabulary, a multiple of 64
}


def tessera(sizes: Sizes, position: str = "learned") -> Any:
    """Our decoder."""
    from modules.config import StackConfig
    from modules.models.gpt import Decoder, DecoderConfig

    shape = (sizes.width, sizes.layers, sizes.heads)
    stack = StackConfig(*shape, norm_eps=1e-5, causal=True, init="gpt2")
    return Decoder(DecoderConfig(sizes.vocabulary, sizes.length, position, stack=stack))  # type: ignore[arg-type]


def small_decoder(
    width: int, layers: int, heads: int, length: int, checkpoint_activations: bool = False
) -> tuple[Any, Any]:
    """Our decoder with rotary positions and 1,000 tokens, and its optimizer, as `fit` has them."""
    from modules.config import StackConfig
    from modules.models.gpt import Decoder, DecoderConfig
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    torch.manual_seed(0)
    stack = StackConfig(
        width, layers, heads, causal=True, checkpoint_activations=checkpoint_activations
    )
    net = Decoder(DecoderConfig(SMALL_VOCABULARY, length, "rotary", stack=stack))
    return net, _compare.our_optimizer(net)


def nanogpt_model(folder: str, **sizes: Any) -> Any:
    """nanoGPT's model, from a checkout; `sizes` are those of its `GPTConfig`."""
    file = Path(folder, "model.py")
    if not file.is_file():
        source = "github.com/karpathy/nanoGPT"
        raise SystemExit(f"{folder} holds no model.py: give a checkout of {source}.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    assert spec and spec.loader
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with redirect_stdout(StringIO()):
        return module.GPT(module.GPTConfig(**sizes))


def nanogpt(sizes: Sizes, folder: str) -> Any:
    """nanoGPT's model with biases, as in GPT-2."""
    shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
    return nanogpt_model(folder, block_size=sizes.length, vocab_size=sizes.vocabulary, **shape)


def hugging_face(sizes: Sizes, _: str) -> Any:
    """Hugging Face's GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
    inputs = {"vocab_size": sizes.vocabulary, "n_positions": sizes.length}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(activation_function="gelu", **shape, **inputs, **tokens, **rates)
    return GPT2LMHeadModel(config)


def litgpt(sizes: Sizes, _: str) -> Any:
    """litgpt's model, with rotary positions and its tables tied."""
    from litgpt import GPT, Config

    shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
    inputs = {"padded_vocab_size": sizes.vocabulary, "block_size": sizes.length}
    blocks = {"rotary_percentage": 1.0, "parallel_residual": False, "attn_bias": True}
    net = GPT(Config(**shape, **inputs, **blocks))
    net.apply(net._init_weights)
    net.lm_head.weight = net.transformer.wte.weight
    return net


def litgpt_loss(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy as litgpt's training computes it."""
    from litgpt.utils import chunked_cross_entropy

    return chunked_cross_entropy(net(tokens), targets)


# Parts of parameter names, ours and theirs, in the order in which they are replaced.
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
class Library:
    """A library that has the model.

    Args:
        build: Makes the model from sizes and the folder of nanoGPT's checkout.
        logits: Model and tokens (B, N) to logits (B, N, V).
        loss: Model, tokens and targets (B, N) to the mean cross entropy, as its training does it.
        package: What to install, if it is not ours; nanoGPT is none.
        names: Its parameter names for ours.
        is_transposed: Whether the matrices of its blocks are stored transposed.
        position: The position encoding of our model that equals it.
    """

    build: Callable[[Sizes, str], Any]
    logits: Callable[[Any, Tensor], Tensor]
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    package: str = ""
    names: dict[str, str] = field(default_factory=dict)
    is_transposed: bool = False
    position: str = "learned"


TESSERA = Library(
    lambda sizes, _: tessera(sizes),
    lambda net, tokens: net.logits(net(tokens)),
    lambda net, tokens, targets: net.loss(net(tokens), targets)[0],
)
PEERS = {
    "nanogpt": Library(
        nanogpt,
        lambda net, tokens: net(tokens, targets=tokens)[0],
        lambda net, tokens, targets: net(tokens, targets)[1],
        names=GPT2_NAMES,
    ),
    "hugging face": Library(
        hugging_face,
        lambda net, tokens: net(tokens).logits,
        lambda net, tokens, _: net(tokens, labels=tokens, use_cache=False).loss,  # it shifts them
        "transformers",
        GPT2_NAMES,
        is_transposed=True,
    ),
    "litgpt": Library(
        litgpt,
        lambda net, tokens: net(tokens),
        litgpt_loss,
        "litgpt",
        LITGPT_NAMES,
        False,
        "rotary",
    ),
}
LIBRARIES = {**PEERS, "tessera": TESSERA, "tessera, rotary": TESSERA}


@torch.no_grad()
def with_our_weights(name: str, sizes: Sizes, folder: str = "") -> tuple[Any, Any]:
    """Our model and a peer's, both with our random weights."""
    peer = PEERS[name]
    torch.manual_seed(0)
    ours = tessera(sizes, peer.position).eval()
    theirs = peer.build(sizes, folder).eval()
    left = dict(theirs.named_parameters())
    for parameter, value in ours.named_parameters():
        for own, other in peer.names.items():
            parameter = parameter.replace(own, other)
        if parameter not in left:
            parameter = parameter.replace("transformer.wte", "lm_head")
        is_matrix = ".c_" in parameter and parameter.endswith("weight")
        left.pop(parameter).copy_(value.T if peer.is_transposed and is_matrix else value)
    assert not left, f"left without weights: {list(left)}"
    return ours, theirs


def installed(names: Iterable[str], folder: str = "") -> list[str]:
    """Which of some peers are here; prints what to do about the others."""
    found = []
    for name in names:
        if name == "nanogpt":
            is_here = bool(folder)
            remedy = "clone github.com/karpathy/nanoGPT and give the folder with --nanogpt"
        else:
            is_here = importlib.util.find_spec(PEERS[name].package) is not None
            remedy = f"pip install {PEERS[name].package}"
        if is_here:
            found.append(name)
        else:
            print(f"{name} is left out: {remedy}.")
    return found


@torch.inference_mode()
def check(names: Iterable[str], sizes: Sizes, folder: str) -> None:
    """Ends the program unless the logits of peers equal ours, with equal weights."""
    differences = {}
    for name in names:
        ours, theirs = with_our_weights(name, sizes, folder)
        tokens = torch.randint(sizes.vocabulary, (2, sizes.length))
        found = PEERS[name].logits(theirs, tokens) - TESSERA.logits(ours, tokens)
        differences[name] = float(found.abs().max())
    _compare.require_equal(differences)
