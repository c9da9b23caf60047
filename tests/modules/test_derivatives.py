"""Models have the derivatives of `torch.func`: of single samples, and in the forward pass."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.tiny_models import MODELS, SOURCE, close, random_tokens, tiny

PADDED = torch.tensor([[True] * 7, [False] * 3 + [True] * 4, [True] * 5 + [False] * 2])


@pytest.mark.parametrize("position", ["learned", "alibi", "rotary"])
@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_each_sample_with_padding_has_its_gradients(kind: str, position: str) -> None:
    net = tiny(kind, position=position)
    parameters = dict(net.named_parameters())
    tokens = random_tokens(3, 7)

    def loss(parameters: dict[str, Tensor], row: Tensor, padding_mask: Tensor) -> Tensor:
        found = torch.func.functional_call(net, parameters, (row[None], padding_mask[None]))
        return (found * padding_mask[None, :, None] if kind == "gpt" else found).square().sum()

    gradient = torch.func.grad(loss)
    found = torch.func.vmap(gradient, (None, 0, 0))(parameters, tokens, PADDED)
    for i in range(3):
        expected = gradient(parameters, tokens[i], PADDED[i])
        for name, each in found.items():
            close(each[i], expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_forward_derivatives_are_those_of_backward(kind: str) -> None:
    """The slope along a direction is the product of the direction and the gradient."""
    net = tiny(kind)
    inputs: tuple[Tensor, ...] = (random_tokens(),)
    if kind == "vit":
        inputs = (torch.randn(3, 1, 8, 8),)
    if kind in ("encoder_decoder", "prefix"):
        inputs = (SOURCE, random_tokens(3, 5))
    parameters = dict(net.named_parameters())
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found = torch.func.functional_call(net, parameters, inputs)
        return F.log_softmax(found[0] if isinstance(found, tuple) else found, -1)[..., 0].sum()

    _, slope = torch.func.jvp(loss, (parameters,), (direction,))
    gradient = torch.func.grad(loss)(parameters)
    products = [(gradient[name] * value).sum() for name, value in direction.items()]
    close(slope, torch.stack(products).sum(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["masked", "gpt", "encoder_decoder"])
def test_a_compiled_model_can_be_copied(kind: str) -> None:
    net = tiny(kind)
    net.compile(backend="eager")
    copy = pickle.loads(pickle.dumps(net))
    inputs = (SOURCE, SOURCE) if kind == "encoder_decoder" else (SOURCE,)
    close(copy(*inputs)[0], net(*inputs)[0])
