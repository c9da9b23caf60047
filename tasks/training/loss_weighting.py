"""What an optimizer step is the mean over: all targets of its micro-batches, on all ranks."""

from collections.abc import Mapping

import torch
from pytorch_lightning import Trainer
from torch import Tensor

UNIT = 1024.0  # targets that weigh 1 in a gradient on its way: a power of two, which rounds nothing off


class LossWeighting:
    """Makes each target count alike in an optimizer step, however micro-batches and ranks share them out.

    Lightning takes the mean of the losses of micro-batches, and DDP that of the gradients of ranks, as if all stood
    for as many targets. Here a loss is weighted by its number of targets before it goes backward, and the step's
    gradient divided by their sum over all ranks. With one micro-batch on one rank nothing is changed, bit for bit.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (1 + K,): targets, and K figures, each times its targets
        self.names: list[str] = []

    def add(
        self, trainer: Trainer, loss: Tensor, count: Tensor | int, figures: Mapping[str, Tensor]
    ) -> Tensor:
        """Take in a micro-batch.

        Args:
            trainer: of the run.
            loss: mean over the targets, ().
            count: number of targets.
            figures: further means over the targets, by name, () each.

        Returns:
            What to go backward from, ().
        """
        count = (
            count.float()
            if isinstance(count, Tensor)
            else torch.full((), float(count), device=loss.device)
        )
        means = {"loss": loss.detach().float(), **figures}
        sums = torch.stack([count, *(mean * count for mean in means.values())])  # (1 + K,)
        self.names, self.sums = list(means), sums if self.sums is None else self.sums + sums
        return loss if self._alone(trainer) else loss * (count / UNIT)

    def finish(self, trainer: Trainer, gradients: list[Tensor]) -> dict[str, Tensor]:
        """Make the gradients those of the mean over all targets since the last call, in place.

        Args:
            trainer: of the run.
            gradients: of all parameters, as Lightning and the strategy left them.

        Returns:
            The means over the same targets: "loss", and the figures by name, () each.
        """
        assert self.sums is not None
        sums, self.sums = self.sums, None
        if not self._alone(trainer):
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
            taken = (
                UNIT * trainer.accumulate_grad_batches * trainer.world_size
            )  # what the means so far divided by
            torch._foreach_mul_(gradients, taken / sums[0])
        return dict(zip(self.names, sums[1:] / sums[0], strict=True))

    @staticmethod
    def _alone(trainer: Trainer) -> bool:
        return trainer.world_size == 1 and trainer.accumulate_grad_batches == 1
