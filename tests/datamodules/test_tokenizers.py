"""Tokenizers of every kind: text survives, special tokens are no text, and what is kept is what was
trained."""

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import get_args

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
    training,
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trained(kind: str = "wordpiece", **options: object) -> Tokenizer:
    config = TokenizerConfig(**{"kind": kind, "vocabulary": 400, **options})  # type: ignore[arg-type]
    return Tokenizer.train(TEXTS, config)


def numbers(tokens: Tokenizer, text: str) -> list[int]:
    return tokens.encode_batch([text])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_one_is_the_same_each_time_and_after_a_round_trip(kind: str) -> None:
    one = trained(kind)
    assert one.special_ids == SpecialTokenIds(*range(7))
    assert [one.vocab[name] for name in SPECIAL_TOKENS.values()] == list(range(7))
    assert 7 < one.vocab_size <= 400 and sorted(one.vocab.values()) == list(range(one.vocab_size))
    assert len({trained(kind).digest for _ in range(4)} | {one.digest}) == 1
    added = json.loads(one.to_json())["added_tokens"]
    assert {token["content"]: token["id"] for token in added} == {
        name: i for i, name in enumerate(SPECIAL_TOKENS.values())
    }
    again = Tokenizer.from_json(one.to_json())
    assert again.to_json() == one.to_json() and again.digest == one.digest
    assert again.encode_batch(TEXTS) == one.encode_batch(TEXTS)
    assert again.starts_word == one.starts_word and len(one.starts_word) == one.vocab_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("copy", [False, True], ids=["itself", "pickled"])
def test_what_a_text_says_is_no_special_token(kind: str, lowercase: bool, copy: bool) -> None:
    one = trained(kind, lowercase=lowercase, min_frequency=1)
    one = pickle.loads(pickle.dumps(one)) if copy else one
    assert one.special_ids == SpecialTokenIds(
        *range(7)
    )  # though the texts that it learned from hold their names
    for text in (
        *SPECIAL_TOKENS.values(),
        " ".join(SPECIAL_TOKENS.values()),
        "a[MASK]b",
        "[[MASK]]",
        "[mask] [SEP].",
        TEXTS[3],
    ):
        assert not set(numbers(one, text)) & (set(range(7)) - {one.special_ids.unk}), text


@pytest.mark.parametrize("kind", ["whitespace", "word", "character", "wordpiece"])
def test_what_is_not_known_becomes_unk(kind: str) -> None:
    one = trained(kind)
    assert numbers(one, "ж")[-1] == one.special_ids.unk
    assert one.decode(numbers(one, "ж")) == "[UNK]"
    assert one.special_ids.unk not in numbers(one, "the story")


def test_lowercase_is_an_option() -> None:
    for kind in KINDS:
        upper, lower = numbers(trained(kind), "The STORY"), numbers(trained(kind), "the story")
        assert upper == lower
        kept = trained(kind, lowercase=False)
        assert numbers(kept, "The") != numbers(kept, "the")
    assert numbers(trained(), "thé story") == numbers(trained(), "the story")


def test_bytes_give_back_any_text() -> None:
    draw = random.Random(0)
    one = trained("bpe", lowercase=False)
    odd = [
        "",
        " ",
        "\n\r\n\t",
        "a\x00b",
        "\ufeffx",
        "e\u0301é",
        "👩‍👩‍👧",
        "مرحبا",
        "\u200b",
        "Ġ",
        "\U0010ffff",
        "  two  ",
    ]
    ranges = [(0, 128), (0, 0x800), (0x3000, 0xD7FF), (0xE000, 0x110000)]
    for _ in range(300):
        low, high = draw.choice(ranges)
        odd.append("".join(chr(draw.randrange(low, high)) for _ in range(draw.randrange(40))))
    for text, ids in zip(odd, one.encode_batch(odd), strict=True):
        assert one.decode(ids) == text
        assert one.decode([2, *ids, 3, 0, 0]) == text  # special tokens are left out


def test_characters_give_back_the_text() -> None:
    draw, letters = random.Random(0), "".join(TEXTS) + "\n\t é"
    one = Tokenizer.train([letters], TokenizerConfig("character", min_frequency=1, lowercase=False))
    for _ in range(100):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(50)))
        ids = numbers(one, text)
        assert one.decode(ids) == text and len(ids) == len(text)
    assert (
        trained("character", min_frequency=1).decode(
            numbers(trained("character", min_frequency=1), "Film")
        )
        == "film"
    )


def test_limits_are_kept() -> None:
    words = " ".join(f"w{i} " * (100 - i) for i in range(100))
    one = Tokenizer.train([words], TokenizerConfig("word", vocabulary=27, min_frequency=2))
    assert set(one.vocab) == {*SPECIAL_TOKENS.values(), *(f"w{i}" for i in range(20))}
    one = Tokenizer.train([words], TokenizerConfig("word", min_frequency=61))
    assert set(one.vocab) == {*SPECIAL_TOKENS.values(), *(f"w{i}" for i in range(40))}


# A model's input.


@pytest.mark.parametrize("truncate", get_args(TruncateName))
def test_cutting(truncate: TruncateName) -> None:
    one = Tokenizer.from_json(trained().to_json(), truncate)
    for length in range(30):
        for room in range(1, 20):
            ids = list(range(100, 100 + length))
            kept = {
                "head": ids[:room],
                "tail": ids[max(0, length - room) :],
                "both": ids
                if length <= room
                else ids[: (room + 1) // 2] + ids[length - room // 2 :],
            }[truncate]
            built = one.build_inputs(np.array(ids, np.uint16), room + 2)
            assert (
                pickle.loads(pickle.dumps(one)).build_inputs(ids, room + 2) == built
                if length == 20
                else True
            )
            assert built == ([2, *kept, 3], [0] * (len(kept) + 2), length > room)
            assert all(type(i) is int for i in built.ids)


def test_the_longer_text_of_a_pair_gives_way() -> None:
    one = trained()
    for first, second, room in (
        (3, 4, 10),
        (20, 3, 10),
        (3, 20, 10),
        (20, 20, 10),
        (20, 20, 11),
        (6, 5, 10),
        (0, 9, 4),
    ):
        built = one.build_inputs([100] * first, room + 3, [200] * second)
        kept = first, second
        while sum(kept) > room:  # as published: one token at a time off the longer text
            kept = (kept[0] - 1, kept[1]) if kept[0] > kept[1] else (kept[0], kept[1] - 1)
        assert built.ids == [2, *[100] * kept[0], 3, *[200] * kept[1], 3]
        assert built.segments == [0] * (kept[0] + 2) + [1] * (kept[1] + 1)
        assert built.truncated == (first + second > room)


def test_no_room_is_refused() -> None:
    assert trained().build_inputs([9], 3).ids == [2, 9, 3]
    with pytest.raises(UsageError, match="max_length is 2"):
        trained().build_inputs([9], 2)
    with pytest.raises(UsageError, match="max_length is 4"):
        trained().build_inputs([9], 4, [9])


# Where words begin.


@pytest.mark.parametrize("kind", ["whitespace", "word", "wordpiece"])
def test_words_begin_where_the_package_begins_them(kind: str) -> None:
    from tokenizers import Tokenizer as Backend

    one = trained(kind, vocabulary=70)
    backend = Backend.from_str(one.to_json())
    for text in TEXTS[:3]:
        words = backend.encode(text, add_special_tokens=False).word_ids
        begins = [i == 0 or words[i] != words[i - 1] for i in range(len(words))]
        assert [one.starts_word[i] for i in numbers(one, text)] == begins
    assert kind != "wordpiece" or not all(one.starts_word)


@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_words_of_smaller_pieces_begin_with_their_space(kind: str) -> None:
    one, words = trained(kind, lowercase=False, vocabulary=270, min_frequency=1), [""]
    for i in numbers(one, "I didn't laugh, once!"):
        words += [""] if one.starts_word[i] else []
        words[-1] += one.decode([i])
    assert words == ["I", " didn", "'t", " laugh", ",", " once", "!"]
    assert all(one.starts_word[:7])


# Kept in the cache.


def test_training_is_done_once_for_the_same_texts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TokenizerConfig(vocabulary=300)
    first = Tokenizer.load_or_train(TEXTS, config)
    learn, calls = training.train_tokenizer, []
    monkeypatch.setattr(
        training, "train_tokenizer", lambda *args: calls.append(args) or learn(*args)
    )
    assert (
        Tokenizer.load_or_train(pa.chunked_array([TEXTS[:5], TEXTS[5:]]), config).digest
        == first.digest
    )
    assert Tokenizer.load_or_train(TEXTS, replace(config, truncate="tail")).truncation == "tail"
    assert not calls
    changed = [*TEXTS[:-1], TEXTS[-1][:-1] + "?"]
    moved = ["".join(TEXTS[:2]), *TEXTS[2:]]
    for texts in (changed, moved, TEXTS[::-1], TEXTS[:-1]):
        Tokenizer.load_or_train(texts, config)
    for options in (
        {"vocabulary": 301},
        {"min_frequency": 3},
        {"lowercase": False},
        {"kind": "word"},
    ):
        Tokenizer.load_or_train(TEXTS, replace(config, **options))
    assert len(calls) == 8 == len(list(cache.rglob("*"))) - 2  # a folder, and the first file


def test_a_damaged_file_is_not_trusted(cache: Path) -> None:
    config = TokenizerConfig(vocabulary=300)
    first = Tokenizer.load_or_train(TEXTS, config)
    (file,) = (path for path in cache.rglob("*") if path.is_file())
    whole = file.read_bytes()
    for spoiled in (
        b"",
        whole[:-1],
        whole.replace(b"film", b"fild"),
        b"\xff" + whole,
        b"{}",
        whole + b" ",
    ):
        file.write_bytes(spoiled)
        assert Tokenizer.load_or_train(TEXTS, config).to_json() == first.to_json()
        assert file.read_bytes() == whole


def test_the_digest_of_texts() -> None:
    texts = ["one", "", "two ж", "three"] * 700
    column = pa.array(texts)
    same = [
        texts,
        tuple(texts),
        column,
        pa.chunked_array([column[:1], column[1:9], column[9:]]),
        column.cast("large_string"),
    ]
    same += [pa.array(["x", *texts], kind)[1:] for kind in (pa.string(), pa.large_string())]
    assert len({text_digest(some) for some in same}) == 1
    other = [
        texts[1:],
        ["one", "two ж", "", "three"] * 700,
        ["onet", "", "wo ж", "three"] * 700,
        [],
    ]
    assert len({text_digest(some) for some in [texts, *other]}) == 5
    assert [text for some in same for part in chunks(some, 99) for text in part] == texts * len(
        same
    )


# What is wrong is said.


def test_options_and_texts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="kind is letters, but must be one of whitespace, word"):
        TokenizerConfig("letters")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="vocabulary is 7, but must be more than its 7"):
        TokenizerConfig(vocabulary=7)
    with pytest.raises(UsageError, match="min_frequency is 0"):
        TokenizerConfig(min_frequency=0)
    for kind in ("bpe", "wordpiece"):
        with pytest.raises(UsageError, match=r"vocabulary is 20, but .* alone are \d+"):
            trained(kind, vocabulary=20)
    for kind in KINDS:
        for texts in ([], ["", " \n"]):
            with pytest.raises(UsageError, match="all texts are empty"):
                Tokenizer.train(texts, TokenizerConfig(kind))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing in the texts occurs 99 times"):
        trained("word", min_frequency=99)
    with pytest.raises(UsageError, match=r"text 1502 is not UTF-8: 'a\\udcff'"):
        trained().encode_batch(["fine"] * 1501 + ["a\udcff"])


def test_real_reviews(real_data: Path) -> None:
    from pyarrow import parquet

    texts = parquet.read_table(real_data / "imdb" / "test-00000-of-00001.parquet")["text"][:600]
    for kind in KINDS:
        one = Tokenizer.train(texts, TokenizerConfig(kind, vocabulary=4000, lowercase=False))  # type: ignore[arg-type]
        ids = one.encode_batch(texts[:50])
        unknown = sum(i == one.special_ids.unk for some in ids for i in some) / sum(
            len(some) for some in ids
        )
        assert (
            unknown
            <= {"whitespace": 0.3, "word": 0.2, "character": 1e-3, "bpe": 0, "wordpiece": 1e-3}[
                kind
            ]
        )
        if kind in ("character", "bpe"):
            exact = [
                one.decode(some) == text
                for some, text in zip(ids, texts[:50].to_pylist(), strict=True)
            ]
            assert all(exact) or (kind == "character" and sum(exact) > 40)
