"""Texts to pretrain on: every token once, pairs drawn anew in each epoch, nothing of the
validation texts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from datamodules.masked_text import Chunks, NextSentencePairs
from datamodules.text import TokenLists
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import UsageError

WORDS = TokenizerConfig("whitespace", min_frequency=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(f"w{i}" for i in range(3000))], WORDS)


@pytest.fixture(scope="module")
def documents() -> TokenLists:
    """Documents of 0 to 60 tokens, no token twice: each says where it is from."""
    lists = TokenLists()
    next_token = 7  # after the special tokens
    for size in (21, 1, 0, 60, 7, 22, 2, 40, 14, 13):
        lists.append(list(range(next_token, next_token + size)))
        next_token += size
    return lists


@pytest.mark.parametrize("max_length", [4, 9, 16, 100])
def test_chunks_hold_every_token_once_and_are_full(
    tokenizer: Tokenizer, documents: TokenLists, max_length: int
) -> None:
    dataset = Chunks(documents, tokenizer, max_length, multiple=1)
    chunks = [dataset[[i]]["tokens"][0].tolist() for i in range(len(dataset))]
    assert all(chunk[0] == 2 and chunk[-1] == 3 for chunk in chunks)
    assert sum((chunk[1:-1] for chunk in chunks), []) == sum(documents, [])
    sizes = [len(chunk) for chunk in chunks]
    assert dataset.token_counts.tolist() == sizes
    assert max(sizes) <= max_length
    assert len(chunks) == sum(-(-len(ids) // (max_length - 2)) for ids in documents)


def split_pair(batch: dict[str, Tensor], row: int) -> tuple[list[int], list[int]]:
    """The two spans of a sample, by its segments."""
    tokens, segments, mask = (batch[name][row] for name in ("tokens", "segments", "padding_mask"))
    first = tokens[mask & (segments == 0)].tolist()
    second = tokens[mask & (segments == 1)].tolist()
    assert first[0] == 2 and first[-1] == second[-1] == 3
    assert not segments[~mask].any()
    return first[1:-1], second[:-1]


def test_pairs_follow_each_other_or_are_of_two_documents(
    tokenizer: Tokenizer, documents: TokenLists
) -> None:
    dataset = NextSentencePairs(documents, tokenizer, 17, multiple=4, seed=3)
    owner = {token: number for number, ids in enumerate(documents) for token in ids}
    first_tokens = {ids[0] for ids in documents if ids}
    follows = []
    splits = set()
    others = set()
    inner = 0
    for epoch in range(40):
        dataset.sampler = SimpleNamespace(epoch=epoch)  # type: ignore[assignment]
        batch = dataset[list(range(len(dataset)))]
        for row in range(len(dataset)):
            first, second = split_pair(batch, row)
            chunk = [int(token) for token in dataset.tokens(row)]
            assert first and second and first == chunk[: len(first)]
            assert len(first) + len(second) + 3 <= int(dataset.token_counts[row])
            if batch["is_next"][row]:
                assert first + second == chunk
            else:
                assert owner[second[0]] == owner[second[-1]] != owner[first[0]]
                assert second == list(range(second[0], second[-1] + 1))
                others.add(owner[second[0]])
                inner += second[0] not in first_tokens
            if len(chunk) > 1:
                follows.append(int(batch["is_next"][row]))
            splits.add((row, len(first)))
    assert abs(np.mean(follows) - 0.5) < 4 * 0.5 / len(follows) ** 0.5
    assert inner > len(follows) / 8  # spans from the middle of another document
    assert others == {number for number, ids in enumerate(documents) if ids}
    full = int((dataset.size == 14).nonzero()[0])
    assert {split for row, split in splits if row == full} == set(range(1, 14))


def test_pairs_follow_from_seed_epoch_and_chunk(
    tokenizer: Tokenizer, documents: TokenLists
) -> None:
    def pairs(seed: int, epoch: int, rows: list[int]) -> list[Any]:
        dataset = NextSentencePairs(documents, tokenizer, 17, multiple=4, seed=seed)
        dataset.sampler = SimpleNamespace(epoch=epoch)  # type: ignore[assignment]
        return [split_pair(dataset[rows], i) for i in range(len(rows))]

    assert pairs(0, 1, [3, 0, 4]) == pairs(0, 1, [3, 0, 4])
    assert pairs(0, 1, [0, 3])[1] == pairs(0, 1, [3])[0]
    assert len({str(pairs(seed, epoch, [3, 4, 5])) for seed in range(3) for epoch in range(3)}) == 9
    with pytest.raises(UsageError, match="next_sentence"):
        NextSentencePairs(TokenLists([[8, 9, 10], []]), tokenizer, 17, 4, 0)
