"""Generated dates and numbers: both sides say the same, which other code reads, and nothing is said
twice."""

import re
from datetime import date

import pytest

from datamodules.embedded import dates

Splits = dict[str, tuple[list[str], list[str]]]
MONTHS = {
    "en": "January February March April May June July August September October November December",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
}
ENGLISH, FRENCH = (names.split() for names in MONTHS.values())
WEEKDAYS = {
    "en": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "fr": "lundi mardi mercredi jeudi vendredi samedi dimanche",
}
DAYS = {language: names.split() for language, names in WEEKDAYS.items()}
UNITS = {
    "en": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize",
}
TENS = {
    "en": "twenty thirty forty fifty sixty seventy eighty ninety",
    "fr": "vingt trente quarante cinquante soixante",
}
WORDS = {
    language: {word: i for i, word in enumerate(UNITS[language].split())}
    | {word: 10 * i for i, word in enumerate(TENS[language].split(), 2)}
    for language in ("en", "fr")
}
ORDINALS = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
ORDINALS |= {"twentieth": 20, "thirtieth": 30}


def number(text: str, language: str) -> int:
    """The number that some words say, by rules of its own."""
    total = part = 0
    for word in re.findall(r"[^\W\d]+", text):
        if word in ("hundred", "cent", "cents"):
            part = (part or 1) * 100
        elif word in ("thousand", "mille"):
            total, part = total + (part or 1) * 1000, 0
        elif word in ("vingt", "vingts") and part % 100 == 4:
            part += 76  # four times twenty
        elif word not in ("and", "et"):
            part += ORDINALS.get(word) or WORDS[language].get(word.removesuffix("th"), -1)
    return total + part


def english_year(text: str) -> int:
    century, _, rest = text.partition(" ")
    if "hundred" in text or "thousand" in text:
        return number(text, "en")
    return number(century, "en") * 100 + number(rest.removeprefix("oh-"), "en")


def read(text: str, language: str) -> date | int:
    """What a text says. A weekday must be right, which tells days from one another that differ in a
    digit."""
    names = DAYS[language]
    weekday, rest = next(
        ((day, text[len(day) :].strip(" ,")) for day in names if text.startswith(day)), (None, text)
    )
    if language == "en":
        digits = re.fullmatch(r"(\w+) (\d+), (\d{4})", rest)
        words = re.fullmatch(r"the ([\w-]+) of (\w+), (.+)", rest)
        if digits:
            month, day, year = digits[1], int(digits[2]), int(digits[3])
        elif words:
            month, day, year = words[2], number(words[1], "en"), english_year(words[3])
        else:
            return number(text, "en")
        months = [name for name in ENGLISH if name == month or name[:3] == month]
        found = date(year, ENGLISH.index(months[0]) + 1, day)
    else:
        digits = re.fullmatch(r"(\d+) (\w+)\.? (\d{4})", rest)
        words = re.fullmatch(rf"(.+) ({'|'.join(FRENCH)}) (.+)", rest)
        if digits:
            month, day, year = digits[2], int(digits[1]), int(digits[3])
        elif words:
            month, day, year = (
                words[2],
                1 if words[1] == "premier" else number(words[1], "fr"),
                number(words[3], "fr"),
            )
        else:
            return number(text, "fr")
        (month,) = (
            name for name in FRENCH if name.startswith(month) and (name == month or len(month) > 2)
        )
        found = date(year, FRENCH.index(month) + 1, day)
    assert weekday in (None, names[found.weekday()]), text
    return found


@pytest.fixture(scope="module")
def splits() -> Splits:
    return dates.generate()


def test_both_sides_say_the_same_and_nothing_is_said_twice(splits: Splits) -> None:
    seen: set[date | int] = set()
    for english, french in splits.values():
        for pair in zip(english, french, strict=True):
            subject = read(pair[0], "en")
            assert subject == read(pair[1], "fr"), pair
            assert subject not in seen, pair
            seen.add(subject)
    assert [len(english) for english, _ in splits.values()] == [8000, 500, 1000]
    days = [subject for subject in seen if isinstance(subject, date)]
    assert 0.6 < len(days) / len(seen) < 0.8 and len({day.year for day in days}) == 200
    assert {len(str(subject)) for subject in seen if isinstance(subject, int)} == {1, 2, 3, 4, 5, 6}


def test_every_way_of_saying_is_in_every_split(splits: Splits) -> None:
    ways = (
        r"\w+day, \w+ \d+, \d{4}",
        r"[A-Z]\w{4,} \d+, \d{4}",
        r"[A-Z]\w\w \d+, \d{4}",
        r"\w+day, the .*",
        r"[a-z].*",
    )
    for english, _ in splits.values():
        for way in ways:
            assert sum(re.fullmatch(way, text) is not None for text in english) > 0.05 * len(
                english
            )


def test_known_translations() -> None:
    day = date(1999, 10, 1)
    said = {way(day, language) for way in dates.STYLES[:5] for language in dates.LANGUAGES}
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


def test_pairs_follow_from_the_seed(splits: Splits) -> None:
    assert dates.generate() == splits
    small = dates.generate(1, train=30, val=0, test=5)
    assert [len(english) for english, _ in small.values()] == [30, 0, 5]
    assert small["train"][0] != splits["train"][0][:30]
