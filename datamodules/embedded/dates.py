"""Dates and numbers in English and French: a small translation task that needs no download.

A pair is the same day or the same number in both languages, in one of these styles:

- a date as the Unicode CLDR formats it: "Friday, March 5, 2021" and "vendredi 5 mars 2021", with or
  without the day of the week, or short: "Mar 5, 2021" and "5 mars 2021";
- a date in words: "Friday, the fifth of March, twenty twenty-one" and "vendredi cinq mars deux
  mille vingt et un";
- a number below a million in words: "two hundred and forty-one" and "deux cent quarante et un".

The order of words differs, numbers are built differently, and no day or number occurs twice.
"""

from collections.abc import Callable
from datetime import date
from random import Random

FIRST_DAY = date(1900, 1, 1)
LAST_DAY = date(2099, 12, 31)
MAX_DIGITS = 6  # of a number


def generate(
    seed: int = 0, train: int = 12_000, val: int = 500, test: int = 1000
) -> dict[str, tuple[list[str], list[str]]]:
    """Generates splits of English texts, and the same in French; sizes are numbers of pairs.

    No day and no number occurs twice, not even in another split or style. The texts depend on the
    seed, and on the versions of Babel (which brings the CLDR) and num2words.
    """
    rng = Random(seed)
    seen: set[date | int] = set()
    splits: dict[str, tuple[list[str], list[str]]] = {}
    for split, size in (("train", train), ("val", val), ("test", test)):
        pairs = [_unseen_pair(rng, seen) for _ in range(size)]
        splits[split] = [english for english, _ in pairs], [french for _, french in pairs]
    return splits


def _unseen_pair(rng: Random, seen: set[date | int]) -> tuple[str, str]:
    """A day or a number that did not occur before, in both languages."""
    while True:
        style = STYLES[int(rng.random() * len(STYLES))]
        subject = _random_number(rng) if style is number_in_words else _random_day(rng)
        if subject not in seen:
            seen.add(subject)
            return style(subject, "en"), style(subject, "fr")


def _random_day(rng: Random) -> date:
    days = LAST_DAY.toordinal() - FIRST_DAY.toordinal() + 1
    return date.fromordinal(FIRST_DAY.toordinal() + int(rng.random() * days))


def _random_number(rng: Random) -> int:
    """A number of 1 to 6 digits; long ones are as frequent as short ones."""
    limit = 10 ** (1 + int(rng.random() * MAX_DIGITS))
    return int(rng.random() * limit)


def date_in(cldr_format: str) -> Callable[[date, str], str]:
    """How to write a day in a format of the CLDR: "full", "long" or "medium"."""

    def style(day: date, language: str) -> str:
        from babel.dates import format_date

        return format_date(day, cldr_format, locale=language)

    return style


def date_in_words(day: date, language: str) -> str:
    """A day as it is read aloud."""
    from babel.dates import get_day_names, get_month_names
    from num2words import num2words

    weekday = get_day_names("wide", locale=language)[day.weekday()]
    month = get_month_names("wide", locale=language)[day.month]
    year = num2words(day.year, lang=language, to="year")
    if language == "en":
        return f"{weekday}, the {num2words(day.day, lang='en', to='ordinal')} of {month}, {year}"
    number = "premier" if day.day == 1 else num2words(day.day, lang="fr")
    return f"{weekday} {number} {month} {year}"


def number_in_words(number: int, language: str) -> str:
    """A number as it is read aloud."""
    from num2words import num2words

    return num2words(number, lang=language)


STYLES: tuple[Callable[..., str], ...] = (
    *(date_in("full"), date_in("long"), date_in("medium")),
    *(date_in_words, date_in_words),
    *(number_in_words, number_in_words),
)
