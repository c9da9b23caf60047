"""Norms of the gradients by layer: those of autograd, and only if they are asked for."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.training.gradient_norms import logged_norms
from tests.helpers.command import run
from tests.helpers.results import logged, metrics
from tests.helpers.tiny import FEW_STEPS, TINY, write_data
from tests.helpers.tiny_models import random_tokens, tiny

LAYERS = {  # of a tiny model of each task, some of them
    "vit": {"stack.0", "embed.stem.layers.0", "stack.norm", "head.linear"},
    "mae": {"stack.0", "embed.stem.conv", "stack.norm", "decoder.0", "decoder.head"},
    "bert": {"encoder.0", "encoder.1", "encoder.embed", "head.linear"},
    "mlm": {"encoder.0", "encoder.1", "encoder.embed", "head.dense", "head.tokens"},
    "lm": {"stack.0", "stack.1", "embed", "stack.norm"},
    "igpt": {"stack.0", "stack.1", "embed", "unembed", "stack.norm"},
    "seq2seq": {"encoder.0", "encoder.1", "decoder.0", "decoder.1", "embed"},
}


def test_norms_are_those_of_each_layers_gradients() -> None:
    net: nn.Module = tiny("gpt")
    tokens = random_tokens()
    net.loss(net(tokens), tokens)[0].backward()
    net.stack.norm.weight.grad = None  # as if frozen, with its bias
    net.stack.norm.bias.grad = None
    whole = torch.tensor(3.0)
    found = logged_norms(net, whole, by_layer=True)
    parts = {"embed": net.embed, "position": net.position}
    parts |= {f"stack.{i}": block for i, block in enumerate(net.stack.blocks)}
    for name, part in parts.items():
        flat = torch.cat([parameter.grad.flatten() for parameter in part.parameters()])
        assert found.pop(f"grad_norm/{name}").item() == pytest.approx(flat.norm().item(), rel=1e-5)
    assert found == {"train/grad_norm": whole} == logged_norms(net, whole, by_layer=False)


def test_a_parameter_of_the_network_itself_has_its_own_name() -> None:
    net = nn.Linear(2, 1)
    net(torch.tensor([3.0, 4.0])).backward()
    found = logged_norms(net, torch.tensor(0.0), by_layer=True)
    assert found["grad_norm/weight"] == 5 and found["grad_norm/bias"] == 1


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("task", TINY)
def test_a_run_logs_them_before_clipping_if_asked(task: str) -> None:
    write_data(Path())
    line = f"fit {TINY[task]} {FEW_STEPS} --model.optimizer.gradient_clip 0.01"
    line += " --trainer.accumulate_grad_batches 2"
    assert run(f"{line} --run_dir without", task) == 0
    assert not any(name.startswith("grad_norm/") for row in metrics("without") for name in row)
    assert run(f"{line} --model.optimizer.layer_grad_norms true --run_dir with", task) == 0
    rows = [row for row in metrics("with") if "train/grad_norm" in row]
    assert rows
    for row in rows:
        norms = {name: float(row[name]) for name in row if name.startswith("grad_norm/")}
        assert norms.keys() >= {f"grad_norm/{name}" for name in LAYERS[task]}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        assert total == pytest.approx(float(row["train/grad_norm"]), rel=1e-4)
        assert total > 0.01
    for name in ("train/loss", "train/grad_norm"):
        assert logged("with", name) == logged("without", name)
