"""Texts that come with the program: reviews whose label needs the order of the words, dates that
both languages say alike, and a reference whose splits share no passage."""

import re
import sys
from contextlib import suppress
from datetime import date, datetime
from zlib import crc32

import pytest

from datamodules.embedded import dates, reference, reviews
from datamodules.utils.errors import DataError

Reviews = dict[str, tuple[list[str], list[int]]]
Dates = dict[str, tuple[list[str], list[str]]]


def words_of(*symbols: str) -> set[str]:
    """The words that symbols of the grammars expand to at once."""
    rules = [grammar[symbol] for grammar in reviews.GRAMMARS for symbol in symbols]
    return {word for rule in rules for words in rule for word in words}


POSITIVE = words_of("GOOD", "LOVE", "LOVED")
NEGATIVE = words_of("BAD", "HATE", "HATED")
OTHERS = words_of("PERSON", "PEOPLE", "WITNESS", "HERO", "RIVAL")
NEGATORS = {"not", "never", "hardly", "nothing", "far", "no"}


def label_of(text: str) -> int | None:
    """The label that the rules of `reviews` give a text; None if no opinion counts, or several
    disagree."""
    found = set()
    for sentence in text.lower().split("."):
        words = re.findall(r"\w+|,", sentence)
        for contrast in ("but", "yet"):
            if contrast in words:
                words = words[words.index(contrast) + 1 :]
        if "although" in words:
            start = words.index("although")
            words = words[:start] or words[words.index(",") + 1 :]
        negated = False
        for word in words if OTHERS.isdisjoint(words) else []:
            negated = word != "," and negated ^ (word in NEGATORS)
            if word in POSITIVE | NEGATIVE:
                found.add(int((word in POSITIVE) ^ negated))
    return found.pop() if len(found) == 1 else None


@pytest.fixture(scope="module")
def review_splits() -> Reviews:
    return reviews.generate()


def test_reviews_are_balanced_and_follow_from_the_seed(review_splits: Reviews) -> None:
    sizes = {split: (len(texts), sum(labels)) for split, (texts, labels) in review_splits.items()}
    assert sizes == {"train": (8000, 4000), "val": (1000, 500), "test": (1000, 500)}
    texts = [text for texts, _ in review_splits.values() for text in texts]
    assert len({text.lower() for text in texts}) == len(texts)
    assert crc32("\n".join(texts).encode()) == 1337422455  # on every machine
    small = reviews.generate(1, train=7, val=1, test=0)
    sizes = {split: (len(texts), sum(labels)) for split, (texts, labels) in small.items()}
    assert sizes == {"train": (7, 4), "val": (1, 1), "test": (0, 0)}


def test_the_rules_find_the_label_of_every_review(review_splits: Reviews) -> None:
    for splits in (review_splits, reviews.generate(1), reviews.generate(2)):
        for texts, labels in splits.values():
            assert [label_of(text) for text in texts] == labels


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("I never found the music really dull.", 1),
        ("It is far from a truly great film.", 0),
        ("I loved the cast, yet the plot was dull.", 0),
        ("Although the plot was dull, I loved the cast.", 1),
        ("The plot was dull, although I loved the cast.", 0),
        ("My brother loved it. The trailer promised a great film. The plot is weak.", 0),
        ("My sister said that the plot was not good, but I did not hate the music.", 1),
        ("The critics hated it, but my uncle loved it. I disliked the ending.", 0),
        ("The plot is good. The music is bad.", None),
    ],
)
def test_the_rules_read_as_people_do(text: str, label: int | None) -> None:
    assert label_of(text) == label


def test_words_without_their_order_do_not_tell_the_label(review_splits: Reviews) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    bags = CountVectorizer(token_pattern=r"\w+")
    train, labels = review_splits["train"]
    model = LogisticRegression(max_iter=200).fit(bags.fit_transform(train), labels)
    test, labels = review_splits["test"]
    assert 0.5 < model.score(bags.transform(test), labels) < 0.72


# The reference of Python.


def topics() -> list[str]:
    from pydoc_data.topics import topics

    return list(topics.values())


def long_lines(texts: list[str]) -> list[str]:
    """Lines as words only, and no short ones: those repeat by chance."""
    lines = [" ".join(line.split()) for text in texts for line in text.splitlines()]
    return [line for line in lines if len(line) > 40]


def test_documents_are_topics_with_nothing_but_trailing_spaces_cut() -> None:
    splits = reference.documents()
    assert reference.documents() == splits and splits.keys() == {"train", "val", "test"}
    whole = {re.sub(r"[ \t]+\n", "\n", text + "\n").strip("\n") for text in topics()}
    found = [text for texts in splits.values() for text in texts]
    assert set(found) <= whole and len(set(found)) == len(found)
    assert all(line == line.rstrip() for text in found for line in text.splitlines())
    sizes = {split: sum(map(len, texts)) for split, texts in splits.items()}
    assert sum(sizes.values()) > 250_000
    for split in ("val", "test"):
        assert len(splits[split]) >= 3 and 0.04 < sizes[split] / sum(sizes.values()) < 0.12


def test_what_is_tested_was_not_read_in_training() -> None:
    """And what is left out stands in other documents."""
    splits = {split: long_lines(texts) for split, texts in reference.documents().items()}
    read = set(splits["train"])
    for split in ("val", "test"):
        assert sum(line in read for line in splits[split]) < 0.03 * len(splits[split])
        read.update(splits[split])
    everything = long_lines(topics())
    assert sum(line in read for line in everything) > 0.98 * len(everything)


def test_a_python_without_its_reference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="pydoc_data"):
        reference.documents()


# Dates and numbers.

MONTHS = {
    "en": "January February March April May June July August September October November December",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
}
DAYS = {
    "en": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "fr": "lundi mardi mercredi jeudi vendredi samedi dimanche",
}


def day_of(text: str) -> date | None:
    """The day that an English text says in digits."""
    for pattern in ("%A, %B %d, %Y", "%B %d, %Y", "%b %d, %Y"):
        with suppress(ValueError):
            return datetime.strptime(text, pattern).date()
    return None


def names_in(text: str, language: str) -> tuple[int | None, int | None]:
    """Which day of the week and which month a date names, from 0."""
    names = MONTHS[language].split()
    words = re.findall(r"[^\W\d]{3,}", text)
    weekdays = [i for i, name in enumerate(DAYS[language].split()) if text.startswith(name)]
    months = [i for i, name in enumerate(names) if name in words]
    if not months:
        months = [i for i, name in enumerate(names) if any(map(name.startswith, words))]
    return next(iter(weekdays), None), next(iter(months), None)


@pytest.fixture(scope="module")
def date_splits() -> Dates:
    return dates.generate()


def test_both_sides_say_the_same_and_nothing_is_said_twice(date_splits: Dates) -> None:
    numbers = range(2000)
    english_numbers = {dates.number_in_words(number, "en"): number for number in numbers}
    days = []
    for english, french in date_splits.values():
        for one, other in zip(english, french, strict=True):
            day = day_of(one)
            number = english_numbers.get(one)
            if day is not None:
                days.append(day)
                assert re.findall(r"\d+", other) == [str(day.day), str(day.year)], one
            if number is not None:
                assert other == dates.number_in_words(number, "fr")
            elif day is not None or "day, the " in one:
                assert names_in(one, "en") == names_in(other, "fr"), (one, other)
    assert [len(english) for english, _ in date_splits.values()] == [12_000, 500, 1000]
    assert len(set(days)) == len(days) and len({day.year for day in days}) == 200
    texts = [text for english, _ in date_splits.values() for text in english]
    assert len(set(texts)) == len(texts)
    in_words = [text for text in texts if text[0].islower()]
    assert 0.2 < len(in_words) / len(texts) < 0.4
    assert any("hundred thousand" in text or "hundred and" in text for text in in_words)
    styles = (
        r"\w+day, \w+ \d+, \d{4}",
        r"[A-Z]\w{4,} \d+, \d{4}",
        r"[A-Z]\w\w \d+, \d{4}",
        r"\w+day, the .*",
        r"[a-z].*",
    )
    for english, _ in date_splits.values():
        for style in styles:
            count = sum(re.fullmatch(style, text) is not None for text in english)
            assert count > 0.05 * len(english)


def test_known_translations() -> None:
    day = date(1999, 10, 1)
    said = {style(day, language) for style in dates.STYLES[:5] for language in ("en", "fr")}
    assert said == {
        "Friday, October 1, 1999",
        "vendredi 1 octobre 1999",
        "October 1, 1999",
        "1 octobre 1999",
        "Oct 1, 1999",
        "1 oct. 1999",
        "Friday, the first of October, nineteen ninety-nine",
        "vendredi premier octobre mille neuf cent quatre-vingt-dix-neuf",
    }
    assert dates.number_in_words(241, "en") == "two hundred and forty-one"
    assert dates.number_in_words(241, "fr") == "deux cent quarante et un"


def test_dates_follow_from_the_seed(date_splits: Dates) -> None:
    assert dates.generate() == date_splits
    small = dates.generate(1, train=30, val=0, test=5)
    assert [len(english) for english, _ in small.values()] == [30, 0, 5]
    assert small["train"][0] != date_splits["train"][0][:30]
