"""`python -m tests.helpers.corpus_memory FILE KIND`: prepares and reads a corpus, and prints how
much memory that takes, as JSON.

What the process holds after its imports is torch's and Lightning's. The most that is resident from
then on is asked of the kernel, pages of mapped files among it; `clear_refs` begins the count anew.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow  # noqa: F401  counted as an import
import tokenizers  # noqa: F401
import torch

from datamodules.corpus import CorpusData
from datamodules.sources import CorpusOptions
from datamodules.tokenizers import TokenizerConfig

TOKENIZERS = {
    "character": TokenizerConfig("character", 200, 1, False),
    "bpe": TokenizerConfig("bpe", 4096, 2, False),
}
STEPS = 20_000  # batches of training at most


def resident(name: str) -> float:
    """A line of the kernel's status of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1000


def measure(path: str, kind: str) -> dict[str, Any]:
    """Peaks of memory (MB), counts of tokens and bytes, and how many seconds each part took."""
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    found: dict[str, Any] = {"before": before, "peaks": {}, "seconds": {}, "tokens": 0}
    options = CorpusOptions(val_fraction=0.01, blank_lines=True)
    for packing in ("windows", "documents"):
        start = time.time()
        data = CorpusData(None, path, packing, 12, 256, options, TOKENIZERS[kind])
        data.setup("fit")
        found["peaks"][f"prepared {packing}"] = resident("VmHWM") - before
        for number, batch in enumerate(data.train_dataloader()):
            found["tokens"] += int((batch["targets"] != -100).sum())
            if number == STEPS:
                break
        found["counted"] = sum(int(batch["bytes"].sum()) for batch in data.val_dataloader())
        found["peaks"][f"read {packing}"] = resident("VmHWM") - before
        found["seconds"][packing] = round(time.time() - start)
    found["text"] = sum(len(piece.text.encode()) for piece in data.source.split("val"))
    found["train"] = len(data.token_file("train").tokens)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
