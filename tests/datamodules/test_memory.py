"""A corpus of 1 GB is prepared and read in little memory, and so is a smaller one with the default tokenizer."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from string import ascii_lowercase

import pytest

ROOT = Path(__file__).parents[2]
SIZES = {"character": 10**9, "bpe": 3 * 10**8}  # bytes
MOST = 500  # MB

# What the process holds after its imports is torch's and Lightning's; the most that is resident from then on is asked
# of the kernel, pages of mapped files among it: `clear_refs` begins the count anew.
READ = """
import json, sys, time
from pathlib import Path
import datamodules.corpus, pyarrow, tokenizers, torch
from datamodules.corpus import CorpusData, CorpusOptions, TokenizerConfig

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1000

def corpus(packing):
    options = CorpusOptions(val_fraction=0.01, blank_lines=True)
    config = {"character": ("character", 200, 1, False), "bpe": ("bpe", 4096, 2, False)}[sys.argv[2]]
    return CorpusData("files", sys.argv[1], packing, 12, 256, options, TokenizerConfig(*config))

torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")
before, seconds, tokens, peaks = resident("VmRSS"), [time.time()], 0, {}
for packing in ("windows", "documents"):
    data = corpus(packing)
    data.setup("fit")
    seconds.append(time.time())
    peaks[f"prepared {packing}"] = resident("VmHWM") - before
    for number, batch in enumerate(data.train_dataloader()):
        tokens += int((batch["targets"] != -100).sum())
        if number == 20_000:
            break
    counted = sum(int(batch["bytes"].sum()) for batch in data.val_dataloader())
    seconds.append(time.time())
    peaks[f"read {packing}"] = resident("VmHWM") - before
text = sum(len(piece.text.encode()) for piece in data.source.split("val"))
steps = [round(b - a) for a, b in zip(seconds, seconds[1:])]
print(json.dumps({"before": before, "peaks": peaks, "tokens": tokens, "counted": counted, "text": text,
                  "train": len(data.file("train").tokens), "seconds": steps}))
"""


@pytest.fixture(params=SIZES)
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A text of documents of one or two thousand characters, and the kind of tokenizer for it. Pieces of words are
    learned from 50 million characters, in which, as in English, some words come often and 300,000 once or twice.
    """
    draw, size = Random(0), SIZES[request.param]
    blocks, rare = (60, 0.03) if request.param == "bpe" else (1, 0.0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(2000)]
    texts = []
    for _ in range(blocks):
        documents = [draw.choices(words, k=draw.randint(180, 360)) for _ in range(700)]
        for document in documents:
            for place in draw.sample(range(len(document)), int(rare * len(document))):
                document[place] = "".join(draw.choices(ascii_lowercase, k=8))
        texts.append(("\n\n".join(map(" ".join, documents)) + "\n\n").encode())
    with open(tmp_path / "corpus.txt", "wb") as file:
        for number in range(-(-size // len(texts[0]))):
            file.write(texts[number % blocks])
    yield tmp_path / "corpus.txt", request.param
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory that is resident")
def test_a_corpus_larger_than_its_memory(corpus: tuple[Path, str], tmp_path: Path) -> None:
    path, kind = corpus
    environment = {**os.environ, "TESSERA_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", READ, str(path), kind]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    print(found)
    assert found["counted"] == found["text"] > 0.0099 * SIZES[kind]
    assert (
        found["train"] > (0.98 if kind == "character" else 0.1) * SIZES[kind]
        and found["tokens"] > 10e6
    )
    assert max(found["peaks"].values()) < MOST
