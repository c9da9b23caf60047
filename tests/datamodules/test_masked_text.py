"""Texts to pretrain on: every token once, the right ones masked, new pairs in each epoch."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datamodules.masked_text import Chunks, MaskedTextData, NextSentencePairs
from datamodules.reviews import ReviewData
from datamodules.sources import TextDatasetOptions
from datamodules.text import TokenLists
from datamodules.tokenizers import SpecialTokenIds, Tokenizer, TokenizerConfig
from datamodules.tokens.masking import MaskConfig, Masker
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.data_modules import WORDS


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


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("name", ["a.txt", "train/a.txt"])
def test_a_part_of_a_single_text_is_held_out(name: str, fraction: float, tmp_path: Path) -> None:
    lines = [f"line {i} of {i * i}" for i in range(400)]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines))
    path = str(file if file.parent == tmp_path else tmp_path)
    data = MaskedTextData(
        "txt", path, tokenizer=WORDS, dataset=TextDatasetOptions(val_fraction=fraction)
    )
    data.setup("fit")
    splits = {split: data.source.corpus(split).to_pylist() for split in ("train", "val")}
    found = {split: "".join(texts).splitlines() for split, texts in splits.items()}
    assert sorted(found["train"] + found["val"]) == sorted(lines)
    assert len(found["val"]) == pytest.approx(400 * fraction, rel=0.15)


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
        dataset.sampler = SimpleNamespace(epoch=epoch)
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
        dataset.sampler = SimpleNamespace(epoch=epoch)
        return [split_pair(dataset[rows], i) for i in range(len(rows))]

    assert pairs(0, 1, [3, 0, 4]) == pairs(0, 1, [3, 0, 4])
    assert pairs(0, 1, [0, 3])[1] == pairs(0, 1, [3])[0]
    assert len({str(pairs(seed, epoch, [3, 4, 5])) for seed in range(3) for epoch in range(3)}) == 9
    with pytest.raises(UsageError, match="next_sentence"):
        NextSentencePairs(TokenLists([[8, 9, 10], []]), tokenizer, 17, 4, 0)


MEASURES = ["0.5", "1.5", "0.5"]
HELD_OUT: list[tuple[dict[str, Any], list[str]]] = [  # options, labels
    ({"problem_type": "regression"}, MEASURES),
    ({"problem_type": "multi_label_classification"}, ["a,b", "a", "a,b"]),
    ({"class_names": ["0.5", "1.5"]}, MEASURES),
    ({}, [f"class{i}" for i in range(45)]),
]


@pytest.mark.parametrize(("more", "labels"), HELD_OUT)
def test_pretraining_holds_out_what_finetuning_does(
    more: dict[str, Any], labels: list[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.csv")
    rows = [f'text {i},"{labels[i % len(labels)]}"' for i in range(80)]
    Path(path).write_text("\n".join(["text,label", *rows]))
    for seed in range(4):  # with one of them, other strata may hold out the same rows
        options = TextDatasetOptions(split_seed=seed, **more)
        theirs = ReviewData(path=path, dataset=options).source.split("val").column
        own = MaskedTextData(path=path, dataset=options).source.split("val").column
        assert own.equals(theirs)


def test_labels_of_one_row_each_hold_out_a_part(tmp_path: Path) -> None:
    rows = [f"text {i},id{i}" for i in range(80)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    assert len(MaskedTextData(path=str(tmp_path / "a.csv")).source.split("val").column) == 8


def test_texts_without_tokens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("some words\n" * 9)
    (tmp_path / "val.txt").write_text("\u200b\n")  # which WordPiece leaves out
    data = MaskedTextData(path=str(tmp_path), tokenizer=TokenizerConfig(min_frequency=1))
    data.prepare_data()
    with pytest.raises(DataError, match="the val split of .* has no tokens"):
        data.setup("fit")


# Masks --------------------------------------------------------------------------------------------

V = 500
SPECIAL_IDS = SpecialTokenIds(*range(7))
STARTS = [i % 3 > 0 or i < 7 for i in range(V)]  # a third of the tokens continue a word


def masker(*args: float, whole_words: bool = False) -> Masker:
    return Masker(MaskConfig(*args, whole_words=whole_words), SPECIAL_IDS, V, STARTS)


def sequences(size: int = 64, length: int = 200) -> tuple[Tensor, Tensor]:
    """[CLS] text [SEP] [PAD]..., of all lengths from 2 on, and their padding mask."""
    tokens = torch.randint(7, V, (size, length))
    ends = torch.linspace(2, length, size).long()
    padding_mask = torch.arange(length) < ends[:, None]
    tokens[:, 0] = 2
    tokens[torch.arange(size), ends - 1] = 3
    return tokens.masked_fill(~padding_mask, 0), padding_mask


def is_near(count: Tensor, total: int, probability: float) -> bool:
    sigma = math.sqrt(total * probability * (1 - probability))
    return abs(int(count) - total * probability) <= 4 * sigma


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_the_fractions_of_masked_tokens(whole_words: bool, probability: float) -> None:
    tokens = torch.randint(7, V, (1000, 202))
    tokens[:, 0] = 2
    tokens[:, -1] = 3
    masked, where = masker(probability, 0.7, 0.2, whole_words=whole_words)(tokens, tokens > 0)
    independent = tokens > 6
    if whole_words:  # the pieces of a word are selected together
        independent &= torch.tensor(STARTS)[tokens] | (torch.arange(202) == 1)
    assert is_near((where & independent).sum(), int(independent.sum()), probability)
    assert where.float().mean() == pytest.approx(probability, abs=0.01)
    count = int(where.sum())
    is_mask = where & (masked == 4)
    is_random = where & (masked != tokens) & ~is_mask
    assert is_near(is_mask.sum(), count, 0.7)
    assert is_near(is_random.sum(), count, 0.2 * (1 - 1 / 493))  # it may be the same token
    assert set(masked[is_random].tolist()) == set(range(7, V))


@pytest.mark.parametrize("whole_words", [False, True])
def test_only_text_is_masked(whole_words: bool) -> None:
    tokens, padding_mask = sequences()
    tokens[5, 7] = 1
    tokens[9, 3] = 4  # a [MASK] that was there
    before = tokens.clone()
    for _ in range(20):
        masked, where = masker(0.5, 0.2, 0.8, whole_words=whole_words)(tokens, padding_mask)
        assert torch.equal(tokens, before)
        assert masked.dtype == torch.int64 and where.dtype == torch.bool
        assert not (where & ((tokens < 7) | ~padding_mask)).any()
        assert torch.equal(masked[~where], tokens[~where])
        assert ((masked >= 7) | (masked == 4))[where].all()
        assert where[1:].any(1).all() and not where[0].any()  # the first is [CLS] [SEP]
    rare = masker(1e-6, whole_words=whole_words)  # still a token or word of each sequence
    selections = [rare(tokens, padding_mask)[1] for _ in range(20)]
    assert all(where[1:].any(1).all() for where in selections)
    assert whole_words or all((where.sum(1) <= 1).all() for where in selections)
    assert not torch.equal(selections[0], selections[1])
    tokens = torch.randint(7, V, (50, 20))  # text at padding is not looked at
    padding_mask = torch.rand(50, 20) < 0.5
    masked, where = masker(0.99, whole_words=whole_words)(tokens, padding_mask)
    assert not where[~padding_mask].any()
    assert torch.equal(masked[~padding_mask], tokens[~padding_mask])


def test_words_are_masked_whole() -> None:
    tokens, padding_mask = sequences()
    _, where = masker(0.3, whole_words=True)(tokens, padding_mask)
    several = 0
    for row, selected in zip(tokens.tolist(), where.tolist(), strict=True):
        words: list[list[bool]] = []
        for position, token in enumerate(row):
            if token < 7 or STARTS[token] or row[position - 1] < 7:
                words.append([])
            words[-1].append(selected[position])
        assert all(len(set(word)) == 1 for word in words)
        several += sum(len(word) > 1 and word[0] for word in words)
    assert several > 100


@pytest.mark.parametrize("whole_words", [False, True])
def test_seeds_fix_the_draws(whole_words: bool) -> None:
    mask = masker(whole_words=whole_words)
    tokens, padding_mask = sequences()
    torch.manual_seed(5)
    first = mask(tokens, padding_mask)
    assert not torch.equal(mask(tokens, padding_mask)[1], first[1])
    torch.manual_seed(5)
    again = masker(whole_words=whole_words)(tokens, padding_mask)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # A seed for each sequence fixes its draws, whatever the batch.
    seeds = list(range(100, 164))
    masked, where = mask(tokens, padding_mask, seeds)
    for rows in (torch.arange(63, 31, -1), torch.arange(3, 9)):
        length = int(padding_mask[rows].sum(1).max())  # less padding
        row_seeds = [seeds[row] for row in rows]
        some = mask(tokens[rows, :length], padding_mask[rows, :length], row_seeds)
        assert torch.equal(some[0], masked[rows, :length])
        assert torch.equal(some[1], where[rows, :length])
    assert not torch.equal(mask(tokens, padding_mask, seeds[::-1])[1], where)


@pytest.mark.parametrize(("ids", "size"), [(SpecialTokenIds(pad=0), V), (SPECIAL_IDS, 7)])
def test_tokenizers_that_cannot_mask_are_refused(ids: SpecialTokenIds, size: int) -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        Masker(MaskConfig(), ids, size, STARTS[:size])
