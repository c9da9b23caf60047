"""Seeds that follow from the run's own, and from where training stands."""

import os
import zlib


def run_seed() -> int:
    """The run's seed, as `--seed_everything` set it; 0 outside of a run."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def position_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """A seed for one rank's batch; nearby positions get unrelated ones."""
    return zlib.crc32(f"{seed}/{epoch}/{batch}/{rank}".encode())
