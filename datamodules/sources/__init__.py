"""Where samples come from: a source is a class and an entry in its kind's dict."""

from datamodules.sources.aligned_files import AlignedFiles
from datamodules.sources.base import Source, find_source
from datamodules.sources.document_files import DOCUMENTS, document_source
from datamodules.sources.documents import CorpusOptions, Documents, DocumentSource, Piece
from datamodules.sources.images import DatasetOptions, Digits, ImageFolder, ImageHub
from datamodules.sources.labelled import LabelledSource
from datamodules.sources.parallel import Dates, PairHub, PairTables, ParallelOptions, ParallelSource
from datamodules.sources.text_files import CsvTexts, JsonTexts, PlainTexts, TextFolder, TextHub
from datamodules.sources.texts import (
    Reference,
    Reviews,
    TextDatasetOptions,
    TextSamples,
    TextSource,
)
from datamodules.vision.records import Records

__all__ = [
    "CORPORA",
    "DOCUMENTS",
    "PARALLEL",
    "SOURCES",
    "TEXT_SOURCES",
    "CorpusOptions",
    "DatasetOptions",
    "DocumentSource",
    "Documents",
    "ParallelOptions",
    "ParallelSource",
    "Piece",
    "LabelledSource",
    "Source",
    "TextDatasetOptions",
    "TextSamples",
    "TextSource",
    "document_source",
    "find_source",
]

SOURCES: dict[str, type[LabelledSource[Records]]] = {
    "digits": Digits,
    "hub": ImageHub,
    "folder": ImageFolder,
}
TEXT_SOURCES: dict[str, type[TextSource]] = {
    "reviews": Reviews,
    "hub": TextHub,
    "csv": CsvTexts,
    "jsonl": JsonTexts,
    "txt": TextFolder,
}
# Texts to pretrain on, without classes.
CORPORA: dict[str, type[TextSource]] = {
    "reference": Reference,
    "hub": TextHub,
    "csv": CsvTexts,
    "jsonl": JsonTexts,
    "txt": PlainTexts,
}
# Texts in two languages, to translate.
PARALLEL: dict[str, type[ParallelSource]] = {
    "dates": Dates,
    "files": AlignedFiles,
    "table": PairTables,
    "hub": PairHub,
}
