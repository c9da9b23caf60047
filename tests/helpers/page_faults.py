"""Prints the page faults of twenty steps: `python -m tests.helpers.page_faults plain|tuned`."""

import resource
import sys

from tasks.training.allocator import tune_allocator

assert "torch" not in sys.modules
if sys.argv[1] == "tuned":
    tune_allocator()

import torch  # noqa: E402


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


start = 0
for step in range(23):
    if step == 3:
        start = faults()
    torch.ones(192, 2**16).mul(2.0).add_(1.0)  # 48 MiB twice, more than glibc ever keeps by itself
print(faults() - start)
