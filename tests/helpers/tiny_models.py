"""Tiny models whose weights are away from their initial values, and one way to run each of them."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache
from modules.config import StackConfig
from modules.kv_cache import KVCache
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import PrefixLM, Seq2Seq, Seq2SeqConfig
from modules.models.vit import ViT, ViTConfig
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.position import POSITIONS

VOCAB = 31
LENGTH = 16
STACK = StackConfig(24, 2, 4, mlp_width=20)
CROSS = replace(STACK, causal=True, cross_attention=True)
BERT = BertConfig(VOCAB, 3, LENGTH, segments=2, embedding_norm=True, stack=STACK)
SEQ2SEQ = Seq2SeqConfig(VOCAB, VOCAB, LENGTH, encoder=STACK, decoder=CROSS)
MODELS: dict[str, tuple[Any, Any]] = {
    "vit": (ViT, ViTConfig(8, 2, 1, 3, stack=STACK)),
    "bert": (BertClassifier, BERT),
    "masked": (BertMaskedLM, replace(BERT, next_sentence=True)),
    "gpt": (Decoder, DecoderConfig(VOCAB, LENGTH, stack=replace(STACK, causal=True))),
    "encoder_decoder": (Seq2Seq, SEQ2SEQ),
    "prefix": (PrefixLM, replace(SEQ2SEQ, architecture="prefix")),
}
DECODERS = ("gpt", "encoder_decoder", "prefix")
SOURCE = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 0, 0, 0, 0], [5, 8, 9, 7, 9, 0, 0]])
TEXT_POSITIONS = [name for name, kind in POSITIONS.items() if 1 in kind.dims]
VARIANTS: list[dict[str, Any]] = [
    *({"position": name} for name in TEXT_POSITIONS),
    *({"position": name, "kv_heads": 2, "head_dim": 4} for name in TEXT_POSITIONS),
    {"attention": "dot", "kv_heads": 1},
    {"attention": "additive", "kv_heads": 1, "position": "none"},
    {"order": "post"},
    {"order": "parallel"},
    {"order": "res_post"},
    {"order": "no_residual", "init": "kaiming"},  # smaller weights leave no trace of a token
    {"attention": "unscaled", "position": "rotary"},
    {"attention": "bilinear", "kv_heads": 2},
    {"attention": "cosine", "kv_heads": 2, "position": "rotary"},
    {"value_dim": 7, "kv_heads": 1},
    {"norm": "batchnorm"},
    {"norm": "none", "order": "post"},
    {"qk_norm": True, "position": "rotary", "position_options": {"fraction": 0.34}},
    {"norm": "rmsnorm", "feedforward": "swiglu", "bias": False, "qkv_bias": False},
    {"conv_kernel": 4, "position": "rotary"},
    {"conv_kernel": 2, "order": "post"},
    {"conv_kernel": 3, "order": "parallel"},
]


def label(options: dict[str, Any]) -> str:
    """The name of a test."""
    return "-".join(f"{key}={value}" for key, value in options.items()) or "plain"


every_decoder = pytest.mark.parametrize("kind", DECODERS)
every_variant = pytest.mark.parametrize("options", VARIANTS, ids=label)
every_position = pytest.mark.parametrize("position", TEXT_POSITIONS)


def close(ours: Any, expected: Any, atol: float = 2e-5, rtol: float = 1e-5) -> None:
    """Compares tensors, or pairs of tensors in sequences."""
    if not isinstance(ours, Tensor):
        ours = [*ours]
        expected = [*expected]
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol)


def shaken(net: Any) -> Any:
    """Moves every weight away from its initial value, so that zeros and ones hide nothing."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return net


def tiny(kind: str, **options: Any) -> Any:
    """A model in evaluation mode; options are of its config or of its stacks of blocks."""
    if kind == "prefix" and "conv_kernel" in options:
        pytest.skip("prefix language models have no convolutions")
    model, config = MODELS[kind]
    names = {field.name for field in fields(config)}
    own = {key: options.pop(key) for key in [*options] if key in names}
    stacks = names & {"stack", "encoder", "decoder"}
    blocks = {name: replace(getattr(config, name), **options) for name in stacks}
    return shaken(model(replace(config, **{**blocks, **own}))).eval()


def random_tokens(rows: int = 3, length: int = LENGTH) -> Tensor:
    """Tokens (rows, length), without the padding token 0."""
    return torch.randint(1, VOCAB, (rows, length))


def context_of(net: Any, rows: Iterable[int] = range(3)) -> Any:
    """The encoded sources of some rows; None for models without a source."""
    if not isinstance(net, Seq2Seq):
        return None
    source = SOURCE[[*rows]]
    return net.encode(source, source > 0)


def new_cache(net: Any, rows: Iterable[int], length: int) -> KVCache:
    """A cache for some rows of tokens."""
    context = context_of(net, rows)
    if context is None:
        return net.make_cache(len([*rows]), length)
    return net.make_cache(context, length)


def hidden(
    net: Any,
    tokens: Tensor,
    padding_mask: Tensor | None = None,
    cache: StackCache = NO_CACHE,
    rows: Iterable[int] = range(3),
) -> Tensor:
    """Vectors (B, N, E) of any text model; those with a source see that of `rows`."""
    if isinstance(net, Seq2Seq):
        return net.decode(tokens, context_of(net, rows), padding_mask, cache)
    if isinstance(net, Decoder):
        return net(tokens, padding_mask, cache=cache)
    return net.encoder(tokens, padding_mask)


def gradients(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    """Gradients of all parameters."""
    return torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)


def assert_all_learn(net: nn.Module, loss: Tensor) -> None:
    """Every parameter has a gradient, a role and a depth."""
    names = [name for name, _ in net.named_parameters()]
    grads = zip(names, gradients(loss, net), strict=True)
    assert not [name for name, grad in grads if not grad.any()]
    assert list(parameter_roles(net)) == list(parameter_depths(net)) == names
