"""Which derivatives are being computed."""

import torch
from torch.autograd import forward_ad


def is_backward_only() -> bool:
    """Whether derivatives are those of `backward`: no forward mode, no `torch.func` or `vmap`."""
    in_forward_mode = forward_ad._current_level >= 0
    return not (in_forward_mode or torch._C._are_functorch_transforms_active())
