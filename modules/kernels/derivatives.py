"""Which derivatives are being computed."""

import torch
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether derivatives are computed in the forward pass, as by `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether a transform of `torch.func`, such as `vmap`, is active."""
    return torch._C._are_functorch_transforms_active()


def is_backward_only() -> bool:
    """Whether derivatives are those of `backward`: no forward mode, no `torch.func` or `vmap`."""
    return not (in_forward_mode() or in_transform())
