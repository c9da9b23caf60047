"""Weights, gradients and optimizer states in parts, one on each GPU: `--trainer.strategy fsdp`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from modules.transformer import Block
from tasks.checkpoints.reading import META, Checkpoint, by_index, by_name, is_sharded, load_tensors
from tasks.checkpoints.sharded import causes, load_parts
from tasks.checkpoints.writing import clear
from tasks.errors import RunError, UsageError


class Sharded(ModelParallelStrategy):
    """Fully sharded data parallelism (Rajbhandari 2020) of each block and of what is around them, by torch's FSDP2.

    A block's weights are gathered for its forward and its backward pass alone. Validation and test gather all of them
    once, since decoding takes as many steps as a process's texts need. Parameters keep their names and shapes, so one
    process can continue such a run, and this strategy the run of one process.

    Args:
        save_distributed_checkpoint: Write a checkpoint as a folder with a part from each process, for networks that the
            first process cannot hold; `consolidate` makes a file of it. Otherwise it is gathered into one file.
    """

    def __init__(self, save_distributed_checkpoint: bool = False) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
        )

    def setup_environment(self) -> None:
        """Connect all processes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Shard the network, once.

        Raises:
            UsageError: something that needs all weights in one process.
        """
        task: Any = self.lightning_module
        self.refuse(trainer, task)
        if not isinstance(task.net, FSDPModule):
            shard(task.net, self.device_mesh["data_parallel"])
        super().setup(trainer)

    def refuse(self, trainer: Trainer, task: Any) -> None:
        """Refuse what does not work with parts of weights, and say what to give."""
        wrong = {
            "--model.ema null": getattr(task, "ema", None) is not None,
            "--model.average null": getattr(task, "average", None) is not None,
            "--model.compile false": task.compile_net,
        }
        if any(wrong.values()) and trainer.state.fn == TrainerFn.FITTING:
            given = " ".join(option for option, found in wrong.items() if found)
            raise UsageError(
                f"weights in parts (--trainer.strategy fsdp) are not averaged nor compiled: give {given}"
            )

    # Whole and in parts ---------------------------------------------------------------------------------------------

    def gather(self, whole: bool) -> None:
        """Hold all weights in every process from now on, or go back to parts."""
        net = getattr(self.lightning_module, "net")  # noqa: B009  (of a Task)
        for part in [module for module in net.modules() if isinstance(module, FSDPModule)]:
            if part is not net:  # which keeps its own until the backward pass anyway
                part.set_reshard_after_forward(not whole, recurse=False)
            if whole:
                part.unshard()
            else:
                part.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights in every process for a while, in a training that goes on with parts."""
        self.gather(True)
        yield
        self.gather(False)

    def on_validation_start(self) -> None:
        """Gather the weights."""
        self.gather(True)

    def on_validation_end(self) -> None:
        """Train on with parts."""
        self.gather(False)

    def on_test_start(self) -> None:
        """Gather the weights, and keep them for what the first process alone does after the test."""
        self.gather(True)

    def on_train_end(self) -> None:
        """Gather the weights, for what the first process alone does where there is no test."""
        self.gather(True)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state: with this process's parts by name, or whole as torch's optimizers have it (rank 0)."""
        assert self.model is not None
        parts = self._save_distributed_checkpoint
        options = StateDictOptions(full_state_dict=not parts, cpu_offload=True)
        state = get_optimizer_state_dict(
            self.model, getattr(optimizer, "_optimizer", optimizer), options=options
        )
        return state if parts else by_index(state)

    def save_checkpoint(
        self, checkpoint: Checkpoint, filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; a folder of parts takes its name when all processes have written theirs."""
        target, files = Path(self.broadcast(filepath)), self.checkpoint_io
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                files.save_checkpoint(checkpoint, target)
            return
        partial = target.with_name(f".{target.name}.parts.tmp")
        if self.is_global_zero:
            clear(target)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, partial, storage_options)
            self.barrier()
            if self.is_global_zero:
                files.rename_sharded(partial, target)  # type: ignore[attr-defined]  # of ours
        except (OSError, CheckpointException) as error:
            if self.is_global_zero:
                clear(target)
            reason = str(causes(error)[0]).replace(partial.name, target.name)
            raise RunError(f"checkpoint {target} could not be written: {reason}") from error

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Checkpoint:
        """Load a checkpoint into network and optimizers, whichever strategy wrote it."""
        assert isinstance(self.model, nn.Module)
        if is_sharded(Path(checkpoint_path)):
            return self.load_parts(Path(checkpoint_path))
        checkpoint: Checkpoint = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=True
        )
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=options)
        for optimizer, saved in zip(
            self.optimizers, checkpoint["optimizer_states"], strict=False
        ):  # none in a test
            groups: Any = get_optimizer_state_dict(self.model, optimizer)["param_groups"]
            state = by_name(saved, [name for group in groups for name in group["params"]])
            set_optimizer_state_dict(self.model, optimizer, state, options=options)
        return checkpoint

    def load_parts(self, folder: Path) -> Checkpoint:
        """The same from parts, of which this process reads its own."""
        assert isinstance(self.model, nn.Module)
        states = {
            f"optimizer_{i}": get_optimizer_state_dict(self.model, one)
            for i, one in enumerate(self.optimizers)
        }
        weights = get_model_state_dict(self.model)
        load_parts(folder, {"state_dict": weights, **states})
        set_model_state_dict(self.model, weights)
        for optimizer, state in zip(self.optimizers, states.values(), strict=True):
            set_optimizer_state_dict(self.model, optimizer, state)
        return load_tensors(folder / META, f"checkpoint '{folder}'")


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Part each block and what is around them among the processes of `mesh`; gradients are summed in 32 bits."""
    for part in [module for module in net.modules() if isinstance(module, Block)] + [net]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    if hasattr(
        net, "hidden"
    ):  # what a step calls in the place of `forward` gathers the same weights
        register_fsdp_forward_method(net, "hidden")
