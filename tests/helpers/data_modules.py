"""One small data set for every data module."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from datamodules.base import ResumableDataModule
from datamodules.images import ImageData
from datamodules.masked_text import MaskedTextData
from datamodules.reviews import ReviewData
from datamodules.text import TextLoading
from datamodules.tokenizers import PairTokenizerConfig, TokenizerConfig
from datamodules.translation import TranslationData
from tests.helpers.corpora import corpus
from tests.helpers.tables import write

WORDS = TokenizerConfig("whitespace", min_frequency=1)
PAIRS = PairTokenizerConfig(vocabulary=300)


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    """Texts of different words and lengths, each with a class and with two languages."""
    found = []
    for i in range(first, first + count):
        text = " ".join(f"w{i * j % 97}" for j in range(1, 4 + i * 7 % 29))
        label = ("bad", "good")[i % 2]
        found.append({"text": f"{i} {text}", "label": label, "en": f"{i} {text}", "de": text[::-1]})
    return found


def texts(folder: Path) -> str:
    """A folder with 90 rows for training and 14 for validation."""
    write(folder / "data" / "train.jsonl", rows(90))
    write(folder / "data" / "val.jsonl", rows(14, 90))
    return str(folder / "data")


def images(folder: Path, **options: Any) -> ImageData:
    return ImageData(**{"batch_size": 96, **options})


def reviews(folder: Path, **options: Any) -> ReviewData:
    options = {"batch_size": 8, "tokenizer": WORDS, "max_length": 32, **options}
    return ReviewData("jsonl", texts(folder), **options)


def masked(folder: Path, next_sentence: bool = False, **options: Any) -> MaskedTextData:
    loading = TextLoading(batch_tokens=256)
    options = {"max_length": 32, "tokenizer": WORDS, "loading": loading, **options}
    return MaskedTextData("jsonl", texts(folder), next_sentence, **options)


def sentences(folder: Path, **options: Any) -> MaskedTextData:
    return masked(folder, True, **options)


def windows(folder: Path, **options: Any) -> Any:
    return corpus(Path(texts(folder)), **{"max_length": 32, "batch_size": 24, **options})


def documents(folder: Path, **options: Any) -> Any:
    options = {"max_length": 128, "batch_size": 12, **options}
    return corpus(Path(texts(folder)), "documents", **options)


def translations(folder: Path, **options: Any) -> TranslationData:
    loading = TextLoading(batch_tokens=512, multiple=4)
    options = {"batch_size": 64, "max_length": 64, "tokenizer": PAIRS, "loading": loading} | options
    return TranslationData("jsonl", texts(folder), options.pop("languages", "en-de"), **options)


def two_tokenizers(folder: Path) -> TranslationData:
    return translations(folder, tokenizer=replace(PAIRS, joint=False))


MODULES: dict[str, Callable[..., ResumableDataModule]] = {
    "images": images,
    "reviews": reviews,
    "masked text": masked,
    "sentence pairs": sentences,
    "windows": windows,
    "documents": documents,
    "translations": translations,
    "translations, two tokenizers": two_tokenizers,
}


def as_rank(
    data: ResumableDataModule, rank: int, world_size: int, limit: int | float = 1.0
) -> ResumableDataModule:
    """The data of one process of several, perhaps with a limit of evaluation batches."""
    trainer: Any = SimpleNamespace(world_size=world_size, global_rank=rank, current_epoch=0)
    trainer.limit_val_batches = trainer.limit_test_batches = limit
    trainer.strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer.state = SimpleNamespace(fn="fit")
    data.trainer = trainer
    return data
