"""Stopping a run whose loss or weights became NaN or infinite."""

import torch
from torch import Tensor, nn

from tasks.errors import RunError

EVERY = 50  # steps after which a GPU is asked: each time, the CPU waits for it


class LossCheck(nn.Module):
    """Remembers the first optimizer step whose loss is not finite, on the device of the loss."""

    first_bad_step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first_bad_step", torch.tensor(-1), persistent=False)

    def add(self, loss: Tensor, step: int) -> None:
        """Looks at the loss () of an optimizer step, from 1; raises what `check` raises."""
        is_bad = ~torch.isfinite(loss.detach()) & (self.first_bad_step < 0)
        self.first_bad_step.masked_fill_(is_bad, step)
        if loss.device.type == "cpu" or step % EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raises `RunError` if the loss became NaN or infinite, with the step."""
        step = int(self.first_bad_step)
        if step >= 0:
            raise RunError(
                f"the loss became NaN or infinite at step {step}: try a lower "
                "--model.optimizer.lr or gradient_clip; earlier checkpoints are kept"
            )


def check_weights(net: nn.Module, step: int) -> None:
    """Raises `RunError` if a weight is NaN or infinite."""
    if not all(torch.isfinite(parameter).all() for parameter in net.parameters()):
        raise RunError(
            f"the weights became NaN or infinite by step {step}: try a lower "
            "--model.optimizer.lr; checkpoints before it are kept"
        )
