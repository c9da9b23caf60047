"""Parameter groups, optimizers and learning-rate schedules, counted in optimizer steps."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from modules.config import check_choice, require
from modules.parameter_groups import parameter_depths, parameter_roles
from tasks.checkpoints.reading import check_tensor
from tasks.errors import UnknownLength, UsageError
from tasks.lightning_patches import clippable
from tasks.training.muon import Muon

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "linear", "noam", "wsd", "constant"]
Group = dict[str, Any]


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, learning-rate schedule and clipping.

    Args:
        optimizer: "adamw", or "muon" for the matrices of the network; then AdamW updates the other
            weights (Loshchilov & Hutter 2019, Jordan 2024).
        lr: Peak learning rate.
        muon_lr: Peak learning rate of the matrices under "muon"; null means `lr`, since Muon's
            updates are scaled to the size of AdamW's (Liu 2025).
        momentum: Decay of Muon's running mean of gradients.
        weight_decay: Decoupled weight decay; of linear, convolution and embedding weights, not of
            biases, norms, positions, class and register tokens.
        betas: Decays of AdamW's means of the gradient and its square.
        eps: Number added to AdamW's denominator.
        schedule: Learning rate after the linear warm-up; "cosine" or "linear" down to `final_lr`,
            "noam" (inverse square root of the step, Vaswani 2017), "wsd" (level, then
            down to `final_lr` over the last part: warm-up, stable, decay), or "constant". A run
            without end needs "noam" or "constant", with a warm-up in steps.
        warmup: Warm-up in steps, or below 1 as a fraction of all steps.
        final_lr: Last learning rate, as a fraction of the peak; for "cosine", "linear" and "wsd".
        decay: Fraction of all steps in which "wsd" decays.
        gradient_clip: Largest norm of the gradients of a step; larger ones are scaled down to it;
            null means no limit.
        layer_grad_norms: Log the gradient norm of each block; also of each layer outside of blocks;
            before clipping, as grad_norm/stack.0 or grad_norm/encoder.0.
        layer_decay: Factor on the learning rate for each layer down (Howard & Ruder 2018); such as
            0.9 in fine-tuning; 1 gives all layers the same.
        freeze: Layers to freeze, from the input on; 0: none, 1: the embeddings, 1 + n: also the
            first n blocks. Their BatchNorm uses its running statistics and leaves them as they are.
    """

    optimizer: OptimizerName = "adamw"
    lr: float = 1e-3
    muon_lr: float | None = None
    momentum: float = 0.95
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: ScheduleName = "cosine"
    warmup: float = 0.05
    final_lr: float = 0.0
    decay: float = 0.2
    gradient_clip: float | None = 1.0
    layer_grad_norms: bool = False
    layer_decay: float = 1.0
    freeze: int = 0

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        check_choice("schedule", self.schedule, get_args(ScheduleName))
        limits: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
            ("lr muon_lr gradient_clip", "above 0", lambda x: 0 < x < math.inf),
            ("weight_decay eps warmup freeze", "0 or above", lambda x: 0 <= x < math.inf),
            ("final_lr decay", "from 0 to 1", lambda x: 0 <= x <= 1),
            ("momentum betas", "from 0 to below 1", lambda x: 0 <= x < 1),
            ("layer_decay", "above 0 and at most 1", lambda x: 0 < x <= 1),
        )
        for names, words, fits in limits:
            for name in names.split():
                given = getattr(self, name)
                values = given if isinstance(given, tuple | list) else [given]
                right = all(value is None or fits(value) for value in values)
                require(right, f"{name} must be {words}, but is {given}.")
        require(
            self.warmup <= 1 or self.warmup % 1 == 0,
            f"warmup is {self.warmup}: give a fraction below 1, or a whole number of steps.",
        )


# parameter groups ---------------------------------------------------------------------------------


def freeze(net: nn.Module, layers: int) -> None:
    """Freezes the lowest `layers` layers; raises `ValueError` if none would be left."""
    depths = parameter_depths(net)
    top = max(depths.values())
    option = f"--model.optimizer.freeze is {layers}"
    require(layers <= top, f"{option}, which leaves nothing to train: give at most {top}.")
    for name, parameter in net.named_parameters():
        if depths[name] < layers:
            parameter.requires_grad_(False)


def refuse_clipping(trainer: Any) -> None:
    """Raises `UsageError` if a trainer is told to clip gradients, which the task does itself."""
    if trainer.gradient_clip_val is not None:
        raise UsageError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) has no effect: give the task "
            "OptimConfig(gradient_clip=...)"
        )


def freeze_statistics(net: nn.Module) -> None:
    """Puts BatchNorm whose parameters are all frozen into evaluation mode.

    In training mode it would update its running statistics.
    """
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm):
            parameters = [*module.parameters()]
            if parameters and not any(one.requires_grad for one in parameters):
                module.eval()


def parameter_groups(net: nn.Module, config: OptimConfig) -> list[Group]:
    """Sorts the trainable parameters of `net` by their role into groups for the optimizer.

    Returns:
        One group per role that occurs, in this order: "matrix" (hidden weights), "table"
        (embeddings, first layers of patch embeddings, classifiers), "scalar" (all others). Each has
        `name` (the role), `kind` ("muon" or "adamw"), `params`, `lr` and `weight_decay`. With
        `layer_decay`, one per role and depth, named "matrix/3".
    """
    roles = parameter_roles(net)
    depths = parameter_depths(net)
    top = max(depths.values(), default=0)
    adamw = {"kind": "adamw", "lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
    matrix: Group = adamw
    if config.optimizer == "muon":
        matrix = {"kind": "muon", "lr": config.muon_lr or config.lr, "momentum": config.momentum}
    options: dict[str, Group] = {
        "matrix": {**matrix, "weight_decay": config.weight_decay},
        "table": {**adamw, "weight_decay": config.weight_decay},
        "scalar": {**adamw, "weight_decay": 0.0},
    }
    by_depth = config.layer_decay < 1
    members: dict[tuple[str, int], list[nn.Parameter]] = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            depth = depths[name] if by_depth else top
            members.setdefault((roles[name], depth), []).append(parameter)
    groups = []
    for role, choices in options.items():
        for depth in range(top + 1):
            if params := members.get((role, depth)):
                name = f"{role}/{depth}" if by_depth else role
                lr = choices["lr"] * config.layer_decay ** (top - depth)
                groups.append({"name": name, "params": params, **choices, "lr": lr})
    return groups


# optimizers ---------------------------------------------------------------------------------------


class MuonAdamW(Optimizer):
    """Muon for some groups and AdamW for the others, as one optimizer for Lightning.

    It only holds the groups and the state: a `Muon` and an `AdamW` work on the very same
    group dicts and state, so a schedule that sets `lr` here sets it there. The `kind` of a group is
    "muon" or "adamw".
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__(groups, {})

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self._link()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def _link(self) -> None:
        self.optimizers: list[Optimizer] = []
        for kind, make in OPTIMIZERS.items():
            if groups := [group for group in self.param_groups if group["kind"] == kind]:
                optimizer = make(groups)
                optimizer.state = self.state
                self.optimizers.append(optimizer)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def _adamw(groups: list[Group]) -> AdamW:
    # One kernel per group: for 4 million weights on two CPU cores 3.5 ms a step, 13 ms one by one,
    # 16 ms with foreach.
    return clippable(AdamW(groups, fused=True))


OPTIMIZERS: dict[str, Callable[[list[Group]], Optimizer]] = {
    "muon": Muon,
    "adamw": _adamw,
}
STATE_NAMES = {  # of a parameter, by kind of optimizer
    "muon": {"momentum_buffer"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
}


# schedules ----------------------------------------------------------------------------------------
# A schedule gives the learning rate of step t = 1 ... total as a fraction of the peak, after
# `warmup` steps of linear warm-up.


def _progress(t: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, (t - start) / max(1, end - start)))


def cosine(t: float, total: float, warmup: int, config: OptimConfig) -> float:
    """Half a cosine from 1 to `final_lr` (Loshchilov & Hutter 2017)."""
    fall = 0.5 * (1 + math.cos(math.pi * _progress(t, warmup, total)))
    return config.final_lr + (1 - config.final_lr) * fall


def linear(t: float, total: float, warmup: int, config: OptimConfig) -> float:
    """A straight line from 1 to `final_lr`."""
    return 1 - (1 - config.final_lr) * _progress(t, warmup, total)


def noam(t: float, total: float, warmup: int, config: OptimConfig) -> float:
    """d^-0.5 min(t^-0.5, t warmup^-1.5) of Vaswani (2017, eq. 3), divided by its peak at warmup."""
    return math.sqrt(max(1, warmup) / t)


def wsd(t: float, total: float, warmup: int, config: OptimConfig) -> float:
    """Warm-up, stable, decay (Hu 2024): 1, then 1 - sqrt down to `final_lr` (Hägele 2024)."""
    start = max(warmup, total - round(config.decay * total))
    return 1 - (1 - config.final_lr) * math.sqrt(_progress(t, start, total))


def constant(t: float, total: float, warmup: int, config: OptimConfig) -> float:
    return 1.0


SCHEDULES = {"cosine": cosine, "linear": linear, "noam": noam, "wsd": wsd, "constant": constant}
ENDLESS = ("noam", "constant")  # do not depend on the number of all steps


def lr_factor(t: int, total: float, config: OptimConfig) -> float:
    """Learning rate of optimizer step t = 1, ..., total as a fraction of the peak.

    After the last step it stays that of the last; `total` is infinity if training has no end.
    """
    warmup = int(config.warmup)
    if 0 < config.warmup < 1:
        warmup = int(config.warmup * total)
    if total == 1 >= warmup:
        return 1.0  # that of the last step may be 0
    if min(t, total) < warmup:
        return min(t, total) / warmup
    return SCHEDULES[config.schedule](min(t, total), total, warmup, config)


class StepSchedule(LambdaLR):
    """`lr_factor` as a scheduler that resumes at the saved step with the options given now."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        done = {name: state_dict[name] for name in ("last_epoch", "_step_count")}
        super().load_state_dict({**done, "lr_lambdas": [None for _ in self.lr_lambdas]})
        groups = self.optimizer.param_groups
        for group, factor, peak in zip(groups, self.lr_lambdas, self.base_lrs, strict=True):
            group["lr"] = peak * factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in groups]


# resume -------------------------------------------------------------------------------------------


def _check_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Raises `ValueError` if a saved tensor does not fit its parameter.

    Fused kernels write as far as the parameter's shape says.
    """
    for old, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        names = STATE_NAMES[own["kind"]]
        for number, parameter in zip(old["params"], own["params"], strict=True):
            state = saved["state"].get(number, {})
            where = f"the optimizer state of parameter {number}"
            fits = not state or state.keys() == names
            require(fits, f"{where} has {', '.join(state)}, not {', '.join(names)}")
            for name, value in state.items():
                like = parameter.new_zeros(()) if name == "step" else parameter
                check_tensor(value, like, f"{name} in {where}")
                dense = value.layout == torch.strided and (
                    value.is_contiguous() or value.stride() == like.stride()
                )
                fits = dense and bool(value.isfinite().all())
                require(fits, f"{name} in {where} is not dense, or not finite")


def _with_own_options(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state of an optimizer with the options (weight decay, ...) of this run."""
    old = _describe(saved["param_groups"])
    own = _describe(optimizer.param_groups)
    if old != own:
        raise UsageError(
            f"the checkpoint has optimizer groups {old}, not {own}: resume with the "
            "optimizer options of the run"
        )
    _check_state(optimizer, saved)
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    return {**saved, "param_groups": [{**a, "params": b["params"]} for a, b in groups]}


def _describe(groups: list[Group]) -> list[tuple[str, str, int]]:
    return [(group["name"], group["kind"], len(group["params"])) for group in groups]


def build(net: nn.Module, config: OptimConfig, total_steps: float) -> dict[str, Any]:
    """Builds optimizer and schedule, as `LightningModule.configure_optimizers` returns them.

    Args:
        net: The network, with its final parameters (on any device).
        config: The choices.
        total_steps: Optimizer steps of the whole run; infinity if it has no end.

    Raises `UsageError` for a `muon_lr` without Muon.
    """
    needs_end = config.schedule not in ENDLESS or 0 < config.warmup < 1
    if total_steps < 1 or (needs_end and total_steps == math.inf):
        raise UnknownLength(
            f"the schedule {config.schedule} with warmup {config.warmup} needs the number of "
            "steps: set --trainer.max_epochs or --trainer.max_steps, or, with noam or constant, a "
            "warmup of 1 or more steps"
        )
    if config.muon_lr is not None and config.optimizer != "muon":
        raise UsageError(
            f"--model.optimizer.muon_lr is {config.muon_lr}, but the optimizer is "
            f"{config.optimizer}: leave it out (null), or give --model.optimizer.optimizer muon"
        )
    groups = parameter_groups(net, config)
    optimizer = MuonAdamW(groups) if config.optimizer == "muon" else _adamw(groups)
    optimizer.register_load_state_dict_pre_hook(_with_own_options)
    scheduler = StepSchedule(optimizer, lambda done: lr_factor(done + 1, total_steps, config))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
