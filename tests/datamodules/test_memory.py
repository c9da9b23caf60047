"""A corpus of 1 GB is prepared and read in little memory, and so is a smaller one with the default
tokenizer."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from string import ascii_lowercase

import pytest

ROOT = Path(__file__).parents[2]
SIZES = {"character": 10**9, "bpe": 3 * 10**8}  # bytes
MAX_MEMORY = 500  # MB


@pytest.fixture(params=SIZES)
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A text of documents of one or two thousand characters, and the kind of tokenizer for it.

    Pieces of words are learned from 50 million characters, in which, as in English, some words come
    often and 300,000 once or twice.
    """
    rng = Random(0)
    size = SIZES[request.param]
    blocks, rare = (60, 0.03) if request.param == "bpe" else (1, 0.0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(2000)]
    texts = []
    for _ in range(blocks):
        documents = [rng.choices(words, k=rng.randint(180, 360)) for _ in range(700)]
        for document in documents:
            for position in rng.sample(range(len(document)), int(rare * len(document))):
                document[position] = "".join(rng.choices(ascii_lowercase, k=8))
        texts.append(("\n\n".join(map(" ".join, documents)) + "\n\n").encode())
    path = tmp_path / "corpus.txt"
    with open(path, "wb") as file:
        for number in range(-(-size // len(texts[0]))):
            file.write(texts[number % blocks])
    yield path, request.param
    for file_path in [path, *(tmp_path / "cache").rglob("*.*")]:
        file_path.unlink()


@pytest.mark.slow
@pytest.mark.exhaustive_except("bpe")
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory that is resident")
def test_a_corpus_larger_than_its_memory(corpus: tuple[Path, str], tmp_path: Path) -> None:
    path, kind = corpus
    environment = {**os.environ, "TESSERA_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tests.helpers.corpus_memory", str(path), kind]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert found["counted"] == found["text"] > 0.0099 * SIZES[kind]
    assert found["train"] > (0.98 if kind == "character" else 0.1) * SIZES[kind]
    assert found["tokens"] > 10e6
    assert max(found["peaks"].values()) < MAX_MEMORY, found
