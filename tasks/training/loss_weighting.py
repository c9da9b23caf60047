"""The loss of an optimizer step: the mean over all targets of its micro-batches on all ranks."""

from collections.abc import Mapping

import torch
from pytorch_lightning import Trainer
from torch import Tensor

SCALE = 1024.0  # divides the weights of losses in a backward pass; a power of two is exact


class LossWeighting:
    """Gives each target of an optimizer step the same weight, in any micro-batch and rank.

    Lightning averages the losses of micro-batches, and DDP the gradients of ranks, as if all had as
    many targets. Here a loss is multiplied by its number of targets before the backward pass, and
    the step's gradient divided by their sum over all ranks. With one micro-batch on one rank
    nothing is changed, bit for bit.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (1 + K,): targets, and K means, each times its targets
        self.past_sums: Tensor | None = None  # (2,): targets and losses of steps since `restart`
        self.names: list[str] = []

    def add(
        self,
        trainer: Trainer,
        loss: Tensor,
        count: Tensor | int,
        extra_metrics: Mapping[str, Tensor],
    ) -> Tensor:
        """Adds a micro-batch, and returns the loss () to call `backward` on.

        Args:
            trainer: Of the run.
            loss: Mean over the targets, ().
            count: Number of targets.
            extra_metrics: Other means over the targets, by name, () each.
        """
        count = torch.as_tensor(count, dtype=torch.float32)
        count = count.to(loss.device, non_blocking=True)  # does not wait for a GPU
        means = {"loss": loss.detach().float(), **extra_metrics}
        sums = torch.stack([count, *(mean * count for mean in means.values())])  # (1 + K,)
        self.names = list(means)
        self.sums = sums if self.sums is None else self.sums + sums
        return loss if self._is_single(trainer) else loss * (count / SCALE)

    def finish(self, trainer: Trainer, gradients: list[Tensor]) -> dict[str, Tensor]:
        """Scales the gradients to those of the mean over all targets since the last call, in place.

        Args:
            trainer: Of the run.
            gradients: Of all parameters, after Lightning's and the strategy's averaging.

        Returns:
            The means over the same targets: "loss" and the extra metrics by name, () each.
        """
        assert self.sums is not None
        sums = self.sums
        self.sums = None
        if not self._is_single(trainer):
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
            # Lightning and the strategy have divided by the numbers of micro-batches and ranks.
            divided = SCALE * trainer.accumulate_grad_batches * trainer.world_size
            for gradient in gradients:
                gradient.mul_(divided / sums[0])
        self.past_sums = sums[:2] + (0 if self.past_sums is None else self.past_sums)
        return dict(zip(self.names, sums[1:] / sums[0], strict=True))

    def restart(self) -> None:
        """Begins a new mean loss."""
        self.past_sums = None

    def mean_loss(self) -> float | None:
        """Mean over the targets of the steps since `restart`; None without a step."""
        return None if self.past_sums is None else float(self.past_sums[1] / self.past_sums[0])

    @staticmethod
    def _is_single(trainer: Trainer) -> bool:
        return trainer.world_size == 1 and trainer.accumulate_grad_batches == 1
