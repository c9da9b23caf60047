"""Tables of tokens: what is read is what the tokenizer said, written once, and never half."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
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

ROOT = Path(__file__).parents[2]
# Chunks of which one is not full, and texts without a token.
TEXTS = [("word " * (i % 23) + f"number {i}") if i % 7 else "" for i in range(2 * CHUNK + 300)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, TokenizerConfig(vocabulary=300))


def large() -> Tokenizer:
    """More words than 16 bits can number."""
    content = json.loads(Tokenizer.train(["a a"], TokenizerConfig("word")).to_json())
    content["model"]["vocab"] |= {f"w{i}": 100 + i for i in range(70_000)}
    return Tokenizer.from_json(json.dumps(content))


def test_the_table_is_what_the_tokenizer_says(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_batch(TEXTS)
    for table in (tokenised(TEXTS, tokenizer), tokenised(TEXTS, tokenizer)):
        assert len(table) == len(TEXTS)
        assert [table[i].tolist() for i in range(len(table))] == expected
        assert table.lengths.dtype == torch.int64 and table.offsets.dtype == np.int64
        assert table.lengths.tolist() == [len(ids) for ids in expected]
        assert table.offsets.tolist() == [0, *np.cumsum(table.lengths).tolist()]
        assert table[3].dtype == np.uint16
        assert pickle.loads(pickle.dumps(table))[5].tolist() == expected[5]
        for i in (-1, len(TEXTS)):
            with pytest.raises(IndexError):
                table[i]
    assert len(tokenised([], tokenizer)) == 0


def test_large_vocabularies_fit() -> None:
    table = tokenised(["w69999 w0", "w65435 w65436"], large())
    assert table[0].dtype == np.uint32
    assert [table[0].tolist(), table[1].tolist()] == [[70_099, 100], [65_535, 65_536]]


def test_it_is_written_once_for_the_same_texts_and_tokenizer(
    tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, calls = Tokenizer.encode_chunks, []
    monkeypatch.setattr(
        Tokenizer, "encode_chunks", lambda *args: calls.append(args) or encode(*args)
    )
    column = pa.chunked_array([TEXTS[:1500], TEXTS[1500:]])
    for texts in (TEXTS, TEXTS, column, column.cast("large_string")):
        tokenised(texts, tokenizer)
    assert len(calls) == len(list(cache.iterdir())) == 1
    other = Tokenizer.train(TEXTS, TokenizerConfig("word"))
    changed = [*TEXTS[:-1], TEXTS[-1][:-1] + "x"]
    assert (
        tokenised(TEXTS, other).lengths.sum() > 0
        and tokenised(changed, tokenizer).lengths.sum() > 0
    )
    assert len(calls) == len(list(cache.iterdir())) == 3


def test_it_is_a_view_of_the_file(tokenizer: Tokenizer) -> None:
    table = tokenised(TEXTS, tokenizer)
    first, again = table[1], table[1]
    assert (
        not first.flags.owndata
        and not first.flags.writeable
        and first.ctypes.data == again.ctypes.data
    )
    assert (
        str(table.path) in Path("/proc/self/maps").read_text() if sys.platform == "linux" else True
    )


def test_the_tokens_are_never_in_memory_as_a_whole() -> None:
    texts = ["w69999 " * 50] * 20 * CHUNK  # 1 million tokens; as lists of numbers 36 bytes each
    tokenizer = large()
    tokenised(["a"], tokenizer)  # what is imported or made once is not counted
    tracemalloc.start()
    table = tokenised(texts, tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.lengths.sum() == len(texts) * 50
    assert peak < 8 * 2**20


def test_damage_is_seen_and_mended(tokenizer: Tokenizer) -> None:
    texts = TEXTS[: CHUNK + 200]
    table = tokenised(texts, tokenizer)
    expected, whole, path = (
        [table[i].tolist() for i in range(len(table))],
        table.path.read_bytes(),
        table.path,
    )
    seen = 0
    for place in range(0, len(whole), len(whole) // 60):
        spoiled = bytearray(whole)
        spoiled[place] ^= 0x10
        path.unlink()  # a table in use keeps its file
        path.write_bytes(spoiled)
        try:
            read = TokenFile(path)
        except DataError:
            seen += 1
            read = tokenised(texts, tokenizer)
            assert path.read_bytes() == whole
        assert [
            read[i].tolist() for i in range(len(read))
        ] == expected  # at most the padding was hit
    assert seen > 40
    for length in (0, 1, 7, len(whole) // 2, len(whole) - 1):
        path.unlink()
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is damaged"):
            TokenFile(path)
        assert tokenised(texts, tokenizer)[1].tolist() == expected[1]


def test_large_files_are_read_alike_and_give_pages_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tokenised(TEXTS, tokenizer)
    places = np.arange(0, len(table.tokens) - 9, 7)[:, None] + np.arange(9)
    expected = table.gather(places, len(places))
    monkeypatch.setattr(token_file, "LARGE", 10_000)
    large = TokenFile(table.path)
    for _ in range(3):
        assert (large.gather(places, 1) == expected).all()
    whole = table.path.read_bytes()  # of large files at least the length is checked
    for damaged in (whole[:-8], whole + bytes(8), whole[:20] + b"\1" + whole[21:]):
        (table.path.parent / "damaged").write_bytes(damaged)
        with pytest.raises(DataError, match="it is not whole"):
            TokenFile(table.path.parent / "damaged")


KILLED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from datamodules.tokens.token_cache import tokenised
from datamodules.tokenizers import Tokenizer
from tests.datamodules.test_token_cache import TEXTS

encode = Tokenizer.encode_chunks

def slow(*args):
    for number, part in enumerate(encode(*args)):
        yield part
        if number == 1:
            print("writing", flush=True)
            time.sleep(60)

Tokenizer.encode_chunks = slow
tokenised(TEXTS, Tokenizer.from_file(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_killed_writer_leaves_nothing_that_looks_whole(
    how: signal.Signals, tokenizer: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "tokenizer.json")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as writer:
        assert writer.stdout and writer.stdout.readline() == b"writing\n"
        left = list(cache.iterdir())
        assert len(left) == 1 and left[0].stat().st_size > 0
        os.kill(writer.pid, how)
    assert not list(cache.glob("*.tokens"))
    assert how == signal.SIGKILL or not list(cache.iterdir())
    table = tokenised(TEXTS, tokenizer)
    assert [table[i].tolist() for i in range(len(table))] == tokenizer.encode_batch(TEXTS)


FULL = """
import resource, sys
from datamodules.utils.errors import DataError
from datamodules.tokens.token_cache import tokenised
from datamodules.tokenizers import Tokenizer
from tests.datamodules.test_token_cache import TEXTS

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # as a disk that has no more room than that
try:
    tokenised(TEXTS, Tokenizer.from_file(sys.argv[1]))
except DataError as error:
    print(error)
"""


def test_a_full_disk_is_said(tokenizer: Tokenizer, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    command = [sys.executable, "-c", FULL, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cannot be written (File too large): set TESSERA_CACHE" in done.stdout
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set TESSERA_CACHE"):
        cache_folder("tokens")


def test_real_reviews(real_data: Path) -> None:
    from pyarrow import parquet

    texts = parquet.read_table(real_data / "imdb" / "test-00000-of-00001.parquet")["text"][-1500:]
    tokenizer = Tokenizer.train(texts[:300], TokenizerConfig(vocabulary=3000))
    table = tokenised(texts, tokenizer)
    assert [row.tolist() for row in map(table.__getitem__, range(1500))] == tokenizer.encode_batch(
        texts
    )
