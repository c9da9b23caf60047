"""On a GPU: the loss and generation equal those of the CPU; the loss does not wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from modules.config import StackConfig
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from modules.kernels import cross_entropy
from modules.kernels.cross_entropy import chunk_loss, chunked_cross_entropy
from modules.models.gpt import Decoder, DecoderConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_loss(
    is_compiled: bool,
    smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "GPU_LOGITS_PER_CHUNK", 64 * 500)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in [(200, 32), (500, 32), (500,)]]
    targets = torch.randint(500, (200,)).masked_fill(torch.rand(200) < 0.2, -100)
    logits = F.linear(*leaves)
    plain = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    plain = plain + z_loss * logits.logsumexp(1)[targets >= 0].square().mean()
    ours = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    x, weight, bias = ours
    on_gpu = targets.cuda()
    torch.compiler.reset()
    of_chunk = torch.compile(chunk_loss) if is_compiled else chunk_loss
    checked = nullcontext() if is_compiled else no_waiting()  # compiling waits
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32), checked:
        loss, correct = chunked_cross_entropy(x, weight, bias, on_gpu, smoothing, z_loss, of_chunk)
    gradients = torch.autograd.grad(loss, ours)
    for found, expected in zip(gradients, torch.autograd.grad(plain, leaves), strict=True):
        assert (found.cpu() - expected).norm() <= limit * expected.norm()
    assert abs(loss.cpu() - plain) <= limit * plain
    assert abs(correct.cpu() - (logits.argmax(1) == targets).sum()) <= 200 * limit


def test_a_compiled_model_compiles_its_loss() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    net = Decoder(DecoderConfig(50, 32, stack=StackConfig(32, 2, 4, causal=True))).cuda()
    tokens = torch.randint(50, (2, 32), device="cuda")
    expected, correct = net.loss(net(tokens), tokens)
    net.compile(backend=backend)
    hidden = net(tokens)
    count = len(graphs)
    loss, found = net.loss(hidden, tokens)
    assert len(graphs) > count > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found == correct


def test_generation() -> None:
    net = Decoder(DecoderConfig(50, 32, "rotary", stack=StackConfig(32, 2, 4, causal=True))).eval()
    config = GenerationConfig(12, temperature=0.0)
    expected = list(generate(net, [[1, 2], [3]], config))
    found = list(generate(net.cuda(), [[1, 2], [3]], config))
    assert torch.equal(torch.stack(found).cpu(), torch.stack(expected))
