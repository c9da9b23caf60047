"""Hidden tokens: the right share of the right ones, by chance that the seed fixes."""

import math

import pytest
import torch
from torch import Tensor

from datamodules.tokenizers import SpecialTokenIds, Tokenizer, TokenizerConfig
from datamodules.tokens.masking import MaskConfig, Masker
from datamodules.utils.errors import UsageError

V, SPECIAL_IDS = 500, SpecialTokenIds(*range(7))
STARTS = [
    number % 3 > 0 or number < 7 for number in range(V)
]  # a third of the tokens continue a word


def batch(size: int = 64, length: int = 200) -> tuple[Tensor, Tensor]:
    """[CLS] text [SEP] [PAD]..., of all lengths from 2 on."""
    tokens = torch.randint(7, V, (size, length))
    ends = torch.linspace(2, length, size).long()
    keep = torch.arange(length) < ends[:, None]
    tokens[:, 0], tokens[torch.arange(size), ends - 1] = 2, 3
    return tokens.masked_fill(~keep, 0), keep


def within(count: int, total: int, share: float) -> bool:
    return abs(count - total * share) <= 4 * math.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("share", [0.15, 0.4])
def test_shares(whole_words: bool, share: float) -> None:
    masker = Masker(MaskConfig(share, 0.7, 0.2, whole_words), SPECIAL_IDS, V, STARTS)
    tokens = torch.randint(7, V, (1000, 202))
    tokens[:, 0], tokens[:, -1] = 2, 3
    masked, where = masker(tokens, torch.ones_like(tokens, dtype=torch.bool))
    counted = where
    if whole_words:  # pieces of a word are chosen together: only words are independent
        counted = where & (torch.tensor(STARTS)[tokens] | (torch.arange(202) == 1))
        words = (
            ((torch.tensor(STARTS)[tokens] | (torch.arange(202) == 1)) & (tokens > 6)).sum().item()
        )
        assert abs(where.float().mean() - share) < 0.01
    else:
        words = 200_000
    assert within(int(counted.sum()), int(words), share)
    chosen = int(where.sum())
    became_mask = (masked == 4) & where
    unchanged, changed = (masked == tokens) & where, (masked != tokens) & ~became_mask
    assert within(int(became_mask.sum()), chosen, 0.7)
    assert within(
        int(changed.sum()), chosen, 0.2 * (1 - 1 / 493)
    )  # a random token may be the same one
    assert within(int(unchanged.sum()), chosen, 0.1 + 0.2 / 493)
    assert set(masked[changed].tolist()) == set(range(7, V))


@pytest.mark.parametrize("whole_words", [False, True])
def test_only_text_is_hidden(whole_words: bool) -> None:
    masker = Masker(MaskConfig(0.5, 0.2, 0.8, whole_words), SPECIAL_IDS, V, STARTS)
    tokens, keep = batch()
    tokens[5, 7], tokens[9, 3] = 1, 4  # [UNK] and a [MASK] that was there
    before = tokens.clone()
    for _ in range(20):
        masked, where = masker(tokens, keep)
        assert torch.equal(tokens, before)
        assert (
            masked.dtype == torch.int64
            and where.dtype == torch.bool
            and masked.shape == where.shape == tokens.shape
        )
        assert not (where & ((tokens < 7) | ~keep)).any()
        assert torch.equal(masked[~where], tokens[~where])
        assert not ((masked < 7) & (masked != 4) & where).any()
        assert where[1:].any(1).all() and not where[0].any()  # the first sequence is [CLS] [SEP]
    nothing = Masker(MaskConfig(1e-6, whole_words=whole_words), SPECIAL_IDS, V, STARTS)
    words = [nothing(tokens, keep)[1] for _ in range(20)]
    assert all(where[1:].any(1).all() for where in words)
    assert whole_words or all((where.sum(1) <= 1).all() for where in words)
    assert not torch.equal(words[0], words[1])
    assert not nothing(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool))[
        1
    ].any()


@pytest.mark.parametrize("whole_words", [False, True])
def test_any_text_goes_and_padding_is_left_alone_whatever_it_holds(whole_words: bool) -> None:
    masker = Masker(MaskConfig(0.99, whole_words=whole_words), SPECIAL_IDS, V, STARTS)
    tokens, keep = torch.randint(7, V, (50, 20)), torch.rand(50, 20) < 0.5
    masked, where = masker(tokens, keep)
    assert not where[~keep].any() and torch.equal(masked[~keep], tokens[~keep])


def test_words_are_hidden_whole() -> None:
    masker = Masker(MaskConfig(0.3, whole_words=True), SPECIAL_IDS, V, STARTS)
    tokens, keep = batch()
    _, where = masker(tokens, keep)
    several = 0
    for row, chosen in zip(tokens.tolist(), where.tolist(), strict=True):
        words: list[list[int]] = []
        for place, token in enumerate(row):
            if token < 7 or STARTS[token] or row[place - 1] < 7:
                words.append([])
            words[-1].append(place)
        for word in words:
            assert len({chosen[place] for place in word}) == 1
        several += sum(len(word) > 1 and chosen[word[0]] for word in words)
    assert several > 100


def test_words_of_a_real_tokenizer() -> None:
    text = "unbelievably good acting, unbelievably bad story"
    config = TokenizerConfig(vocabulary=60, min_frequency=1)
    tokenizer = Tokenizer.train([text.replace("unbelievably", "un believ ably")], config)
    tokens = torch.tensor([tokenizer.build_inputs(tokenizer.encode_batch([text])[0], 99).ids])
    masker = Masker(
        MaskConfig(0.4, 1.0, 0.0, True),
        tokenizer.special_ids,
        tokenizer.vocab_size,
        tokenizer.starts_word,
    )
    seen = set()
    for _ in range(200):
        masked, where = masker(tokens, torch.ones_like(tokens, dtype=torch.bool))
        pieces = [
            ("_" if hidden else token)
            for hidden, token in zip(
                where[0], tokenizer.convert_ids_to_tokens(tokens[0]), strict=True
            )
        ]
        seen |= set(pieces)
        kept = tokenizer.decode(masked[0][~where[0]]).split()
        assert set(kept) <= {
            "unbelievably",
            "good",
            "acting",
            "bad",
            "story",
            ",",
            "unbelievably,",
            "good,",
            "acting,",
        }, kept
    assert any(piece.startswith("##") for piece in seen)


def test_the_seed_fixes_the_draws() -> None:
    masker, (tokens, keep) = Masker(MaskConfig(), SPECIAL_IDS, V, STARTS), batch()
    torch.manual_seed(5)
    first, second = masker(tokens, keep), masker(tokens, keep)
    torch.manual_seed(5)
    again = Masker(MaskConfig(), SPECIAL_IDS, V, STARTS)(tokens, keep)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], second[1])  # another epoch hides other tokens


@pytest.mark.parametrize("whole_words", [False, True])
def test_seeds_fix_the_draws_of_each_sequence_whatever_the_batch(whole_words: bool) -> None:
    masker, (tokens, keep) = (
        Masker(MaskConfig(whole_words=whole_words), SPECIAL_IDS, V, STARTS),
        batch(),
    )
    seeds = list(range(100, 164))
    masked, where = masker(tokens, keep, seeds)
    for rows in (torch.arange(63, 31, -1), torch.arange(3, 9)):
        length = int(keep[rows].sum(1).max())  # less padding
        some = masker(tokens[rows, :length], keep[rows, :length], [seeds[row] for row in rows])
        assert torch.equal(some[0], masked[rows, :length]) and torch.equal(
            some[1], where[rows, :length]
        )
    assert not torch.equal(masker(tokens, keep, seeds[::-1])[1], where)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no \[MASK\] token"):
        Masker(MaskConfig(), SpecialTokenIds(pad=0), V, STARTS)
    with pytest.raises(UsageError, match="special tokens only"):
        Masker(MaskConfig(), SPECIAL_IDS, 7, STARTS[:7])
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(UsageError, match="share of masked tokens"):
            MaskConfig(share)
    for mask, other in ((0.95, 0.1), (-0.1, 0.1), (0.5, -0.1)):
        with pytest.raises(UsageError, match="at most 1"):
            MaskConfig(mask=mask, random=other)
    MaskConfig(mask=0.9, random=0.1)
