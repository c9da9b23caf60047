"""Files of tokens: what the tokenizer gave, written once, and never used if incomplete."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.tokens import token_file
from datamodules.tokens.token_cache import tokenised
from datamodules.tokens.token_file import TokenFile
from datamodules.utils.cache import CHUNK, cache_folder
from datamodules.utils.errors import DataError
from tests.helpers.corpora import corpus

ROOT = Path(__file__).parents[2]
# Chunks of which the last is not full, and texts without a token.
TEXTS = [("word " * (i % 23) + f"number {i}") if i % 7 else "" for i in range(CHUNK + 300)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, TokenizerConfig(vocabulary=300))


@pytest.fixture(scope="module")
def large_tokenizer() -> Tokenizer:
    """More words than 16 bits can number."""
    content = json.loads(Tokenizer.train(["a a"], TokenizerConfig("word")).to_json())
    content["model"]["vocab"] |= {f"w{i}": 100 + i for i in range(70_000)}
    return Tokenizer.from_json(json.dumps(content))


def test_the_file_holds_what_the_tokenizer_gave(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_batch(TEXTS)
    for _ in range(2):  # written, then read
        file = tokenised(TEXTS, tokenizer)
        assert [file[i].tolist() for i in range(len(file))] == expected
        assert file.lengths.dtype == torch.int64
        assert file.lengths.tolist() == [len(ids) for ids in expected]
        assert file.offsets.tolist() == [0, *np.cumsum(file.lengths).tolist()]
        assert pickle.loads(pickle.dumps(file))[5].tolist() == expected[5]
    assert file[3].dtype == np.uint16
    assert not file[3].flags.owndata and not file[3].flags.writeable  # a view of the file
    for i in (-1, len(TEXTS)):
        with pytest.raises(IndexError):
            file[i]
    assert len(tokenised([], tokenizer)) == 0


def test_large_vocabularies_take_32_bits(large_tokenizer: Tokenizer) -> None:
    file = tokenised(["w69999 w0", "w65435 w65436"], large_tokenizer)
    assert file[0].dtype == np.uint32
    assert [file[0].tolist(), file[1].tolist()] == [[70_099, 100], [65_535, 65_536]]


def test_it_is_written_once_for_the_same_texts_and_tokenizer(
    tokenizer: Tokenizer, cache: Path
) -> None:
    column = pa.chunked_array([TEXTS[:500], TEXTS[500:]])
    written = set()
    for texts in (TEXTS, TEXTS, column, column.cast("large_string")):
        written.add(tokenised(texts, tokenizer).path.stat().st_mtime_ns)
    assert len(written) == len(list(cache.iterdir())) == 1
    tokenised(TEXTS, Tokenizer.train(TEXTS, TokenizerConfig("word")))
    tokenised([*TEXTS[:-1], TEXTS[-1][:-1] + "x"], tokenizer)
    assert len(list(cache.iterdir())) == 3


def test_files_that_are_not_complete_are_written_again(tokenizer: Tokenizer) -> None:
    file = tokenised(TEXTS, tokenizer)
    path = file.path
    intact = path.read_bytes()
    lengths = (0, 1, 7, len(intact) // 2, len(intact) - 8)
    damaged = [*(intact[:length] for length in lengths), intact + bytes(8)]
    for content in (*damaged, b"x" + intact[1:], intact[:20] + b"\1" + intact[21:]):
        path.unlink()  # an open file keeps its content
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name):
            TokenFile(path)
        assert tokenised(TEXTS, tokenizer)[1].tolist() == file[1].tolist()
        assert path.read_bytes() == intact


def test_large_files_are_read_alike(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tokenised(TEXTS, tokenizer)
    places = np.arange(0, len(file.tokens) - 9, 7)[:, None] + np.arange(9)
    expected = file.gather(places, len(places))
    monkeypatch.setattr(token_file, "LARGE", 10_000)
    large = TokenFile(file.path)
    for _ in range(3):
        assert (large.gather(places, 1) == expected).all()


# Preparation that ends early, in a process of its own.


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """A text of 400 kB."""
    (tmp_path / "long.txt").write_text("a line of some words\n" * 20_000)
    return tmp_path / "long.txt"


def prepare(how: str, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.helpers.prepare_corpus", how, str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_no_file_that_seems_complete(
    long_text: Path, cache: Path
) -> None:
    with prepare("kill", long_text) as process:
        assert process.stdout and process.stdout.readline() == "writing\n"
        assert any(path.stat().st_size > 100_000 for path in cache.iterdir())
        os.kill(process.pid, signal.SIGKILL)
    assert not list(cache.glob("*.tokens"))
    (leftover,) = cache.iterdir()
    os.utime(leftover, (0, 0))  # of long ago
    data = corpus(long_text)
    data.setup("fit")
    assert not leftover.exists()
    assert {path.suffix for path in cache.iterdir()} == {".tokens"}
    text = long_text.read_text()
    tokens = data.token_file("train").tokens.tolist()
    assert data.tokenizer.decode(tokens) == text[: int(len(text) * 0.9)]


def test_a_full_disk_is_reported_and_nothing_is_left(long_text: Path, cache: Path) -> None:
    with prepare("full", long_text) as process:
        assert process.stdout
        message = process.stdout.read()
    assert "File too large" in message and "TESSERA_CACHE" in message
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="TESSERA_CACHE"):
        cache_folder("tokens")
