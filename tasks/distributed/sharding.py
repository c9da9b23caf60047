"""Weights, gradients and optimizer states sharded over GPUs: `--trainer.strategy fsdp`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from modules.transformer import Block
from tasks.checkpoints.reading import Checkpoint
from tasks.errors import UsageError


class Sharded(ModelParallelStrategy):
    """Fully sharded data parallelism (Rajbhandari 2020) by torch's FSDP2, a shard per block.

    A block's weights are gathered for its forward and its backward pass. Validation and test gather
    all of them once, since the number of decoding steps differs between processes. Parameters keep
    their names and shapes, and a checkpoint is one file, which one process can continue from.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup(self, trainer: Trainer) -> None:
        """Shard the network, once; refuse options that need all weights in one process."""
        task: Any = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            check_sharding_options(task)
        if not isinstance(task.net, FSDPModule):
            shard(task.net, init_device_mesh(self.root_device.type, (self.world_size,)))
        super().setup(trainer)

    # Whole and sharded ----------------------------------------------------------------------------

    def gather(self) -> None:
        """Hold all weights in every process from now on."""
        for module in self._sharded_modules():
            if module is not self._net:  # which keeps its own until the backward pass anyway
                module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def reshard(self) -> None:
        """Hold shards again."""
        for module in self._sharded_modules():
            if module is not self._net:
                module.set_reshard_after_forward(True, recurse=False)
            module.reshard()

    @property
    def _net(self) -> nn.Module:
        task: Any = self.lightning_module
        return task.net

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self._net.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights in every process for a while, in the middle of training."""
        self.gather()
        yield
        self.reshard()

    # Also after training and test, for what the first process then does alone.
    on_validation_start = on_test_start = on_train_end = gather
    on_validation_end = reshard

    # Checkpoints ----------------------------------------------------------------------------------
    # Lightning's own would number the parameters in the order of the network; torch's optimizers
    # number them in that of their groups.

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state of an optimizer on rank 0, as torch's optimizers save it."""
        assert isinstance(self.model, nn.Module)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # without Lightning's wrapper
        return by_index(get_optimizer_state_dict(self.model, optimizer, options=options))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Checkpoint:
        """Load a checkpoint of any strategy into network and optimizers."""
        assert isinstance(self.model, nn.Module)
        checkpoint: Checkpoint = torch.load(
            Path(checkpoint_path), map_location="cpu", mmap=True, weights_only=True
        )
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=options)
        states = checkpoint["optimizer_states"]
        for optimizer, saved in zip(self.optimizers, states, strict=False):  # none in a test
            groups: Any = get_optimizer_state_dict(self.model, optimizer)["param_groups"]
            state = by_name(saved, [name for group in groups for name in group["params"]])
            set_optimizer_state_dict(self.model, optimizer, state, options=options)
        return checkpoint


def check_sharding_options(task: Any) -> None:
    """Raise `UsageError` for options that do not work with sharded weights."""
    needed = {
        "--model.ema null": getattr(task, "ema", None) is not None,
        "--model.average null": getattr(task, "average", None) is not None,
        "--model.compile false": task.compile_net,
    }
    if any(needed.values()):
        options = " ".join(option for option, found in needed.items() if found)
        raise UsageError(
            f"--trainer.strategy fsdp cannot average or compile weights: give {options}"
        )


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each block and the rest of the network over `mesh`; gradients are summed in 32 bits."""
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    for part in [*blocks, net]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    if hasattr(net, "hidden"):  # a step calls it in place of `forward`; it gathers the same weights
        register_fsdp_forward_method(net, "hidden")


def by_index(state: Checkpoint) -> Checkpoint:
    """An optimizer's state with parameters by index instead of by name; an empty one stays so."""
    groups = state.get("param_groups", ())
    names = [name for group in groups for name in group["params"]]
    return _renamed(state, {name: index for index, name in enumerate(names)})


def by_name(state: Checkpoint, names: list[str]) -> Checkpoint:
    """The reverse of `by_index`: `names` of the parameters of all groups, in their order."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    return _renamed(state, dict(zip(indices, names, strict=True)))


def _renamed(state: Checkpoint, new: dict[Any, Any]) -> Checkpoint:
    return {
        "state": {new[old]: values for old, values in state.get("state", {}).items()},
        "param_groups": [
            group | {"params": [new[old] for old in group["params"]]}
            for group in state.get("param_groups", ())
        ],
    }
