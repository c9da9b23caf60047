"""Rows of tokens: every target once an epoch, documents apart from each other, and no byte of text
uncounted."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from datamodules.tokens.packing import PackedDocuments, RandomWindows, Windows, best_fit_decreasing
from datamodules.tokens.token_file import TokenChunk, TokenFile, write_tokens

BOS, EOS, PAD = 1, 2, 0
NAMES = ("tokens", "targets", "documents", "positions")
SIZES = [5, 0, 33, 8, 1, 64, 17, 2, 40, 9, 3, 7, 12, 31]  # of documents, without special tokens


def file(
    path: Path, sizes: list[int] = SIZES, bos: bool = True, eos: bool = True, prefix: bool = False
) -> TokenFile:
    """Documents of which no token but the special tokens occurs twice; each stands for three bytes
    of text, but of text that begins with no special token the first for seven."""
    none = np.zeros(1, int)
    parts, first = (
        [TokenChunk(np.array([EOS]), np.ones(1, int), none, np.zeros(1, bool), none)] * prefix,
        10,
    )
    for size in sizes:
        tokens = np.array([BOS] * bos + list(range(first, first + size)) + [EOS] * eos)
        bare = 7 * (size > 0 and not bos and not prefix)
        bytes_ = np.array([3 * size + bare - 3 * (bare > 0)])
        parts.append(
            TokenChunk(tokens, np.array([len(tokens)]), bytes_, np.ones(1, bool), np.array([bare]))
        )
        first += size
    write_tokens(path, parts, 70_000)
    return TokenFile(path)


BOUNDARIES: dict[str, dict[str, bool]] = {
    "both": {},
    "one between": {"bos": False, "prefix": True},
    "none": {"bos": False, "eos": False},
}


@pytest.fixture(params=BOUNDARIES)
def token_file(request: pytest.FixtureRequest, tmp_path: Path) -> TokenFile:
    return file(tmp_path / "a.tokens", **BOUNDARIES[request.param])


def whole(dataset: Any, batch: int = 4) -> dict[str, torch.Tensor]:
    """All rows, asked for in batches."""
    parts = [
        dataset[list(range(i, min(i + batch, len(dataset))))] for i in range(0, len(dataset), batch)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("length", [1, 8, 16, 100, 1000])
def test_windows_hold_every_target_once_in_order(token_file: TokenFile, length: int) -> None:
    rows = whole(Windows(token_file, length, PAD))
    stream, counted = token_file.tokens.astype(np.int64).tolist(), rows["targets"] != -100
    assert (
        rows["tokens"].shape == rows["targets"].shape == (-(-(len(stream) - 1) // length), length)
    )
    assert (
        rows["targets"][counted].tolist() == stream[1:]
        and rows["tokens"][counted].tolist() == stream[:-1]
    )
    assert (rows["tokens"][~counted] == PAD).all()
    assert (
        rows["bytes"].dtype == torch.int64
        and int(rows["bytes"].sum()) == token_file.bytes[-1] - token_file.first[0]
    )


@pytest.mark.parametrize("length", [1, 8, 16, 100, 1000])
def test_packed_documents_hold_every_target_once_and_are_apart(
    token_file: TokenFile, length: int
) -> None:
    dataset = PackedDocuments(token_file, length, PAD)
    rows = whole(dataset)
    assert all(rows[name].dtype == torch.int64 for name in rows) and rows["tokens"].shape == (
        len(dataset),
        length,
    )
    stream = token_file.tokens.astype(np.int64).tolist()
    prefix = int(token_file.offsets[0])
    texts = [
        stream[a - prefix : b]
        for a, b in zip(token_file.offsets, token_file.offsets[1:], strict=False)
    ]
    counted = rows["documents"] >= 0
    assert sorted(rows["targets"][counted].tolist()) == sorted(
        token for text in texts for token in text[1:]
    )
    assert torch.equal(counted, rows["targets"] != -100)
    assert (rows["tokens"][~counted] == PAD).all() and (rows["positions"][~counted] == 0).all()
    found = []
    for tokens, targets, documents, positions in zip(*(rows[name] for name in NAMES), strict=True):
        ids = documents[documents >= 0].tolist()
        assert ids == sorted(ids) and documents.tolist() == ids + [-1] * (
            length - len(ids)
        )  # padding is at the end
        assert sorted(set(ids)) == list(range(ids[-1] + 1))
        for number in set(ids):
            span, aims = tokens[documents == number].tolist(), targets[documents == number].tolist()
            assert positions[documents == number].tolist() == list(range(len(span)))
            assert span[1:] == aims[:-1]
            found.append([*span, aims[-1]])
    pieces = [text[i : i + length + 1] for text in texts for i in range(0, len(text) - 1, length)]
    assert sorted(found) == sorted(pieces)  # a document that fits into a row is in one piece
    assert dataset.padding_share() == pytest.approx(1 - float(counted.double().mean()))
    assert int(rows["bytes"].sum()) == token_file.bytes[-1] - token_file.first.sum()


def test_bytes_of_a_text_without_special_tokens_leave_out_its_first_token(tmp_path: Path) -> None:
    table = file(tmp_path / "a.tokens", SIZES, bos=False, eos=False)
    assert (table.first[:-1] == [7 * (size > 0) for size in SIZES]).all()
    for rows in (Windows(table, 8, PAD), PackedDocuments(table, 8, PAD)):
        batch = whole(rows)
        opening = {int(token) for token in table.tokens[table.offsets[:-1]][np.array(SIZES) > 0]}
        for targets, bytes_ in zip(batch["targets"].tolist(), batch["bytes"].tolist(), strict=True):
            assert bytes_ == sum(
                7 if target in opening else 3 for target in targets if target != -100
            )


def test_bytes_are_those_of_the_documents(tmp_path: Path) -> None:
    dataset = PackedDocuments(file(tmp_path / "a.tokens"), 66, PAD)
    for row in range(len(dataset)):
        batch = dataset[[row]]
        assert int(batch["bytes"]) == 3 * int((batch["tokens"] > EOS).sum())


@pytest.mark.parametrize("length", [3, 8, 50])
def test_random_windows_lie_side_by_side(token_file: TokenFile, length: int) -> None:
    stream = token_file.tokens.astype(np.int64).tolist()
    dataset = RandomWindows(token_file, length, seed=4)
    assert len(dataset) == (len(stream) - 1) // length
    shifts = set()
    for epoch in range(40):
        dataset.sampler = SimpleNamespace(epoch=epoch)  # type: ignore[assignment]
        rows = dataset[list(range(len(dataset)))]
        assert rows["tokens"].shape == (len(dataset), length) and rows["targets"].is_contiguous()
        assert torch.equal(rows["tokens"][:, 1:], rows["targets"][:, :-1])
        shift = dataset.offset()
        starts = [min(shift + i * length, len(stream) - length - 1) for i in range(len(dataset))]
        assert rows["tokens"].tolist() == [stream[s : s + length] for s in starts]
        places = [token_file.bytes_before(np.array([s + 1, s + length + 1])) for s in starts]
        assert rows["bytes"].tolist() == [int(last - first) for first, last in places]
        assert rows["targets"].tolist() == [stream[s + 1 : s + length + 1] for s in starts]
        missing = set(range(1, len(stream))) - {s + 1 + i for s in starts for i in range(length)}
        assert len(missing) < length and all(i <= shift or i > starts[-1] + length for i in missing)
        shifts.add(shift)
    assert len(shifts) > min(length, 20) - 2
    assert len({RandomWindows(token_file, length, seed).offset() for seed in range(20)}) > 2 - (
        length == 3
    )


@pytest.mark.parametrize("room", [1, 2, 7, 64, 256])
def test_best_fit(room: int) -> None:
    draw = np.random.default_rng(0)
    for count in (1, 2, 50, 3000):
        sizes = np.minimum(draw.geometric(3 / room if room > 3 else 0.9, count), room)
        rows = best_fit_decreasing(sizes, room)
        used = np.bincount(rows, sizes)
        assert used.max() <= room and used.min() > 0 and len(rows) == count
        assert (
            len(used) <= np.ceil(sizes.sum() / room) * 1.02 + 1
        )  # next to nothing is lost on such sizes
        assert (best_fit_decreasing(sizes, room) == rows).all()
        halves = np.sort(used)[:2]
        assert len(used) == 1 or halves.sum() > room  # no two rows fit into one


def test_packing_a_million_documents_takes_seconds() -> None:
    sizes = np.random.default_rng(0).integers(1, 1025, 1_000_000)
    start = time.process_time()
    rows = best_fit_decreasing(sizes, 1024)
    assert time.process_time() - start < 10
    assert sizes.sum() / (rows.max() + 1) / 1024 > 0.998


@pytest.mark.parametrize("kind", ["random windows", "windows", "documents"])
def test_a_batch_costs_far_less_than_a_step(kind: str, tmp_path: Path) -> None:
    table = file(tmp_path / "a.tokens", [60, 10, 200, 30] * 2000)
    dataset: Any = {
        "random windows": lambda: RandomWindows(table, 64, 0),
        "windows": lambda: Windows(table, 64, PAD),
        "documents": lambda: PackedDocuments(table, 64, PAD),
    }[kind]()
    draw, seconds = np.random.default_rng(0), []
    for _ in range(300):
        indices = draw.integers(len(dataset), size=12).tolist()
        start = time.perf_counter()
        dataset[indices]
        seconds.append(time.perf_counter() - start)
    assert np.quantile(seconds, 0.2) < 0.5e-3  # of about 8 ms; the machine may be busy otherwise
