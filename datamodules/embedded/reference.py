"""The reference of the Python language as plain text: what `help("if")` shows, from the interpreter that runs."""

import re
from zlib import crc32

from datamodules.utils.errors import DataError

VAL_SHARE = TEST_SHARE = 0.08
MOST_REPEATED = 0.5


def documents() -> dict[str, list[str]]:
    """One document per topic, the same for every call; about 350 kB, by the version of Python.

    Some topics repeat others ("if" is a part of "compound"). Of those the longest is kept: a topic is left out where
    half of it or more stands in longer ones, else what is tested would have been read in training.

    Returns:
        "train", "val" and "test": the tail of the topics, in an order that follows from their names, is the test
        split, what is before it the validation split, each about 8 % of the characters. Only trailing spaces are cut.

    Raises:
        DataError: This Python was installed without the text.
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
    order = sorted(_distinct(texts), key=lambda name: crc32(name.encode()))
    total = sum(len(texts[name]) for name in order)
    splits: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    read = 0.0
    for name in order:
        read += len(texts[name]) / total
        split = (
            "train"
            if read < 1 - VAL_SHARE - TEST_SHARE
            else "val"
            if read < 1 - TEST_SHARE
            else "test"
        )
        splits[split].append(texts[name])
    return splits


def _distinct(texts: dict[str, str]) -> list[str]:
    """Names of the texts of which less than half stands in longer texts."""
    seen: set[str] = set()
    kept = []
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        paragraphs = _paragraphs(texts[name])
        if sum(len(part) for part in paragraphs if part in seen) < MOST_REPEATED * sum(
            map(len, paragraphs)
        ):
            kept.append(name)
            seen.update(paragraphs)
    return kept


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, without the indentation and the line breaks that differ between topics."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
