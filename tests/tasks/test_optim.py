"""Groups, optimizers and schedules: against torch's optimizers, transformers' schedules and closed
forms.
"""

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from datamodules.utils.errors import UsageError
from modules.config import StackConfig
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.vit import ViT, ViTConfig
from modules.parameter_groups import parameter_depths
from tasks.training import optim
from tasks.training.optim import (
    OPTIMIZERS,
    SCHEDULES,
    MuonAdamW,
    OptimConfig,
    build,
    freeze,
    lr_factor,
    parameter_groups,
)


def tiny_vit() -> nn.Module:
    torch.manual_seed(0)
    return ViT(
        ViTConfig(
            image_size=8, patch_size=4, num_classes=3, stack=StackConfig(width=16, depth=2, heads=2)
        )
    )


def tiny_decoder(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(9, 8, tied=tied, stack=StackConfig(width=16, depth=2, heads=2, causal=True))
    )


def gradients(net: nn.Module, step: int) -> None:
    """Gradients that depend on the step and the weights."""
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        parameter.grad = (
            torch.randn(parameter.shape, generator=generator) * 0.1 + 0.01 * parameter.detach()
        )


def train(net: nn.Module, built: dict[str, Any], steps: range) -> None:
    for step in steps:
        gradients(net, step)
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_parameter_sits_in_one_group(optimizer: str) -> None:
    net = tiny_vit()
    groups = parameter_groups(net, OptimConfig(optimizer=optimizer))
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in net.parameters())


def test_decay_and_muon_by_name() -> None:
    net = tiny_vit()
    config = OptimConfig(optimizer="muon", lr=1e-3, muon_lr=2e-2, weight_decay=0.1)
    names = {parameter: name for name, parameter in net.named_parameters()}
    for group in parameter_groups(net, config):
        for parameter in group["params"]:
            name = names[parameter]
            unlike = any(part in name for part in ("norm", "bias", "position", "prefix"))
            assert group["weight_decay"] == (0.0 if unlike else 0.1), name
            assert group["lr"] == (2e-2 if group["kind"] == "muon" else 1e-3), name
            assert group["kind"] == "adamw" or (
                parameter.ndim == 2 and not unlike and "head." not in name
            ), name


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
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        n for n, _ in net.named_parameters() if n.startswith(("embed", "position", "prefix"))
    } | {n for n, _ in net.named_parameters() if n.startswith("stack.blocks.0.")}
    with pytest.raises(ValueError, match="must leave one of the network's"):
        freeze(net, 99)


def test_a_table_that_two_layers_share_is_of_the_lower_one() -> None:
    own, tied = (parameter_depths(tiny_decoder(tied)) for tied in (False, True))
    assert own == {**tied, "unembed.weight": 3} and (
        tied["embed.weight"],
        tied["stack.norm.weight"],
    ) == (0, 3)


@pytest.mark.parametrize("make", (tiny_vit, tiny_decoder))
@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_layer_decay_slows_lower_layers(
    optimizer: Literal["adamw", "muon"], make: Callable[[], nn.Module]
) -> None:
    net = make()
    depths, names = parameter_depths(net), {id(p): name for name, p in net.named_parameters()}
    top = max(depths.values())
    groups = parameter_groups(net, OptimConfig(optimizer=optimizer, lr=1.0, layer_decay=0.5))
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert rates == {name: 0.5 ** (top - depth) for name, depth in depths.items()}
    assert len({group["name"] for group in groups}) == len(groups)


# optimizers ---------------------------------------------------------------------------------------


def test_equals_separate_torch_optimizers() -> None:
    ours, theirs = tiny_vit(), tiny_vit()
    config = OptimConfig(
        optimizer="muon",
        lr=1e-2,
        muon_lr=3e-2,
        momentum=0.9,
        betas=(0.8, 0.95),
        schedule="constant",
    )
    built = build(ours, dataclasses.replace(config, warmup=0), 5)
    roles = optim.parameter_roles(theirs)
    members = {
        role: [p for name, p in theirs.named_parameters() if roles[name] == role]
        for role in roles.values()
    }
    muon = torch.optim.Muon(
        members["matrix"], lr=3e-2, momentum=0.9, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    decayed = torch.optim.AdamW(
        members["table"], lr=1e-2, betas=(0.8, 0.95), weight_decay=0.05, fused=True
    )
    plain = torch.optim.AdamW(
        members["scalar"], lr=1e-2, betas=(0.8, 0.95), weight_decay=0, fused=True
    )
    for step in range(5):
        gradients(theirs, step)
        for optimizer in (muon, decayed, plain):
            optimizer.step()
    train(ours, built, range(5))
    assert same_weights(ours, theirs)
    assert not same_weights(ours, tiny_vit())


def test_fused_adamw_equals_the_plain_one() -> None:
    ours, theirs = tiny_vit(), tiny_vit()
    train(
        ours, build(ours, OptimConfig(schedule="constant", warmup=0, weight_decay=0.0), 5), range(5)
    )
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    for step in range(5):
        gradients(theirs, step)
        plain.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_first_muon_update_is_nearly_orthogonal() -> None:
    weight = nn.Parameter(torch.zeros(32, 32))
    weight.grad = torch.randn(32, 32)
    MuonAdamW([{"kind": "muon", "params": [weight], "lr": 1.0}]).step()
    singular = torch.linalg.svdvals(weight.detach()) / (0.2 * math.sqrt(32))
    assert singular.min() > 0.4 and singular.max() < 1.4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resume_gives_the_same_bits(optimizer: str, schedule: str) -> None:
    config = OptimConfig(optimizer=optimizer, schedule=schedule, warmup=3)
    straight = tiny_vit()
    train(straight, build(straight, config, 10), range(10))

    first = tiny_vit()
    built = build(first, config, 10)
    train(first, built, range(6))
    states = through_file(
        [first.state_dict(), built["optimizer"].state_dict(), scheduler(built).state_dict()]
    )

    second = tiny_vit()
    built = build(second, config, 10)
    second.load_state_dict(states[0])
    built["optimizer"].load_state_dict(states[1])
    scheduler(built).load_state_dict(states[2])
    train(second, built, range(6, 10))
    assert same_weights(second, straight)
    assert not same_weights(second, first)


def scheduler(built: dict[str, Any]) -> optim.StepSchedule:
    return built["lr_scheduler"]["scheduler"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_takes_options_from_the_user(optimizer: str) -> None:
    net = tiny_vit()
    before = build(net, OptimConfig(optimizer=optimizer, weight_decay=0.1), 10)
    train(net, before, range(4))
    now = OptimConfig(
        optimizer=optimizer, lr=5e-4, weight_decay=0.2, betas=(0.8, 0.9), schedule="linear"
    )
    after = build(net, now, 20)
    after["optimizer"].load_state_dict(before["optimizer"].state_dict())
    scheduler(after).load_state_dict(scheduler(before).state_dict())
    for group in after["optimizer"].param_groups:
        assert group["lr"] == pytest.approx(5e-4 * lr_factor(5, 20, now))
        assert group["weight_decay"] in (0.0, 0.2)
        assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert (
        after["optimizer"].state_dict()["state"].keys()
        == before["optimizer"].state_dict()["state"].keys()
    )


def test_resume_with_another_optimizer_is_refused() -> None:
    net = tiny_vit()
    saved = build(net, OptimConfig(optimizer="muon"), 10)["optimizer"].state_dict()
    with pytest.raises(UsageError, match="muon.*adamw"):
        build(net, OptimConfig(), 10)["optimizer"].load_state_dict(saved)


def test_copy_and_closure() -> None:
    net = tiny_vit()
    optimizer = build(net, OptimConfig(optimizer="muon"), 10)["optimizer"]
    copied_net, copied = copy.deepcopy((net, optimizer))

    def closure() -> Tensor:
        gradients(net, 0)
        return (next(net.parameters()) ** 2).sum()

    assert optimizer.step(closure).requires_grad  # the closure runs with gradients on
    gradients(copied_net, 0)
    copied.step()
    assert same_weights(net, copied_net)


# schedules ----------------------------------------------------------------------------------------


def test_dictionaries_match_the_config() -> None:
    hints = get_type_hints(OptimConfig)
    assert set(get_args(hints["schedule"])) == SCHEDULES.keys()
    assert set(get_args(hints["optimizer"])) == OPTIMIZERS.keys()


@pytest.mark.parametrize("total", [1, 2, 50, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1, 20, 5000])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_properties(schedule: str, warmup: float, total: int) -> None:
    config = OptimConfig(schedule=schedule, warmup=warmup, final_lr=0.1, decay=0.3)
    steps = int(warmup if warmup >= 1 else warmup * total)
    shares = [lr_factor(t, total, config) for t in range(1, total + 1)]
    ramp, rest = shares[:steps], shares[max(steps - 1, 0) :]
    assert all(0 < share <= 1 for share in shares)
    assert ramp == pytest.approx([t / steps for t in range(1, len(ramp) + 1)])
    assert rest == sorted(rest, reverse=True)
    if total == 1 >= steps:
        assert shares == [1]
    if 0 < steps < total:
        assert shares[steps - 1] == 1
    if steps < total > 1 and schedule in ("cosine", "linear", "wsd"):
        assert shares[-1] == pytest.approx(0.1)
    assert lr_factor(total + 5, total, config) == shares[-1]


def transformers_lambda(name: str) -> Callable[[int], float]:
    """`name` as transformers schedules it, in 100 steps, 10 of them warm-up, down to 0.1 where it
    ends anywhere.
    """
    from transformers import optimization

    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warm = {"num_warmup_steps": 10}
    schedules: dict[str, Callable[[], Any]] = {
        "cosine": lambda: optimization.get_cosine_with_min_lr_schedule_with_warmup(
            dummy, **warm, num_training_steps=100, min_lr_rate=0.1
        ),
        "linear": lambda: optimization.get_polynomial_decay_schedule_with_warmup(
            dummy, **warm, num_training_steps=100, lr_end=0.1, power=1.0
        ),
        "noam": lambda: optimization.get_inverse_sqrt_schedule(dummy, **warm),
        "wsd": lambda: optimization.get_wsd_schedule(
            dummy,
            **warm,
            num_decay_steps=30,
            num_training_steps=100,
            min_lr_ratio=0.1,
            decay_type="1-sqrt",
        ),
        "constant": lambda: optimization.get_constant_schedule_with_warmup(dummy, **warm),
    }
    return schedules[name]().lr_lambdas[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_transformers(schedule: str) -> None:
    config = OptimConfig(schedule=schedule, warmup=10, final_lr=0.1, decay=0.3)
    theirs = transformers_lambda(schedule)
    for t in range(
        10 if schedule == "wsd" else 1, 101
    ):  # their wsd warms up from the last share, ours from 0
        assert lr_factor(t, 100, config) == pytest.approx(theirs(t), abs=1e-9), t


def test_noam_equals_the_paper() -> None:
    config = OptimConfig(schedule="noam", warmup=4000)

    def rate(t: int) -> float:
        return 512**-0.5 * min(t**-0.5, t * 4000**-1.5)

    for t in (1, 100, 4000, 16000, 100_000):
        assert lr_factor(t, 100_000, config) == pytest.approx(rate(t) / rate(4000))


def test_the_optimizer_follows_the_schedule() -> None:
    net = tiny_vit()
    config = OptimConfig(optimizer="muon", lr=1e-3, muon_lr=1e-2, warmup=0.2)
    built = build(net, config, 10)
    assert built["lr_scheduler"]["interval"] == "step"
    for t in range(1, 11):
        peaks = [
            1e-2 if group["kind"] == "muon" else 1e-3 for group in built["optimizer"].param_groups
        ]
        used = [group["lr"] for group in built["optimizer"].param_groups]
        assert used == pytest.approx([peak * lr_factor(t, 10, config) for peak in peaks])
        train(net, built, range(t, t + 1))


@pytest.mark.parametrize("total", [-1, 0, math.inf])
def test_unknown_length_is_refused(total: float) -> None:
    with pytest.raises(UsageError, match="max_steps"):
        build(tiny_vit(), OptimConfig(), total)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": math.nan},
        {"muon_lr": -1.0},
        {"gradient_clip": 0.0},
        {"weight_decay": -0.1},
        {"eps": -1e-8},
        {"warmup": -1},
        {"warmup": 10.5},
        {"final_lr": 1.5},
        {"decay": 2.0},
        {"momentum": 1.0},
        {"betas": (0.9, 1.0)},
    ],
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OptimConfig(**wrong)


# Lightning ----------------------------------------------------------------------------------------


class Toy(LightningModule):
    """A tiny ViT on noise that depends on the position in training."""

    def __init__(self, config: OptimConfig, total: int) -> None:
        super().__init__()
        self.config, self.total = config, total

    def configure_model(self) -> None:
        self.net = tiny_vit()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        position = self.trainer.fit_loop.epoch_loop.total_batch_idx
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(position))
        return self.net(images).square().mean()

    def configure_optimizers(self) -> dict[str, Any]:
        return build(self.net, self.config, self.total)


def fit(task: Toy, steps: int, folder: Path, resume: Path | None = None, **options: Any) -> Trainer:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", max_steps=steps, callbacks=[saver], **quiet, **options)
    trainer.fit(task, DataLoader(torch.zeros(10, 1), batch_size=1), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lightning_resumes_exactly_with_accumulation(tmp_path: Path, optimizer: str) -> None:
    config = OptimConfig(optimizer=optimizer, warmup=2)
    straight, resumed = Toy(config, 8), Toy(config, 8)
    trainer = fit(straight, 8, tmp_path, accumulate_grad_batches=2)
    assert trainer.global_step == 8  # one optimizer: one count per two batches
    fit(resumed, 8, tmp_path / "resumed", tmp_path / "step=3.ckpt", accumulate_grad_batches=2)
    assert same_weights(straight, resumed)
    assert not same_weights(straight.net, tiny_vit())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lightning_clips_under_bfloat16(tmp_path: Path, optimizer: str) -> None:
    task = Toy(OptimConfig(optimizer=optimizer), 2)
    trainer = fit(task, 2, tmp_path, precision="bf16-mixed", gradient_clip_val=1e-3)
    assert trainer.global_step == 2
    norm = torch.cat([p.grad.flatten() for p in task.parameters()]).norm()
    assert norm <= 1e-3 * 1.01
