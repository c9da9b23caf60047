"""Rows of tokens: every target once an epoch, documents apart, every byte of text counted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from datamodules.tokens.packing import PackedDocuments, RandomWindows, Windows, best_fit_decreasing
from datamodules.tokens.token_file import TokenChunk, TokenFile, write_tokens

BOS = 1
EOS = 2
PAD = 0
SIZES = [5, 0, 33, 8, 1, 64, 17, 2, 40, 9, 3, 7, 12, 31]  # of documents, without special tokens
LENGTHS = [1, 8, 16, 100, 1000]
BOUNDARIES: dict[str, dict[str, bool]] = {
    "both": {},
    "one between": {"bos": False, "prefix": True},
    "none": {"bos": False, "eos": False},
}


def write(
    path: Path, sizes: list[int] = SIZES, bos: bool = True, eos: bool = True, prefix: bool = False
) -> TokenFile:
    """Documents in which only special tokens occur twice; each token stands for three bytes.

    If no special token is before a document, its first token stands for seven bytes.
    """
    none = np.zeros(1, int)
    chunks = []
    if prefix:
        chunks.append(TokenChunk(np.array([EOS]), none + 1, none, none > 0, none))
    next_token = 10
    for size in sizes:
        tokens = [BOS] * bos + list(range(next_token, next_token + size)) + [EOS] * eos
        is_bare = size > 0 and not bos and not prefix
        text_bytes = none + 3 * size + 4 * is_bare
        chunk = TokenChunk(
            np.array(tokens), none + len(tokens), text_bytes, none == 0, none + 7 * is_bare
        )
        chunks.append(chunk)
        next_token += size
    write_tokens(path, chunks, 70_000)
    return TokenFile(path)


@pytest.fixture(params=BOUNDARIES)
def token_file(request: pytest.FixtureRequest, tmp_path: Path) -> TokenFile:
    return write(tmp_path / "a.tokens", **BOUNDARIES[request.param])


def all_rows(dataset: Any) -> dict[str, torch.Tensor]:
    """All rows, asked for four at a time."""
    indices = list(range(len(dataset)))
    batches = [dataset[indices[i : i + 4]] for i in range(0, len(indices), 4)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("length", LENGTHS)
def test_windows_hold_every_target_once_in_order(token_file: TokenFile, length: int) -> None:
    rows = all_rows(Windows(token_file, length, PAD))
    stream = token_file.tokens.tolist()
    counted = rows["targets"] != -100
    shape = (-(-(len(stream) - 1) // length), length)
    assert rows["tokens"].shape == rows["targets"].shape == shape
    assert rows["targets"][counted].tolist() == stream[1:]
    assert rows["tokens"][counted].tolist() == stream[:-1]
    assert (rows["tokens"][~counted] == PAD).all()
    assert rows["bytes"].dtype == torch.int64
    assert int(rows["bytes"].sum()) == token_file.bytes[-1] - token_file.first_token_bytes[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_packed_documents_hold_every_target_once_and_are_apart(
    token_file: TokenFile, length: int
) -> None:
    dataset = PackedDocuments(token_file, length, PAD)
    rows = all_rows(dataset)
    assert all(values.dtype == torch.int64 for values in rows.values())
    assert rows["tokens"].shape == (len(dataset), length)
    stream = token_file.tokens.tolist()
    offsets = token_file.offsets.tolist()
    texts = [stream[a - offsets[0] : b] for a, b in zip(offsets, offsets[1:], strict=False)]
    counted = rows["documents"] >= 0
    assert torch.equal(counted, rows["targets"] != -100)
    assert (rows["tokens"][~counted] == PAD).all()
    assert (rows["positions"][~counted] == 0).all()
    found = []
    for row in range(len(dataset)):
        tokens, targets, documents, positions = (
            rows[name][row] for name in ("tokens", "targets", "documents", "positions")
        )
        numbers = documents[documents >= 0].tolist()
        assert numbers == sorted(numbers)
        assert documents.tolist() == numbers + [-1] * (length - len(numbers))  # padding at the end
        assert set(numbers) == set(range(numbers[-1] + 1))
        for number in set(numbers):
            span = tokens[documents == number].tolist()
            span_targets = targets[documents == number].tolist()
            assert positions[documents == number].tolist() == list(range(len(span)))
            assert span[1:] == span_targets[:-1]
            found.append([*span, span_targets[-1]])
    expected = [text[i : i + length + 1] for text in texts for i in range(0, len(text) - 1, length)]
    assert sorted(found) == sorted(expected)  # a document that fits into a row is not split
    assert dataset.num_targets == int(counted.sum())
    assert int(rows["bytes"].sum()) == token_file.bytes[-1] - token_file.first_token_bytes.sum()


@pytest.mark.parametrize("dataset", [Windows, PackedDocuments])
def test_bytes_are_those_of_the_targets(dataset: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.tokens", bos=False, eos=False)
    assert file.first_token_bytes[:-1].tolist() == [7 * (size > 0) for size in SIZES]
    rows = all_rows(dataset(file, 8, PAD))
    first_tokens = {10 + sum(SIZES[:i]) for i in range(len(SIZES))}
    for targets, text_bytes in zip(rows["targets"].tolist(), rows["bytes"].tolist(), strict=True):
        sizes = [7 if target in first_tokens else 3 for target in targets if target != -100]
        assert text_bytes == sum(sizes)


@pytest.mark.parametrize("length", [3, 8, 50])
def test_random_windows_are_adjacent(token_file: TokenFile, length: int) -> None:
    stream = token_file.tokens.tolist()
    dataset = RandomWindows(token_file, length, seed=4)
    assert len(dataset) == (len(stream) - 1) // length
    offsets = set()
    for epoch in range(40):
        dataset.sampler = SimpleNamespace(epoch=epoch)
        rows = dataset[list(range(len(dataset)))]
        assert rows["targets"].is_contiguous()
        offset = dataset.offset()
        offsets.add(offset)
        starts = [min(offset + i * length, len(stream) - length - 1) for i in range(len(dataset))]
        assert rows["tokens"].tolist() == [stream[s : s + length] for s in starts]
        assert rows["targets"].tolist() == [stream[s + 1 : s + length + 1] for s in starts]
        ends = [token_file.bytes_before(np.array([s + 1, s + length + 1])) for s in starts]
        assert rows["bytes"].tolist() == [int(last - first) for first, last in ends]
        missing = set(range(1, len(stream))) - {s + 1 + i for s in starts for i in range(length)}
        assert len(missing) < length
        assert all(i <= offset or i > starts[-1] + length for i in missing)
    assert len(offsets) > min(length, 20) - 2
    seeds = {RandomWindows(token_file, length, seed).offset() for seed in range(20)}
    assert len(seeds) > (1 if length == 3 else 2)


@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 256])
def test_best_fit_decreasing_loses_hardly_any_room(capacity: int) -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 50, 3000):
        sizes = np.minimum(rng.geometric(3 / capacity if capacity > 3 else 0.9, count), capacity)
        rows = best_fit_decreasing(sizes, capacity)
        used = np.bincount(rows, sizes)
        assert len(rows) == count
        assert 0 < used.min() <= used.max() <= capacity
        assert len(used) <= np.ceil(sizes.sum() / capacity) * 1.02 + 1
        assert (best_fit_decreasing(sizes, capacity) == rows).all()
        assert len(used) == 1 or np.sort(used)[:2].sum() > capacity  # no two rows fit into one


def test_a_document_goes_where_the_least_room_is_left() -> None:
    assert best_fit_decreasing(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]
