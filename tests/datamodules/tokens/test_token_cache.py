"""Files of tokens: what the tokenizer gave, written once, and never used if incomplete."""

import json
import multiprocessing
import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.tokens import token_cache, token_file
from datamodules.tokens.token_cache import tokenised
from datamodules.tokens.token_file import TokenFile
from datamodules.utils.cache import CHUNK, cache_folder
from datamodules.utils.errors import DataError
from tests.helpers.corpora import corpus

# Chunks of which the last is not full, and texts without a token.
TEXTS = [("word " * (i % 23) + f"number {i}") if i % 7 else "" for i in range(CHUNK + 300)]


@pytest.fixture
def tokens(cache: Path) -> Path:
    return cache / "tokens"


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
    tokenizer: Tokenizer, tokens: Path
) -> None:
    column = pa.chunked_array([TEXTS[:500], TEXTS[500:]])
    written = set()
    for texts in (TEXTS, TEXTS, column, column.cast("large_string")):
        written.add(tokenised(texts, tokenizer).path.stat().st_mtime_ns)
    assert len(written) == len(list(tokens.iterdir())) == 1
    tokenised(TEXTS, Tokenizer.train(TEXTS, TokenizerConfig("word")))
    tokenised([*TEXTS[:-1], TEXTS[-1][:-1] + "x"], tokenizer)
    assert len(list(tokens.iterdir())) == 3


def assert_written_again(tokenizer: Tokenizer, intact: bytes) -> None:
    (path,) = Path(os.environ["TESSERA_CACHE"], "tokens").iterdir()
    with pytest.raises(DataError, match=path.name):
        TokenFile(path)
    assert tokenised(TEXTS, tokenizer)[1].tolist() == tokenizer.encode_batch(TEXTS[1:2])[0]
    assert path.read_bytes() == intact


@pytest.mark.parametrize("size", [0, 1, 7, 0.5, -8, 8])
def test_files_of_another_size_are_written_again(tokenizer: Tokenizer, size: float) -> None:
    path = tokenised(TEXTS, tokenizer).path
    intact = path.read_bytes()
    path.unlink()  # an open file keeps its content
    length = int(size * len(intact)) if size == 0.5 else int(size) % len(intact)
    path.write_bytes(intact + bytes(8) if size == 8 else intact[:length])
    assert_written_again(tokenizer, intact)


@pytest.mark.parametrize("offset", [0, 20, 30, 38, 45, 50, 64, 0.3, 0.8, -1])
def test_changed_files_are_written_again(tokenizer: Tokenizer, offset: float) -> None:
    """Whether the change is in the header, the tokens or the table of documents."""
    path = tokenised(TEXTS, tokenizer).path
    intact = path.read_bytes()
    path.unlink()
    content = bytearray(intact)
    content[int(offset * len(intact)) if 0 < offset < 1 else int(offset)] ^= 4
    path.write_bytes(content)
    assert_written_again(tokenizer, intact)


def test_large_files_are_read_alike(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tokenised(TEXTS, tokenizer)
    positions = np.arange(0, len(file.tokens) - 9, 7)[:, None] + np.arange(9)
    expected = file.gather(positions, len(positions))
    monkeypatch.setattr(token_file, "LARGE", 10_000)
    large = TokenFile(file.path)
    for _ in range(3):
        assert (large.gather(positions, 1) == expected).all()


# Preparation that ends early, in a process of its own.


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """A text of 400 kB."""
    (tmp_path / "long.txt").write_text("a line of some words\n" * 20_000)
    return tmp_path / "long.txt"


def prepare(path: Path, how: str, errors: Any) -> None:
    """Prepares a corpus until it is killed, or where no file may be large."""
    token_cache.CHARACTERS_PER_CORE = 1  # a piece at a time
    data = corpus(path)
    assert data.tokenizer.vocab_size  # trained before what follows
    encode = Tokenizer.encode_concatenated
    pieces: list[int] = []

    def counted(*args: Any) -> Any:
        pieces.append(1)
        if how == "kill" and len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*args)

    Tokenizer.encode_concatenated = counted
    if how == "full":  # as a disk without more room than that
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        data.setup("fit")
    except DataError as error:
        errors.send(str(error))


def run_prepare(path: Path, how: str) -> tuple[int | None, str]:
    """The exit code of a process that prepares a corpus, and its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=prepare, args=(path, how, sender))
    process.start()
    process.join()
    return process.exitcode, receiver.recv() if receiver.poll() else ""


def test_a_killed_preparation_leaves_no_file_that_seems_complete(
    long_text: Path, tokens: Path
) -> None:
    code, _ = run_prepare(long_text, "kill")
    assert code == -signal.SIGKILL
    (leftover,) = tokens.iterdir()
    assert leftover.suffix != ".tokens" and leftover.stat().st_size > 100_000
    os.utime(leftover, (0, 0))  # of long ago
    data = corpus(long_text)
    data.setup("fit")
    assert not leftover.exists()
    assert {path.suffix for path in tokens.iterdir()} == {".tokens"}
    text = long_text.read_text()
    ids = data.token_file("train").tokens.tolist()
    assert data.tokenizer.decode(ids) == text[: int(len(text) * 0.9)]


def test_a_full_disk_is_reported_and_nothing_is_left(long_text: Path, tokens: Path) -> None:
    code, message = run_prepare(long_text, "full")
    assert code == 0
    assert "File too large" in message and "TESSERA_CACHE" in message
    assert not list(tokens.iterdir())


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="TESSERA_CACHE"):
        cache_folder("tokens")
