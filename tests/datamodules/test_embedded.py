"""Embedded text: reviews whose label needs the order of the words, and a reference whose splits
share no passage."""

import re
import sys
from zlib import crc32

import pytest

from datamodules.embedded import reference, reviews
from datamodules.utils.errors import DataError

Splits = dict[str, tuple[list[str], list[int]]]


def _vocabulary(*symbols: str) -> frozenset[str]:
    return frozenset(
        word
        for rules in reviews.GRAMMARS
        for symbol in symbols
        for words in rules[symbol]
        for word in words
    )


_POSITIVE, _NEGATIVE = _vocabulary("GOOD", "LOVE", "LOVED"), _vocabulary("BAD", "HATE", "HATED")
_OTHERS = _vocabulary("PERSON", "PEOPLE", "WITNESS", "HERO", "RIVAL")
_NEGATORS = {"not", "never", "hardly", "nothing", "far", "no"}


def label_of(text: str) -> int:
    """The label that the rules of `reviews` give a text; no opinion that counts, or several, raise
    a ValueError."""
    found = {
        label
        for sentence in text.lower().split(".")
        for label in _opinions(re.findall(r"\w+|,", sentence))
    }
    if len(found) != 1:
        raise ValueError(
            f"{'Opinions disagree' if found else 'There is no opinion that counts'} in {text!r}."
        )
    return found.pop()


def _opinions(words: list[str]) -> list[int]:
    """The labels of the opinions in a sentence that count."""
    for contrast in ("but", "yet"):
        if contrast in words:
            words = words[words.index(contrast) + 1 :]
    if "although" in words:
        start = words.index("although")
        words = words[:start] or words[words.index(",") + 1 :]
    if not _OTHERS.isdisjoint(words):
        return []
    labels, negated = [], False
    for word in words:
        negated = word != "," and negated ^ (word in _NEGATORS)
        if word in _POSITIVE | _NEGATIVE:
            labels.append(int((word in _POSITIVE) ^ negated))
    return labels


@pytest.fixture(scope="module")
def splits() -> Splits:
    return reviews.generate()


def test_splits_are_balanced_disjoint_and_of_the_size_asked_for(splits: Splits) -> None:
    sizes = {split: (len(texts), sum(labels)) for split, (texts, labels) in splits.items()}
    assert sizes == {"train": (8000, 4000), "val": (1000, 500), "test": (1000, 500)}
    texts = [text for texts, _ in splits.values() for text in texts]
    assert len({text.lower() for text in texts}) == len(texts)
    small = reviews.generate(1, train=7, val=1, test=0)
    assert {split: (len(texts), sum(labels)) for split, (texts, labels) in small.items()} == {
        "train": (7, 4),
        "val": (1, 1),
        "test": (0, 0),
    }


def test_the_rule_finds_the_label_of_every_review(splits: Splits) -> None:
    for seed in range(3):
        for texts, labels in (splits if seed == 0 else reviews.generate(seed)).values():
            assert [label_of(text) for text in texts] == labels


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("The plot is good.", 1),
        ("The plot is not very good.", 0),
        ("I never found the music really dull.", 1),
        ("Nothing about the battery was poor.", 1),
        ("It is far from a truly great film.", 0),
        ("The plot was dull, but I loved the cast.", 1),
        ("I loved the cast, but the plot was dull.", 0),
        ("I loved the cast, yet the plot was dull.", 0),
        ("Although the plot was dull, I loved the cast.", 1),
        ("The plot was dull, although I loved the cast.", 0),
        ("The plot was not dull, and I loved the cast.", 1),
        ("My brother loved it. The trailer promised a great film. The plot is weak.", 0),
        ("A terrible king hunts a weak queen. I did not know the director. The plot is clever.", 1),
        ("My sister said that the plot was not good, but I did not hate the music.", 1),
        ("The critics hated it, but my uncle loved it. I disliked the ending.", 0),
    ],
)
def test_the_rule_reads_as_people_do(text: str, label: int) -> None:
    assert label_of(text) == label


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I bought it on Sunday.", "no opinion"),
        ("My brother loved it.", "no opinion"),
        ("", "no opinion"),
        ("The plot is good. The music is bad.", "disagree"),
    ],
)
def test_the_rule_refuses_a_text_without_one_verdict(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        label_of(text)


def test_reviews_follow_from_the_seed_on_every_machine(splits: Splits) -> None:
    assert reviews.generate() == splits
    assert reviews.generate(1)["test"] != splits["test"]
    assert (
        crc32("\n".join(text for texts, _ in splits.values() for text in texts).encode())
        == 1337422455
    )


def test_reviews_are_sentences_of_a_small_vocabulary(splits: Splits) -> None:
    texts = [text for texts, _ in splits.values() for text in texts]
    lengths = {len(text.split()) for text in texts}
    assert min(lengths) == 5 and 30 < max(lengths) <= 40 and len(lengths) > 25
    vocabulary = {word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())}
    assert 150 < len(vocabulary) < 230 and {word for word in vocabulary if not word.isalpha()} == {
        ".",
        ",",
    }
    for text in texts:
        assert all(
            re.fullmatch(r"[A-Z]\w*(,? \w+)+", sentence)
            for sentence in text.removesuffix(".").split(". ")
        )
        assert not re.search(r"\b(an? [aeiou]|(\w+) \2)\b|[A-Z]{2}", text), text


def test_no_review_speaks_of_one_aspect_twice(splits: Splits) -> None:
    aspects = {words[0] for rules in reviews.GRAMMARS for words in rules["ASPECT"]}
    for text in splits["train"][0]:
        named = [
            word
            for word in re.findall(r"the (\w+)", text.lower())
            if word in aspects - {"film", "laptop"}
        ]
        assert len(named) == len(set(named)), text


@pytest.mark.parametrize("weight", [1, 100])
@pytest.mark.parametrize("vectorizer", ["CountVectorizer", "TfidfVectorizer"])
def test_words_without_their_order_do_not_tell_the_label(
    splits: Splits, vectorizer: str, weight: float
) -> None:
    text, linear = (
        pytest.importorskip("sklearn.feature_extraction.text"),
        pytest.importorskip("sklearn.linear_model"),
    )
    bags = getattr(text, vectorizer)(token_pattern=r"\w+")
    model = linear.LogisticRegression(C=weight, max_iter=500).fit(
        bags.fit_transform(splits["train"][0]), splits["train"][1]
    )
    assert 0.5 < model.score(bags.transform(splits["test"][0]), splits["test"][1]) < 0.72


def topic_texts() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics


def plain(text: str) -> list[str]:
    """Lines as words only, and no short ones: those repeat by chance."""
    return [
        line for line in (" ".join(line.split()) for line in text.splitlines()) if len(line) > 40
    ]


def test_documents_are_topics_with_nothing_but_trailing_spaces_cut() -> None:
    topics = {re.sub(r"[ \t]+\n", "\n", text + "\n").strip("\n") for text in topic_texts().values()}
    splits = reference.documents()
    found = [text for texts in splits.values() for text in texts]
    assert (
        set(splits) == {"train", "val", "test"}
        and set(found) <= topics
        and len(set(found)) == len(found)
    )
    assert all(line == line.rstrip() for text in found for line in text.splitlines())


def test_documents_are_the_same_in_every_call_and_the_tails_large_enough() -> None:
    splits = reference.documents()
    assert reference.documents() == splits
    sizes = {split: sum(map(len, texts)) for split, texts in splits.items()}
    assert sum(sizes.values()) > 250_000
    for split in ("val", "test"):
        assert len(splits[split]) >= 3 and 0.04 < sizes[split] / sum(sizes.values()) < 0.12


def test_what_is_tested_was_not_read_in_training() -> None:
    splits = reference.documents()
    train = {line for text in splits["train"] for line in plain(text)}
    val = {line for text in splits["val"] for line in plain(text)}
    for split, read in (("val", train), ("test", train | val)):
        lines = [line for text in splits[split] for line in plain(text)]
        assert sum(line in read for line in lines) < 0.03 * len(lines)


def test_topics_that_are_left_out_stand_in_others() -> None:
    kept = {
        line for texts in reference.documents().values() for text in texts for line in plain(text)
    }
    lines = [line for text in topic_texts().values() for line in plain(text)]
    assert sum(line in kept for line in lines) > 0.98 * len(lines)


def test_a_python_without_its_reference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="pydoc_data"):
        reference.documents()
