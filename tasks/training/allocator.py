"""How this process allocates memory. Imports nothing heavy: it runs before torch is loaded."""

import ctypes
import platform

# As in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1 << 30
OLDER_LIMIT = 1 << 25  # the most that older versions of glibc accept as M_MMAP_THRESHOLD


def tune_allocator() -> bool:
    """Makes glibc keep up to 1 GiB of freed memory instead of returning it after each step.

    A step allocates and frees the same large tensors every time; fresh pages from the kernel must
    be zeroed and mapped. `python -m tests.benchmarks.vit_step` measures what that costs. Call it
    before the first large tensor.

    Returns:
        Whether anything was changed: True on Linux with glibc, False elsewhere.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mapped = mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(M_MMAP_THRESHOLD, OLDER_LIMIT)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
