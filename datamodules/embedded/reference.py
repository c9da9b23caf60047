"""The reference of the Python language as plain text: what `help("if")` shows."""

import re
from zlib import crc32

from datamodules.utils.errors import DataError

TEST_SHARE = 0.08  # of the characters; of the validation split, too
MAX_REPEATED = 0.5  # of a topic that may stand in longer ones


def documents() -> dict[str, list[str]]:
    """Splits of documents, one per topic; about 350 kB, depending on the version of Python.

    Some topics repeat others ("if" is a part of "compound"). A topic is left out if half of it or
    more is in longer ones, so that the test split is not read in training. Topics are ordered by a
    hash of their names; the last 8 % of the characters are the test split, the 8 % before them the
    validation split. Raises `DataError` if this Python was installed without the text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data, the text of its reference: install all of Python."
        ) from error

    texts = {
        name: re.sub(r"[^\S\n]+$", "", text, flags=re.MULTILINE).strip("\n")
        for name, text in topics.items()
    }
    order = sorted(_without_repeats(texts), key=lambda name: crc32(name.encode()))
    total = sum(len(texts[name]) for name in order)
    splits: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    position = 0.0
    for name in order:
        position += len(texts[name]) / total
        if position < 1 - 2 * TEST_SHARE:
            splits["train"].append(texts[name])
        elif position < 1 - TEST_SHARE:
            splits["val"].append(texts[name])
        else:
            splits["test"].append(texts[name])
    return splits


def _without_repeats(texts: dict[str, str]) -> list[str]:
    """Names of the texts of which less than half stands in longer texts."""
    seen: set[str] = set()
    kept = []
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        paragraphs = _paragraphs(texts[name])
        repeated = sum(len(part) for part in paragraphs if part in seen)
        if repeated < MAX_REPEATED * sum(map(len, paragraphs)):
            kept.append(name)
            seen.update(paragraphs)
    return kept


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, without indentation and line breaks."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
