"""What holds for every data module: ranks share an epoch, checkpoints restore it, options fit."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.corpus import CorpusData
from datamodules.images import ImageData
from datamodules.images import LoadingOptions as ImageLoading
from datamodules.masked_text import MaskedTextData
from datamodules.reviews import ReviewData
from datamodules.sources import CorpusOptions, DatasetOptions, TextDatasetOptions
from datamodules.text import TextLoading
from datamodules.tokenizers import PairTokenizerConfig, Tokenizer, TokenizerConfig
from datamodules.tokens.masking import MaskConfig
from datamodules.translation import TranslationData
from datamodules.utils.errors import UsageError
from datamodules.vision.augment import AugmentConfig
from tests.helpers.command import ROOT
from tests.helpers.corpora import CHARACTERS
from tests.helpers.data_modules import MODULES, PAIRS, WORDS, as_rank
from tests.helpers.recorder import as_lists
from tests.helpers.refusals import refused

every_module = pytest.mark.parametrize("kind", MODULES)


def samples(batch: dict[str, Any]) -> list[Any]:
    """The samples of a batch, by number or by tokens."""
    return batch["index"].tolist() if "index" in batch else batch["targets"].tolist()


@every_module
def test_metadata_are_those_of_the_readme(kind: str, tmp_path: Path) -> None:
    data = MODULES[kind](tmp_path)
    text = (ROOT / "datamodules/README.md").read_text()
    (names,) = re.findall(rf"^\| `{type(data).__name__}` \| (.*) \|$", text, re.M)
    assert set(re.findall(r"`(\w+)`", names)) == data.metadata().keys()


@every_module
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_an_epoch(kind: str, world_size: int, tmp_path: Path) -> None:
    """Every sample comes once; a rest smaller than a step may be left out."""
    shared = []
    for rank in range(world_size):
        data = as_rank(MODULES[kind](tmp_path), rank, world_size)
        shared.append([samples(batch) for batch in data.train_dataloader()])
        assert len(shared[-1]) == data.train_batches()
    assert len({len(batches) for batches in shared}) == 1
    for step in zip(*shared, strict=True):
        assert max(map(len, step)) - min(map(len, step)) <= 1
    taken = [str(sample) for batches in shared for batch in batches for sample in batch]
    assert len(set(taken)) == len(taken)
    left_out = len(data.dataset("train")) - len(taken)
    whole_steps = kind in ("images", "windows")
    assert 0 <= left_out < (world_size * data.batch_size if whole_steps else 1)


@pytest.mark.parametrize("kind", ["images", "windows", "documents"])
def test_batches_of_a_fixed_size_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    options = {"max_length": 20} if kind == "documents" else {}

    def batches(ranks: int, rank: int, start: int = 0) -> list[list[Any]]:
        data = as_rank(MODULES[kind](tmp_path, batch_size=12 // ranks, **options), rank, ranks)
        loader: Any = data.train_dataloader()
        loader.sampler.start(1, start)
        return [samples(batch) for batch in loader]

    alone = batches(1, 0)
    shared = [batches(3, rank) for rank in range(3)]
    assert len(alone) > 7
    for step, batch in enumerate(alone[:-1]):
        parts = [part[step] for part in shared]
        assert [sample for some in zip(*parts, strict=True) for sample in some] == batch
    assert batches(3, 1, 7) == shared[1][7:]


@every_module
def test_fewer_samples_than_processes_are_refused(kind: str, tmp_path: Path) -> None:
    data = MODULES[kind](tmp_path)
    count = len(data.dataset("train"))
    assert len(list(as_rank(data, 0, count).train_sampler(data.dataset("train")))) == 1
    with refused(UsageError, f"--trainer.devices {count}"):
        as_rank(data, 0, count + 1).train_dataloader()


@every_module
def test_a_checkpoint_restores_the_metadata(kind: str, tmp_path: Path) -> None:
    """What trained it is not needed to evaluate it."""
    data = MODULES[kind](tmp_path)
    data.prepare_data()
    data.setup("fit")
    stored = io.BytesIO()
    torch.save(data.metadata(), stored)
    metadata = torch.load(io.BytesIO(stored.getvalue()), weights_only=True)
    assert metadata == data.metadata()
    again = MODULES[kind](tmp_path)
    if kind not in ("windows", "documents"):  # which would be split anew
        (tmp_path / "data" / "train.jsonl").unlink(missing_ok=True)
    again.set_metadata(metadata)
    again.setup("validate")
    assert again.metadata() == metadata
    for batch, other in zip(data.val_dataloader(), again.val_dataloader(), strict=True):
        assert as_lists(batch) == as_lists(other)
    with pytest.raises(UsageError, match="predict"):
        again.setup("predict")


@every_module
def test_the_order_follows_from_the_seed(kind: str, tmp_path: Path) -> None:
    def first(seed: int) -> str:
        data = MODULES[kind](tmp_path)
        data.seed = seed
        return str(samples(next(iter(data.train_dataloader()))))

    assert first(1) == first(1)
    assert len({first(seed) for seed in range(4)}) == 4


def letters(folder: Path) -> str:
    """A file with a tokenizer of other tokens."""
    path = folder / "letters.json"
    path.write_text(Tokenizer.train(["other"], CHARACTERS).to_json())
    return str(path)


# Data module, options that are not those of its checkpoint, what is named.
CHANGES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("images", {"image_size": 16}, ["image_size is 16", "8"]),
    ("reviews", {"max_length": 64}, ["max_length is 64", "32"]),
    ("reviews", {"tokenizer": TokenizerConfig(vocabulary=40)}, ["kind wordpiece", "whitespace"]),
    ("reviews", {"tokenizer": replace(WORDS, file="nosuch.json")}, ["nosuch.json"]),
    ("reviews", {"tokenizer": replace(WORDS, file="{letters}")}, [" tokens"]),
    ("reviews", {"dataset": TextDatasetOptions(class_names=["a", "b"])}, ["class_names"]),
    ("masked text", {"next_sentence": True}, ["next_sentence is True"]),
    ("windows", {"max_length": 16}, ["max_length is 16", "32"]),
    ("windows", {"tokenizer": WORDS}, ["tokenizer.kind whitespace"]),
    ("windows", {"tokenizer": replace(CHARACTERS, file="{letters}")}, ["--data.tokenizer.file"]),
    ("translations", {"max_length": 32}, ["max_length is 32", "64"]),
    ("translations", {"languages": "de-en"}, ["languages is de-en", "en-de"]),
    ("translations", {"languages": "en:de-AT"}, ["languages is en:de-AT", "en-de"]),
    ("translations", {"tokenizer": replace(PAIRS, joint=False)}, ["joint False", "joint True"]),
    ("translations", {"tokenizer": replace(PAIRS, start=0)}, ["start 0", "start None"]),
]


@pytest.mark.parametrize(("kind", "options", "names"), CHANGES)
def test_options_must_match_the_checkpoint(
    kind: str, options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    metadata = MODULES[kind](tmp_path).metadata()
    tokenizer = options.get("tokenizer")
    if tokenizer is not None and tokenizer.file == "{letters}":
        options = {"tokenizer": replace(tokenizer, file=letters(tmp_path))}
    with refused(UsageError, *names):
        data = MODULES[kind](tmp_path, **options)
        data.set_metadata(metadata)
        data.setup("fit")  # where language models, which are tested at any length, refuse another


# A class, and wrong values of its options; each is named.
WRONG: dict[Any, dict[str, Any]] = {
    AugmentConfig: {"flip": 1.5, "resized_crop": -0.1, "crop_padding": -1, "mixup": -0.1},
    MaskConfig: {"probability": 0.0, "random": -0.1},
    TokenizerConfig: {"kind": "letters", "vocabulary": 7, "min_frequency": 0},
    PairTokenizerConfig: {"kind": None, "vocabulary": 7, "target_file": "x"},
    CorpusOptions: {"val_fraction": 0.0},
    ImageData: {"batch_size": 0, "image_size": 0, "source": "digit"},
    MaskedTextData: {"source": "digits"},
    CorpusData: {"packing": "rows", "max_length": 1, "batch_size": 0, "source": "web"},
    TranslationData: {"source": "text", "languages": "en-", "path": "multi30k", "max_length": 3},
}
# A class, options that it cannot have, what is named.
OPTIONS: list[tuple[Any, dict[str, Any], list[str]]] = [
    *((kind, {name: value}, [name]) for kind in WRONG for name, value in WRONG[kind].items()),
    (AugmentConfig, {"rand_augment_magnitude": 31}, ["rand_augment_magnitude"]),
    (MaskConfig, {"probability": 1.0}, ["probability", "1.0"]),
    (MaskConfig, {"mask": 0.95}, ["0.95"]),
    (MaskConfig, {"mask": -0.1}, ["-0.1"]),
    (ImageData, {"loading": ImageLoading(eval_batch_size=0)}, ["eval_batch_size is 0"]),
    (ImageData, {"loading": ImageLoading(num_workers=-1)}, ["num_workers is -1"]),
    (ImageData, {"dataset": DatasetOptions(val_fraction=1.0)}, ["val_fraction is 1.0"]),
    (ImageData, {"source": "folder"}, ["--data.path", "train/CLASS/"]),
    (ImageData, {"source": "hub"}, ["--data.dataset.name", "--data.path"]),
    (ImageData, {"source": "folder", "path": "/nowhere"}, ["/nowhere", "train/CLASS/"]),
    (ImageData, {"source": "hub", "path": "/nowhere"}, ["/nowhere", "parquet"]),
    (ImageData, {"source": "folder", "path": __file__}, [__file__]),
    (ImageData, {"source": "hub", "path": __file__}, [__file__, "parquet"]),
    (ImageData, {"dataset": DatasetOptions(class_names=["a", "b"])}, ["class_names", "2", "10"]),
    (ImageData, {"dataset": DatasetOptions(mean=[0.5, 0.5, 0.5])}, ["mean", "1 channels"]),
    (ReviewData, {"loading": TextLoading(batch_tokens=100)}, ["batch_tokens"]),
    (ReviewData, {"loading": TextLoading(batch_tokens=500, buckets=False)}, ["batch_tokens"]),
    (ReviewData, {"loading": TextLoading(multiple=0)}, ["multiple"]),
    (TranslationData, {"source": "txt"}, ["--data.languages is missing"]),
    (TranslationData, {"source": "txt", "languages": "en"}, ["--data.languages is en,"]),
    (TranslationData, {"languages": "en-de"}, ["en-fr", "en-de"]),
    (TranslationData, {"loading": TextLoading(batch_tokens=100)}, ["batch_tokens is 100"]),
    (TranslationData, {"loading": TextLoading(multiple=0)}, ["multiple is 0"]),
]


@pytest.mark.parametrize(("kind", "options", "names"), OPTIONS)
def test_options_out_of_range_are_named(kind: Any, options: dict[str, Any], names: Any) -> None:
    with pytest.raises(ValueError) as found:
        kind(**options).setup("fit")  # which reads the data
    message = str(found.value)
    assert "\n" not in message and all(name in message for name in names), message
