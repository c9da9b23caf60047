"""Where samples come from: a source is a class and an entry in its kind's dict."""

from datamodules.sources.base import DatasetOptions, Source
from datamodules.sources.digits import Digits
from datamodules.sources.document_files import DOCUMENTS, document_source
from datamodules.sources.documents import CorpusOptions, Documents, DocumentSource, Piece
from datamodules.sources.folder import Folder
from datamodules.sources.hub import Hub
from datamodules.sources.parallel import Dates, Pairs, ParallelOptions, ParallelSource
from datamodules.sources.parallel_files import AlignedFiles
from datamodules.sources.parallel_tables import PairHub, PairTable
from datamodules.sources.text_folder import PlainTexts, TextFolder
from datamodules.sources.text_tables import Csv, JsonLines, TextHub
from datamodules.sources.texts import Reference, Reviews, TextDatasetOptions, Texts, TextSource
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
    "Pairs",
    "ParallelOptions",
    "ParallelSource",
    "Piece",
    "Source",
    "TextDatasetOptions",
    "TextSource",
    "Texts",
    "document_source",
]

SOURCES: dict[str, type[Source[Records]]] = {"digits": Digits, "hub": Hub, "folder": Folder}
TEXT_SOURCES: dict[str, type[TextSource]] = {
    "reviews": Reviews,
    "hub": TextHub,
    "csv": Csv,
    "jsonl": JsonLines,
    "txt": TextFolder,
}
# Texts to pretrain on, without classes.
CORPORA: dict[str, type[TextSource]] = {
    "reference": Reference,
    "hub": TextHub,
    "csv": Csv,
    "jsonl": JsonLines,
    "txt": PlainTexts,
}
# Texts in two languages, to translate.
PARALLEL: dict[str, type[ParallelSource]] = {
    "dates": Dates,
    "files": AlignedFiles,
    "table": PairTable,
    "hub": PairHub,
}
