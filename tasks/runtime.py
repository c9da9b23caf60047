"""Settings of the process that must be made before torch allocates."""

import os


def tune_allocator() -> None:
    """Placeholder until measured: transparent huge pages for tensors."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
