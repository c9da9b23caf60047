"""Small texts for language models, and the data of a run on them."""

from pathlib import Path
from typing import Any

from datamodules.corpus import CorpusData
from datamodules.sources import CorpusOptions
from datamodules.tokenizers import TokenizerConfig

PACKINGS = ("windows", "documents")
CHARACTERS = TokenizerConfig("character", 2000, 1, False)


def poem(folder: Path) -> Path:
    """A single text of 5,000 numbered words."""
    words = [f"{i:04}" + " \n"[i % 9 == 0] for i in range(5000)]
    (folder / "poem.txt").write_text("".join(words))
    return folder / "poem.txt"


def letters(folder: Path) -> Path:
    """60 documents of 3 to 120 words."""
    documents = []
    for number in range(60):
        documents.append(" ".join(f"{number:02}{i:03}" for i in range(3 + number * 37 % 118)))
    (folder / "letters.txt").write_text("\n\n".join(documents))
    return folder / "letters.txt"


def corpus(path: Path | None, packing: str = "windows", **options: Any) -> CorpusData:
    """A corpus of a file, by default of single characters; without one the Python reference."""
    options = {"max_length": 16, "batch_size": 6, "tokenizer": CHARACTERS, **options}
    options.setdefault("dataset", CorpusOptions(blank_lines=packing == "documents"))
    return CorpusData(None, path and str(path), packing, **options)
