"""Where samples come from: a source is a class and an entry in its task's dict.

The names mean the same in all tasks: folder (train/CLASS/), csv, jsonl, txt (plain text), hub (a
data set of the Hugging Face hub, or Parquet files), images (without labels), and those of the
embedded data.
"""

from collections import ChainMap

from datamodules.sources.aligned_files import AlignedFiles
from datamodules.sources.base import Source
from datamodules.sources.choice import choose_source, open_source
from datamodules.sources.document_files import (
    CsvDocuments,
    DocumentHub,
    JsonDocuments,
    PlainDocuments,
)
from datamodules.sources.documents import (
    CorpusOptions,
    Documents,
    DocumentSource,
    Piece,
    ReferenceDocuments,
)
from datamodules.sources.images import (
    IMAGE_TABLES,
    DatasetOptions,
    Digits,
    ImageCsv,
    ImageFiles,
    ImageFolder,
    ImageHub,
    ImageJson,
)
from datamodules.sources.labelled import LabelledSource, ProblemType, SourceOptions, class_counts
from datamodules.sources.parallel import (
    CsvPairs,
    Dates,
    JsonPairs,
    PairHub,
    ParallelOptions,
    ParallelSource,
)
from datamodules.sources.text_files import (
    CorpusFolder,
    CsvTexts,
    JsonTexts,
    PlainTexts,
    TextFolder,
    TextHub,
)
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
    "UNLABELLED_SOURCES",
    "CorpusOptions",
    "DatasetOptions",
    "DocumentSource",
    "Documents",
    "IMAGE_TABLES",
    "ParallelOptions",
    "ParallelSource",
    "Piece",
    "LabelledSource",
    "ProblemType",
    "Source",
    "SourceOptions",
    "TextDatasetOptions",
    "TextSamples",
    "TextSource",
    "choose_source",
    "class_counts",
    "open_source",
]

SOURCES: dict[str, type[LabelledSource[Records]]] = {
    "digits": Digits,
    "folder": ImageFolder,
    "csv": ImageCsv,
    "jsonl": ImageJson,
    "hub": ImageHub,
}
# Also of images without labels, for tasks that need none; with sources of one's own in `SOURCES`.
UNLABELLED_SOURCES: ChainMap[str, type[LabelledSource[Records]]] = ChainMap(
    {"images": ImageFiles}, SOURCES
)
TEXT_SOURCES: dict[str, type[TextSource]] = {
    "reviews": Reviews,
    "csv": CsvTexts,
    "jsonl": JsonTexts,
    "folder": TextFolder,
    "hub": TextHub,
}
# Texts to pretrain on, without classes.
CORPORA: dict[str, type[TextSource]] = {
    "reference": Reference,
    "reviews": Reviews,
    "csv": CsvTexts,
    "jsonl": JsonTexts,
    "txt": PlainTexts,
    "folder": CorpusFolder,
    "hub": TextHub,
}
# Text for language models.
DOCUMENTS: dict[str, type[DocumentSource]] = {
    "reference": ReferenceDocuments,
    "txt": PlainDocuments,
    "csv": CsvDocuments,
    "jsonl": JsonDocuments,
    "hub": DocumentHub,
}
# Texts in two languages, to translate.
PARALLEL: dict[str, type[ParallelSource]] = {
    "dates": Dates,
    "txt": AlignedFiles,
    "csv": CsvPairs,
    "jsonl": JsonPairs,
    "hub": PairHub,
}
