"""Tokenizers of every kind: text survives, special tokens are not text, what is trained is kept."""

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from datamodules.tokenizers import (
    SPECIAL_TOKENS,
    SpecialTokenIds,
    Tokenizer,
    TokenizerConfig,
    TokenizerName,
    TruncateName,
)
from datamodules.utils.cache import chunks, text_digest
from datamodules.utils.errors import UsageError

KINDS = get_args(TokenizerName)
TEXTS = [
    "The film was not good, but the music is great.",
    "A very dull story; I didn't laugh once!",
    "Great acting. The story was bad, the film unbelievably dull...",
    "I'd watch [MASK] and [PAD] again: [UNK] [CLS] [SEP] [BOS] [EOS]",
] * 3


def trained(kind: str = "wordpiece", **options: Any) -> Tokenizer:
    return Tokenizer.train(TEXTS, TokenizerConfig(**{"kind": kind, "vocabulary": 400, **options}))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic_and_survives_a_round_trip(kind: str) -> None:
    tokenizer = trained(kind)
    names = {name: i for i, name in enumerate(SPECIAL_TOKENS.values())}
    assert tokenizer.special_ids == SpecialTokenIds(*range(7))
    assert {name: tokenizer.vocab[name] for name in names} == names
    added = json.loads(tokenizer.to_json())["added_tokens"]
    assert {token["content"]: token["id"] for token in added} == names
    assert sorted(tokenizer.vocab.values()) == list(range(tokenizer.vocab_size))
    assert 7 < tokenizer.vocab_size <= 400
    assert {trained(kind).digest for _ in range(4)} == {tokenizer.digest}
    for again in (Tokenizer.from_json(tokenizer.to_json()), pickle.loads(pickle.dumps(tokenizer))):
        assert again.to_json() == tokenizer.to_json()
        assert again.digest == tokenizer.digest
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        assert again.starts_word == tokenizer.starts_word
        assert len(again.starts_word) == again.vocab_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [True, False])
def test_a_special_token_that_is_typed_stays_text(kind: str, lowercase: bool) -> None:
    tokenizer = trained(kind, lowercase=lowercase, min_frequency=1)
    control = set(range(7)) - {tokenizer.special_ids.unk}
    odd = ["a[MASK]b", "[[MASK]]", "[mask] [SEP].", TEXTS[3], " ".join(SPECIAL_TOKENS.values())]
    for some in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        for text in (*SPECIAL_TOKENS.values(), *odd):
            assert not set(encode(some, text)) & control, text


@pytest.mark.parametrize("kind", KINDS)
def test_lowercases(kind: str) -> None:
    for lowercase in (True, False):
        tokenizer = trained(kind, lowercase=lowercase)
        assert tokenizer.lowercases is lowercase
        assert Tokenizer.from_json(tokenizer.to_json()).lowercases is lowercase


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_text_and_case(kind: str) -> None:
    tokenizer = trained(kind)
    unk = tokenizer.special_ids.unk
    if kind == "bpe":
        assert unk not in encode(tokenizer, "ж")
    else:
        assert tokenizer.decode(encode(tokenizer, "ж")) == "[UNK]"
        assert encode(tokenizer, "ж")[-1] == unk
        assert unk not in encode(tokenizer, "the story")
    assert encode(tokenizer, "The STORY") == encode(tokenizer, "the story")
    cased = trained(kind, lowercase=False)
    assert encode(cased, "The") != encode(cased, "the")
    if kind == "wordpiece":
        assert encode(tokenizer, "thé story") == encode(tokenizer, "the story")


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_words_are_named(kind: str) -> None:
    words = {"bpe": [], "character": [*"жукЯ"]}.get(kind, ["жук", "Я"])
    tokenizer = trained(kind, min_frequency=1)
    assert tokenizer.unknown_words("the жук was Я жук") == words
    assert tokenizer.unknown_words("the [UNK] was [UNK]") == []
    assert tokenizer.unknown_words("") == []


def test_bytes_and_characters_give_back_the_text() -> None:
    rng = random.Random(0)
    bpe = trained("bpe", lowercase=False)
    texts = ["", " ", "\n\r\n\t", "a\x00b", "\ufeffx", "e\u0301é", "👩‍👩‍👧", "مرحبا", "  two  "]
    for _ in range(200):
        low, high = rng.choice([(0, 128), (0, 0x800), (0x3000, 0xD7FF), (0xE000, 0x110000)])
        texts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(40))))
    for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
        assert bpe.decode(ids) == text
        assert bpe.decode([2, *ids, 3, 0, 0]) == text  # special tokens are left out
    letters = "".join(TEXTS) + "\n\t é"
    character = Tokenizer.train([letters], TokenizerConfig("character", 400, 1, False))
    text = "".join(rng.choice(letters) for _ in range(2000))
    assert character.decode(encode(character, text)) == text
    assert len(encode(character, text)) == len(text)


def test_limits_of_the_vocabulary() -> None:
    words = " ".join(f"w{i} " * (100 - i) for i in range(100))
    for config, count in (
        (TokenizerConfig("word", vocabulary=27, min_frequency=2), 20),
        (TokenizerConfig("word", min_frequency=61), 40),
    ):
        vocab = Tokenizer.train([words], config).vocab
        assert set(vocab) == {*SPECIAL_TOKENS.values(), *(f"w{i}" for i in range(count))}


# A model's inputs.


@pytest.mark.parametrize("truncate", get_args(TruncateName))
def test_truncation(truncate: TruncateName) -> None:
    tokenizer = Tokenizer.from_json(trained().to_json(), truncate)
    for length in range(30):
        ids = list(range(100, 100 + length))
        for room in range(1, 20):
            kept = ids
            if length > room:
                ends = ids[: (room + 1) // 2] + ids[length - room // 2 :]
                kept = {"head": ids[:room], "tail": ids[-room:], "both": ends}[truncate]
            built = tokenizer.build_inputs(np.array(ids, np.uint16), room + 2)
            assert built == ([2, *kept, 3], [0] * (len(kept) + 2), length > room)
            assert all(type(i) is int for i in built.ids)
    assert pickle.loads(pickle.dumps(tokenizer)).truncation == truncate


@pytest.mark.parametrize(
    ("first", "second", "room"),
    [(3, 4, 10), (20, 3, 10), (3, 20, 10), (20, 20, 10), (20, 20, 11), (6, 5, 10), (0, 9, 4)],
)
def test_the_longer_text_of_a_pair_is_truncated(first: int, second: int, room: int) -> None:
    built = trained().build_inputs([100] * first, room + 3, [200] * second)
    a, b = first, second
    while a + b > room:  # as published: one token at a time off the longer text
        if a > b:
            a -= 1
        else:
            b -= 1
    assert built.ids == [2, *[100] * a, 3, *[200] * b, 3]
    assert built.segments == [0] * (a + 2) + [1] * (b + 1)
    assert built.truncated == (first + second > room)


def test_inputs_without_room_for_text_are_refused() -> None:
    assert trained().build_inputs([9], 3).ids == [2, 9, 3]
    for max_length, pair in ((2, None), (4, [9])):
        with pytest.raises(UsageError, match=f"max_length is {max_length}"):
            trained().build_inputs([9], max_length, pair)


# Where words begin.


@pytest.mark.parametrize("kind", ["whitespace", "word", "wordpiece"])
def test_words_begin_where_the_package_begins_them(kind: str) -> None:
    from tokenizers import Tokenizer as Backend

    tokenizer = trained(kind, vocabulary=70)
    backend = Backend.from_str(tokenizer.to_json())
    for text in TEXTS[:3]:
        words = backend.encode(text, add_special_tokens=False).word_ids
        begins = [i == 0 or words[i] != words[i - 1] for i in range(len(words))]
        assert [tokenizer.starts_word[i] for i in encode(tokenizer, text)] == begins
    assert all(tokenizer.starts_word) == (kind != "wordpiece")


@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_words_of_smaller_pieces_begin_with_their_space(kind: str) -> None:
    tokenizer = trained(kind, lowercase=False, vocabulary=270, min_frequency=1)
    words = [""]
    for i in encode(tokenizer, "I didn't laugh, once!"):
        if tokenizer.starts_word[i]:
            words.append("")
        words[-1] += tokenizer.decode([i])
    assert words == ["I", " didn", "'t", " laugh", ",", " once", "!"]
    assert all(tokenizer.starts_word[:7])


# The cache.


def test_a_tokenizer_is_trained_once_for_the_same_texts_and_options(cache: Path) -> None:
    config = TokenizerConfig(vocabulary=300)
    digest = Tokenizer.load_or_train(TEXTS, config).digest
    folder = cache / "tokenizers"
    (path,) = folder.iterdir()
    intact = path.read_bytes()
    written = path.stat().st_mtime_ns
    column = pa.chunked_array([TEXTS[:5], TEXTS[5:]])
    assert Tokenizer.load_or_train(column, config).digest == digest
    assert Tokenizer.load_or_train(TEXTS, replace(config, truncate="tail")).truncation == "tail"
    assert path.stat().st_mtime_ns == written
    changed = [*TEXTS[:-1], TEXTS[-1][:-1] + "?"]
    moved = ["".join(TEXTS[:2]), *TEXTS[2:]]
    for texts in (changed, moved, TEXTS[::-1], TEXTS[:-1]):
        Tokenizer.load_or_train(texts, config)
    changes: list[dict[str, Any]] = [{"vocabulary": 301}, {"min_frequency": 3}]
    for options in (*changes, {"lowercase": False}, {"kind": "word"}):
        Tokenizer.load_or_train(TEXTS, replace(config, **options))
    assert len(list(folder.iterdir())) == 1 + 8
    film = intact.replace(b"film", b"fild")
    for damaged in (b"", intact[:-1], film, b"\xff" + intact, b"{}", intact + b" "):
        path.write_bytes(damaged)
        assert Tokenizer.load_or_train(TEXTS, config).digest == digest
        assert path.read_bytes() == intact


def test_the_digest_of_texts() -> None:
    texts = ["one", "", "two ж", "three"] * 700
    column = pa.array(texts)
    same: list[Any] = [texts, tuple(texts), column, column.cast("large_string")]
    same.append(pa.chunked_array([column[:1], column[1:9], column[9:]]))
    same += [pa.array(["x", *texts], kind)[1:] for kind in (pa.string(), pa.large_string())]
    assert len({text_digest(some) for some in same}) == 1
    moved = [["one", "two ж", "", "three"] * 700, ["onet", "", "wo ж", "three"] * 700]
    assert len({text_digest(some) for some in [texts, texts[1:], [], *moved]}) == 5
    for some in same:
        assert [text for part in chunks(some, 99) for text in part] == texts


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bpe", "vocabulary": 20}, r"vocabulary is 20.* \d+"),
        ({"kind": "wordpiece", "vocabulary": 20}, r"vocabulary is 20.* \d+"),
        ({"kind": "word", "min_frequency": 99}, "99 times.*min_frequency"),
    ],
)
def test_options_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trained(**options)


def test_texts_that_cannot_be_used() -> None:
    for kind in KINDS:
        for texts in ([], ["", " \n"]):
            with pytest.raises(UsageError, match="empty"):
                Tokenizer.train(texts, TokenizerConfig(kind))
    with pytest.raises(UsageError, match=r"texts\[1501\] is not UTF-8: 'a\\udcff'"):
        trained().encode_batch(["fine"] * 1501 + ["a\udcff"])


@pytest.mark.parametrize("text", ["The filmfilm, aaaa  was ünbelievably\ndull", "d", " 漢字 good "])
def test_bpe_merges_end_in_the_tokens_of_the_text(text: str) -> None:
    tokenizer = trained("bpe", lowercase=True)
    learned = [tuple(pair) for pair in json.loads(tokenizer.to_json())["model"]["merges"]]
    (_, start), *steps = tokenizer.bpe_merges(text)
    assert max(map(len, start)) == 1 and len(start) == len(text.lower().encode())
    tokens = [start, *(found for _, found in steps)]
    assert tokens[-1] == tokenizer.convert_ids_to_tokens(encode(tokenizer, text))
    ranks = [learned.index(pair) for pair, _ in steps if pair]
    assert len(ranks) == len(steps) and ranks == sorted(set(ranks))
    for (pair, after), before in zip(steps, tokens, strict=False):
        assert len(after) == len(before) - after.count("".join(pair or ()))


def test_only_bpe_has_merges() -> None:
    with pytest.raises(UsageError, match="kind word and has no byte-level BPE merges"):
        next(trained("word").bpe_merges("x"))


def test_pieces_that_are_symbols_have_the_same_numbers_in_each_training() -> None:
    """Currencies, degrees and emoji are part of a word, unlike punctuation."""
    marks = "\N{EURO SIGN}\N{POUND SIGN}\N{DEGREE SIGN}\N{TRADE MARK SIGN}\N{GRINNING FACE}+$"
    texts = [f"word{i} {i}{mark} {mark}{i}" for i in range(40) for mark in marks]
    config = TokenizerConfig(kind="wordpiece", vocabulary=400)
    assert len({Tokenizer.train(texts, config).to_json() for _ in range(6)}) == 1
