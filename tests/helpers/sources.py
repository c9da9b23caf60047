"""Sources of text as commands name them, and what they read."""

from typing import Any

from datamodules.sources import (
    CORPORA,
    DOCUMENTS,
    PARALLEL,
    TEXT_SOURCES,
    CorpusOptions,
    DocumentSource,
    ParallelOptions,
    ParallelSource,
    TextDatasetOptions,
    open_source,
)
from datamodules.sources.documents import PIECE_SIZE


def build(command: str, skip_bad: bool = False, **options: Any) -> Any:
    """A source, such as "texts csv d": the kind of data, the source and perhaps a path.

    The source may be "null": as the path shows.

    `val_fraction=0.2` and other options may stand in the command, too.
    """
    kind, given, *rest = command.split()
    name = None if given == "null" else given
    path = next((word for word in rest if "=" not in word), None)
    options |= dict(word.split("=") for word in rest if "=" in word)
    if "class_names" in options:
        options["class_names"] = options["class_names"].split(",")
    if "val_fraction" in options:
        options["val_fraction"] = float(options["val_fraction"])
    if kind == "documents":
        return open_source(DOCUMENTS, name, path, CorpusOptions(**options), skip_bad=skip_bad)
    if kind == "pairs":
        more: Any = {"languages": options.pop("languages", "en-de").split("-")}
        more["skip_bad"] = skip_bad
        return open_source(PARALLEL, name, path, ParallelOptions(**options), **more)
    sources = TEXT_SOURCES if kind == "texts" else CORPORA
    found = open_source(sources, name, path, TextDatasetOptions(**options), skip_bad=skip_bad)
    found.labelled = kind == "texts"
    return found


def joined(stream: Any) -> list[str]:
    """The documents of a stream of pieces, each as one text."""
    found: list[str] = []
    closed = True
    for piece in stream:
        assert 0 < len(piece.text) <= PIECE_SIZE and (piece.opens or not closed)
        if piece.opens:
            found.append("")
        found[-1] += piece.text
        closed = piece.closes
    return found


def read(source: Any, split: str) -> list[Any]:
    """The samples of a split: documents, or tuples of texts and names of classes."""
    samples = source.split(split)
    if isinstance(source, DocumentSource):
        return joined(samples)
    if isinstance(source, ParallelSource):
        columns = [column.to_pylist() for column in samples.columns]
    elif source.labelled:
        names = source.checked_class_names()
        columns = [samples.column.to_pylist(), [names[label] for label in samples.labels]]
    else:
        columns = [samples.column.to_pylist()]
    return [*zip(*columns, strict=True)]
