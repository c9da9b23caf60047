"""Dates and numbers in English and French: a small translation task that needs no download.

A pair says the same day or the same number in both languages, in one of these ways:

- a date as the Unicode CLDR formats it: "Friday, March 5, 2021" and "vendredi 5 mars 2021", with or without the day of
  the week, or short: "Mar 5, 2021" and "5 mars 2021";
- a date in words: "Friday, the fifth of March, twenty twenty-one" and "vendredi cinq mars deux mille vingt et un";
- a number below a million in words: "two hundred and forty-one" and "deux cent quarante et un".

Words change places, numbers are built differently, and what is said is never said twice.
"""

from collections.abc import Callable
from datetime import date
from random import Random

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
DIGITS = 6  # of a number at most
LANGUAGES = ("en", "fr")

Say = Callable[[str], str]  # language to text


def generate(
    seed: int = 0, train: int = 8000, val: int = 500, test: int = 1000
) -> dict[str, tuple[list[str], list[str]]]:
    """Writes pairs of texts. No day and no number is said twice, be it in another split or in another way.

    Args:
        seed: Of all that is drawn.
        train: Number of training pairs.
        val: Number of validation pairs.
        test: Number of test pairs.

    Returns:
        "train", "val" and "test": English texts, and the same in French. They follow from the seed, and from the
        versions of Babel (which brings the CLDR) and num2words.
    """
    draw = Random(seed)
    seen: set[date | int] = set()
    splits: dict[str, tuple[list[str], list[str]]] = {}
    for split, size in (("train", train), ("val", val), ("test", test)):
        said = [_unseen(draw, seen) for _ in range(size)]
        english, french = ([say(language) for say in said] for language in LANGUAGES)
        splits[split] = english, french
    return splits


def _unseen(draw: Random, seen: set[date | int]) -> Say:
    """A way to say a day or a number that nobody has said yet."""
    while True:
        way = _WAYS[int(draw.random() * len(_WAYS))]
        subject = _number(draw) if way is number_in_words else _day(draw)
        if subject not in seen:
            seen.add(subject)
            return lambda language: way(subject, language)


def _day(draw: Random) -> date:
    return date.fromordinal(
        FIRST.toordinal() + int(draw.random() * (LAST.toordinal() - FIRST.toordinal() + 1))
    )


def _number(draw: Random) -> int:
    """A number of 1 to 6 digits; long ones are as frequent as short ones."""
    most = 10 ** (1 + int(draw.random() * DIGITS))
    return int(draw.random() * most)


def date_in(style: str) -> Callable[[date, str], str]:
    """How to write a day in a style of the CLDR: "full", "long" or "medium"."""

    def way(day: date, language: str) -> str:
        from babel.dates import format_date

        return format_date(day, style, locale=language)

    return way


def date_in_words(day: date, language: str) -> str:
    """A day as it is read aloud."""
    from babel.dates import get_day_names, get_month_names
    from num2words import num2words

    weekday = get_day_names("wide", locale=language)[day.weekday()]
    month = get_month_names("wide", locale=language)[day.month]
    year = num2words(day.year, lang=language, to="year")
    if language == "en":
        return f"{weekday}, the {num2words(day.day, lang='en', to='ordinal')} of {month}, {year}"
    return (
        f"{weekday} {'premier' if day.day == 1 else num2words(day.day, lang='fr')} {month} {year}"
    )


def number_in_words(number: int, language: str) -> str:
    """A number as it is read aloud."""
    from num2words import num2words

    return num2words(number, lang=language)


_WAYS: tuple[Callable[..., str], ...] = (
    date_in("full"),
    date_in("long"),
    date_in("medium"),
    date_in_words,
    date_in_words,
    number_in_words,
    number_in_words,
)
