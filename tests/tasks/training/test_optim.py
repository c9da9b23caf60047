"""Groups, optimizers and schedules: against torch's optimizers, transformers' schedules and closed
forms.
"""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import optimization

from datamodules.utils.errors import UsageError
from modules.config import StackConfig
from modules.kernels import cpu
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.vit import ViT, ViTConfig
from modules.parameter_groups import parameter_depths, parameter_roles
from tasks.training import muon
from tasks.training.optim import (
    OPTIMIZERS,
    SCHEDULES,
    OptimConfig,
    build,
    freeze,
    lr_factor,
    parameter_groups,
)
from tests.helpers.command import run
from tests.helpers.results import checkpoint
from tests.helpers.tiny import FEW_STEPS
from tests.helpers.tiny_models import close

STACK = {"width": 16, "depth": 2, "heads": 2}


def tiny_vit() -> nn.Module:
    torch.manual_seed(0)
    stack = StackConfig(**STACK)
    return ViT(ViTConfig(image_size=8, patch_size=4, num_classes=3, stack=stack))


def tiny_decoder(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(9, 8, tied=tied, stack=StackConfig(**STACK, causal=True)))


def gradients(net: nn.Module, step: int) -> None:
    """Gradients that depend on the step and the weights."""
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = noise * 0.1 + 0.01 * parameter.detach()


def train(net: nn.Module, built: dict[str, Any], steps: range) -> None:
    for step in steps:
        gradients(net, step)
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def states(built: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of optimizer and schedule, through a file."""
    file = io.BytesIO()
    both = [built["optimizer"], built["lr_scheduler"]["scheduler"]]
    torch.save([one.state_dict() for one in both], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(built: dict[str, Any], saved: list[dict[str, Any]]) -> None:
    built["optimizer"].load_state_dict(saved[0])
    built["lr_scheduler"]["scheduler"].load_state_dict(saved[1])


# groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_groups_by_name(optimizer: Any) -> None:
    net = tiny_vit()
    muon_lr = 2e-2 if optimizer == "muon" else None
    config = OptimConfig(optimizer=optimizer, lr=1e-3, muon_lr=muon_lr, weight_decay=0.1)
    names = {parameter: name for name, parameter in net.named_parameters()}
    groups = parameter_groups(net, config)
    for group in groups:
        for parameter in group["params"]:
            name = names.pop(parameter)
            plain = any(part in name for part in ("norm", "bias", "position", "prefix"))
            hidden = parameter.ndim == 2 and not plain and "head." not in name
            assert group["weight_decay"] == (0.0 if plain else 0.1), name
            assert group["lr"] == (2e-2 if group["kind"] == "muon" else 1e-3), name
            assert group["kind"] == "adamw" or hidden, name
    assert not names  # each is in one group
    assert {group["kind"] for group in groups} == {"adamw", optimizer}


def test_tied_parameters_are_grouped_once_and_frozen_ones_never() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    assert sum(len(group["params"]) for group in parameter_groups(net, OptimConfig())) == 3
    net[0].requires_grad_(False)
    assert [group["params"] for group in parameter_groups(net, OptimConfig())] == [[net[1].bias]]


@pytest.mark.parametrize("make", (tiny_vit, tiny_decoder))
def test_freeze_counts_layers_from_the_embedding(make: Callable[[], nn.Module]) -> None:
    net = make()
    freeze(net, 2)
    lower = ("embed", "position", "prefix", "stack.blocks.0.")
    for name, parameter in net.named_parameters():
        assert parameter.requires_grad != name.startswith(lower), name
    with pytest.raises(ValueError, match="freeze"):
        freeze(net, 99)


def test_training_leaves_all_state_of_frozen_layers_as_it_is() -> None:
    """Running statistics, too: with validations between the steps, and in a resumed run."""
    line = (
        f"fit {FEW_STEPS} --data.source digits --preset cifar_cpu --model.net.image_size 8 "
        "--model.net.patch_size 4 --model.net.stack.width 16 --model.net.stack.norm batchnorm"
    )
    assert run(f"{line} --run_dir a") == 0
    line += " --model.pretrained a --model.optimizer.freeze 2 --trainer.val_check_interval 1"
    assert run(f"{line} --run_dir b") == 0
    assert run("fit --resume b --trainer.max_epochs 2") == 0
    before = checkpoint("a", "best")["state_dict"]
    after = checkpoint("b")["state_dict"]
    assert "net.embed.stem.layers.2.running_mean" in before
    for name, value in before.items():
        frozen = name.startswith(("net.embed.", "net.stack.blocks.0."))
        assert torch.equal(after[name], value) == frozen, name


def test_a_table_that_two_layers_share_is_of_the_lower_one() -> None:
    own, tied = (parameter_depths(tiny_decoder(tied)) for tied in (False, True))
    assert own == {**tied, "unembed.weight": 3}
    assert (tied["embed.weight"], tied["stack.norm.weight"]) == (0, 3)


@pytest.mark.parametrize("make", (tiny_vit, tiny_decoder))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_layer_decay_slows_lower_layers(optimizer: Any, make: Callable[[], nn.Module]) -> None:
    net = make()
    depths = parameter_depths(net)
    names = {id(p): name for name, p in net.named_parameters()}
    top = max(depths.values())
    groups = parameter_groups(net, OptimConfig(optimizer=optimizer, lr=1.0, layer_decay=0.5))
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert rates == {name: 0.5 ** (top - depth) for name, depth in depths.items()}
    assert len({group["name"] for group in groups}) == len(groups)


# optimizers ---------------------------------------------------------------------------------------


def test_equals_separate_torch_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "matmul_dtype", lambda *_: torch.bfloat16)  # as torch's Muon
    monkeypatch.setattr(muon, "uses_gram", lambda _: False)
    ours, theirs = tiny_vit(), tiny_vit()
    options = {"momentum": 0.9, "betas": (0.8, 0.95), "schedule": "constant", "warmup": 0}
    built = build(ours, OptimConfig(optimizer="muon", lr=1e-2, muon_lr=3e-2, **options), 5)
    roles = parameter_roles(theirs)
    hidden, tables, others = (
        [p for name, p in theirs.named_parameters() if roles[name] == role]
        for role in ("matrix", "table", "scalar")
    )
    adamw: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "fused": True}
    optimizers = [
        torch.optim.Muon(
            hidden, lr=3e-2, momentum=0.9, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(tables, weight_decay=0.05, **adamw),
        torch.optim.AdamW(others, weight_decay=0, **adamw),
    ]
    for step in range(5):
        gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.step()
    train(ours, built, range(5))
    assert same_weights(ours, theirs) and not same_weights(ours, tiny_vit())


@pytest.mark.parametrize("shape", [(3, 20, 20), (2, 8, 40), (1, 40, 8)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    u, s, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s = torch.linspace(0.2, 1, s.shape[1], dtype=s.dtype).expand_as(s)
    matrices = u * s[:, None] @ v
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = u * s[:, None] @ v
    close(muon.orthogonalize(matrices), expected, atol=1e-10)
    close(muon.orthogonalize(matrices.float()), expected.float(), atol=1e-4)
    assert s.min() > 0.3 and s.max() < 1.3
    assert not muon.orthogonalize(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(2, 48, 100), (3, 200, 64)])
def test_singular_values_near_zero_stay_small_and_finite(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    s = torch.logspace(0, -9, s.shape[1], dtype=s.dtype).expand_as(s)
    matrices = u * s[:, None] @ v
    expected = torch.linalg.svdvals(muon.orthogonalize(matrices)).float()  # (K, M)
    close(torch.linalg.svdvals(muon.orthogonalize(matrices.float())), expected, atol=1e-3)
    close(muon.iterate(matrices), muon.iterate_on_gram(matrices), atol=1e-10)


@pytest.mark.parametrize("smallest", [1, 1e-2, 1e-5, 0])
def test_bfloat16_keeps_small_singular_values(smallest: float) -> None:
    u, _, v = torch.linalg.svd(torch.randn(4, 64, 256, dtype=torch.float64), full_matrices=False)
    s = torch.cat([torch.ones(32), torch.full((32,), smallest)]).double()
    x = (u * s @ v / s.norm()).bfloat16()  # (K, M, N)
    exact = muon.iterate(x.double())
    assert (muon.iterate_on_gram(x) - exact).norm() < 0.04 * exact.norm()


@pytest.mark.parametrize("native", [False, True])
def test_small_matrices_are_orthogonalized_in_float32(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "HAS_BFLOAT16", native)
    seen = {}

    def record(x: torch.Tensor) -> torch.Tensor:
        seen[min(x.shape[1:])] = x.dtype
        return x

    monkeypatch.setattr(muon, "orthogonalize", record)
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((64, 300), (300, 128))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    muon.Muon([{"params": weights, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}]).step()
    large = torch.bfloat16 if native else torch.float32
    assert seen == {64: torch.float32, 128: large}


def test_filters_are_rows() -> None:
    convolution = nn.Conv2d(4, 6, 3, bias=False)
    linear = nn.Linear(36, 6, bias=False)
    linear.weight.data = convolution.weight.detach().flatten(1).clone()
    for net in (convolution, linear):
        net.weight.grad = torch.linspace(-1, 1, 216).sin().view_as(net.weight)
        group = {"params": [net.weight], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        muon.Muon([group]).step()
    assert torch.equal(convolution.weight.flatten(1), linear.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_one_shape_do_not_mix(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "matmul_dtype", lambda *_: dtype)
    nets = [tiny_vit(), tiny_vit()]
    for net, values in zip(nets, (1, muon.VALUES_AT_ONCE), strict=True):
        monkeypatch.setattr(muon, "VALUES_AT_ONCE", values)  # 1: one matrix after the other
        train(net, build(net, OptimConfig(optimizer="muon"), 5), range(3))
    close(nets[0].state_dict().values(), nets[1].state_dict().values(), atol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resume_gives_the_same_bits(optimizer: Any, schedule: Any) -> None:
    config = OptimConfig(optimizer=optimizer, schedule=schedule, warmup=3)
    straight, first = tiny_vit(), tiny_vit()
    train(straight, build(straight, config, 10), range(10))
    built = build(first, config, 10)
    train(first, built, range(6))
    second = copy.deepcopy(first)
    rebuilt = build(second, config, 10)
    load(rebuilt, states(built))
    train(second, rebuilt, range(6, 10))
    assert same_weights(second, straight) and not same_weights(second, first)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_takes_options_from_the_user(optimizer: Any) -> None:
    net = tiny_vit()
    before = build(net, OptimConfig(optimizer=optimizer, weight_decay=0.1), 10)
    train(net, before, range(4))
    options = {"weight_decay": 0.2, "betas": (0.8, 0.9), "schedule": "linear"}
    now = OptimConfig(optimizer=optimizer, lr=5e-4, **options)
    after = build(net, now, 20)
    load(after, states(before))
    for group in after["optimizer"].param_groups:
        assert group["lr"] == pytest.approx(5e-4 * lr_factor(5, 20, now))
        assert group["weight_decay"] in (0.0, 0.2)
        assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert states(after)[0]["state"].keys() == states(before)[0]["state"].keys()


def test_resume_with_another_optimizer_is_refused() -> None:
    saved = build(tiny_vit(), OptimConfig(optimizer="muon"), 10)["optimizer"].state_dict()
    with pytest.raises(UsageError, match="muon.*adamw"):
        build(tiny_vit(), OptimConfig(), 10)["optimizer"].load_state_dict(saved)


# schedules ----------------------------------------------------------------------------------------


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("total", [1, 2, 50, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1, 20, 5000])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_properties(schedule: Any, warmup: float, total: int) -> None:
    config = OptimConfig(schedule=schedule, warmup=warmup, final_lr=0.1, decay=0.3)
    steps = int(warmup if warmup >= 1 else warmup * total)
    factors = [lr_factor(t, total, config) for t in range(1, total + 1)]
    ramp, rest = factors[:steps], factors[max(steps - 1, 0) :]
    assert all(0 < factor <= 1 for factor in factors)
    assert ramp == pytest.approx([t / steps for t in range(1, len(ramp) + 1)])
    assert rest == sorted(rest, reverse=True)
    if total == 1 >= steps:
        assert factors == [1]
    if 0 < steps < total:
        assert factors[steps - 1] == 1
    if steps < total > 1 and schedule in ("cosine", "linear", "wsd"):
        assert factors[-1] == pytest.approx(0.1)
    assert lr_factor(total + 5, total, config) == factors[-1]


STEPS = {"num_training_steps": 100}
THEIRS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {  # in 100 steps, 10 of warm-up
    "cosine": (optimization.get_cosine_with_min_lr_schedule_with_warmup, {"min_lr_rate": 0.1}),
    "linear": (
        optimization.get_polynomial_decay_schedule_with_warmup,
        {"lr_end": 0.1, "power": 1.0},
    ),
    "noam": (optimization.get_inverse_sqrt_schedule, {}),
    "wsd": (
        optimization.get_wsd_schedule,
        {"num_decay_steps": 30, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"},
    ),
    "constant": (optimization.get_constant_schedule_with_warmup, {}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_transformers(schedule: Any) -> None:
    config = OptimConfig(schedule=schedule, warmup=10, final_lr=0.1, decay=0.3)
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    make, options = THEIRS[schedule]
    steps = STEPS if options else {}
    theirs = make(dummy, num_warmup_steps=10, **steps, **options).lr_lambdas[0]
    start = 10 if schedule == "wsd" else 1  # theirs warms up from the last factor, ours from 0
    for t in range(start, 101):
        assert lr_factor(t, 100, config) == pytest.approx(theirs(t), abs=1e-9), t


def test_the_optimizer_follows_the_schedule() -> None:
    net = tiny_vit()
    config = OptimConfig(optimizer="muon", lr=1e-3, muon_lr=1e-2, warmup=0.2)
    built = build(net, config, 10)
    groups = built["optimizer"].param_groups
    for t in range(1, 11):
        peaks = [1e-2 if group["kind"] == "muon" else 1e-3 for group in groups]
        expected = [peak * lr_factor(t, 10, config) for peak in peaks]
        assert [group["lr"] for group in groups] == pytest.approx(expected)
        train(net, built, range(t, t + 1))


@pytest.mark.parametrize("total", [-1, 0, math.inf])
@pytest.mark.parametrize("schedule, warmup", [
    ("cosine", 0), ("linear", 0), ("wsd", 0), ("noam", 0.1), ("constant", 0.1),
])  # fmt: skip
def test_unknown_length_is_refused(schedule: Any, warmup: float, total: float) -> None:
    with pytest.raises(UsageError, match="max_steps"):
        build(tiny_vit(), OptimConfig(schedule=schedule, warmup=warmup), total)


@pytest.mark.parametrize("schedule", ["noam", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_some_schedules_need_no_length(schedule: Any, warmup: int) -> None:
    config = OptimConfig(schedule=schedule, warmup=warmup)
    endless = tiny_vit()
    net = tiny_vit()
    train(endless, build(endless, config, math.inf), range(6))
    train(net, build(net, config, 6), range(6))
    assert same_weights(endless, net)


@pytest.mark.parametrize("wrong", [
    {"lr": 0.0}, {"lr": math.nan}, {"muon_lr": -1.0}, {"gradient_clip": 0.0},
    {"weight_decay": -0.1}, {"eps": -1e-8}, {"warmup": -1}, {"warmup": 10.5}, {"final_lr": 1.5},
    {"decay": 2.0}, {"momentum": 1.0}, {"betas": (0.9, 1.0)}, {"layer_decay": 0.0}, {"freeze": -1},
])  # fmt: skip
def test_wrong_options_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OptimConfig(**wrong)
