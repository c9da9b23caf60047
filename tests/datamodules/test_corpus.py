"""Corpora for language models, as a run reads them: the same batches for any number of ranks, and
from any step on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from datamodules.corpus import CorpusData, CorpusLoading
from datamodules.sources import CorpusOptions
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.batching import LazyPermutation, StreamBatchSampler
from datamodules.utils.errors import DataError, UsageError

ROOT = Path(__file__).parents[2]
PACKINGS = ("windows", "documents")
CHARACTERS = TokenizerConfig("character", 2000, 1, False)
KINDS = [
    TokenizerConfig(kind, 2000, 1, False)
    for kind in ("bpe", "character", "wordpiece", "word", "whitespace")
]
KINDS.append(TokenizerConfig("wordpiece", 500, 2, True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    """A text of 5,000 numbered words."""
    (tmp_path / "poem.txt").write_text("".join(f"{i:04}" + " \n"[i % 9 == 0] for i in range(5000)))
    return tmp_path / "poem.txt"


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """60 documents of 3 to 120 words."""
    texts = [
        " ".join(f"{number:02}{i:03}" for i in range(3 + number * 37 % 118)) for number in range(60)
    ]
    (tmp_path / "letters.txt").write_text("\n\n".join(texts))
    return tmp_path / "letters.txt"


def corpus(path: Path | None, packing: str = "windows", **options: Any) -> CorpusData:
    options = {"max_length": 16, "batch_size": 6, "tokenizer": CHARACTERS, **options}
    options.setdefault("dataset", CorpusOptions(blank_lines=packing == "documents"))
    source = "reference" if path is None else "files"
    return CorpusData(source, path and str(path), packing, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokenizer", KINDS, ids=[f"{config.kind} {config.vocabulary}" for config in KINDS]
)
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_reference(packing: str, tokenizer: TokenizerConfig) -> None:
    data = corpus(None, packing, max_length=64, batch_size=12, tokenizer=tokenizer)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    metadata = data.metadata()
    assert set(metadata) == {
        "tokenizer",
        "tokenizer_options",
        "vocabulary",
        "padding",
        "max_length",
        "marks_documents",
    }
    assert (
        metadata["marks_documents"] is True
        and metadata["vocabulary"] == data.tokenizer.vocab_size
        and metadata["padding"] == 0
    )
    names = ["tokens", "targets"] + ["documents", "positions"] * (packing == "documents")
    batches = list(data.train_dataloader())
    rows = len(data.dataset("train"))
    assert (
        len(batches)
        == data.train_batches()
        == (rows // 12 if packing == "windows" else -(-rows // 12))
    )
    for batch in batches[: rows // 12]:
        shapes = {**dict.fromkeys(names, (12, 64)), "bytes": (12,)}
        assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
            n: (s, torch.int64) for n, s in shapes.items()
        }
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        batches = list(loader)
        assert set(batches[0]) == {*names, "bytes"}
        text = "".join(piece.text for piece in data.source.split(split))
        assert sum(int(batch["bytes"].sum()) for batch in batches) == len(text.encode())
        targets = sum(int((batch["targets"] != -100).sum()) for batch in batches)
        file = data.file(split)
        assert targets == len(file.tokens) - (len(file) if packing == "documents" else 1)
        control = [file[i][[0, -1]].tolist() for i in range(len(file))]
        assert control == [[data.tokenizer.special_ids.bos, data.tokenizer.special_ids.eos]] * len(
            file
        )
    padding = float(
        (torch.cat([b["targets"] for b in data.test_dataloader()]) == -100).double().mean()
    )
    if packing == "documents":
        assert data.dataset("test").padding_share() == pytest.approx(padding)
    assert data.padding_share() == (
        0 if packing == "windows" else data.dataset("train").padding_share()
    )


def test_one_document_has_no_special_tokens_and_the_tail_is_held_back(poem: Path) -> None:
    """As nanoGPT prepares tiny Shakespeare."""
    data, text = corpus(poem), poem.read_text()
    data.setup("fit")
    assert data.metadata()["marks_documents"] is False
    assert data.tokenizer.decode(data.file("train").tokens.tolist()) == text[: int(len(text) * 0.9)]
    assert data.tokenizer.decode(data.file("val").tokens.tolist()) == text[int(len(text) * 0.9) :]
    rows = torch.cat([batch["targets"] for batch in data.val_dataloader()])
    assert data.tokenizer.decode(rows[rows != -100].tolist()) == text[int(len(text) * 0.9) + 1 :]
    with pytest.warns(UserWarning, match="no test split"):
        data.setup("test")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["bpe", "character", "word"])
def test_bytes_leave_out_a_first_token_that_nothing_foresees(
    packing: str, kind: Any, tmp_path: Path
) -> None:
    text = "été der Rosen, und kein anderer Sommer. " * 200
    (tmp_path / "a.txt").write_text(text)
    data = corpus(
        tmp_path / "a.txt",
        packing,
        dataset=CorpusOptions(),
        tokenizer=TokenizerConfig(kind, 300, 1, False),
    )
    data.setup("fit")
    assert data.metadata()["marks_documents"] is False
    held = text[int(len(text) * 0.9) :]
    assert held.startswith("été")
    first = {
        "bpe": data.tokenizer.convert_ids_to_tokens(data.file("val").tokens[:1])[0],
        "character": "é",
        "word": "été",
    }[kind]
    size = (
        len(first) if kind == "bpe" else len(first.encode())
    )  # byte-level pieces spell each byte as a character
    batches = list(data.val_dataloader())
    assert sum(int(batch["bytes"].sum()) for batch in batches) == len(held.encode()) - size


def test_a_tokenizer_of_one_special_token(letters: Path, tmp_path: Path) -> None:
    """GPT-2's <|endoftext|> is between documents, once, and before the first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["0 1 2"], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(file=str(tmp_path / "tokenizer.json"))
    data = corpus(letters, "documents", tokenizer=config, max_length=1000)
    data.setup("fit")
    end = data.tokenizer.special_ids.eos
    assert end == data.tokenizer.special_ids.bos == data.metadata()["padding"]
    file = data.file("train")
    assert file.unknown == 0  # though the token is GPT-2's for that, too
    assert (
        file.tokens[0] == end and file.offsets[0] == 1 and (file.tokens == end).sum() == len(file)
    )
    batch = data.dataset("train")[list(range(len(data.dataset("train"))))]
    starts = (batch["positions"] == 0) & (batch["documents"] >= 0)
    assert int(starts.sum()) == len(file) and (batch["tokens"][starts] == end).all()


class IncrementalDecoder(LightningModule):
    """Learns nothing, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append({name: value.tolist() for name, value in batch.items()})
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_goes_on_from_any_step_as_if_it_had_not_stopped(
    packing: str, poem: Path, letters: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    options |= {
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
    }

    def fit(ckpt: Path | None = None, **changed: Any) -> list[Any]:
        data = corpus(
            poem if packing == "windows" else letters, packing, **{"max_length": 256, **changed}
        )
        reader, save = (
            IncrementalDecoder(),
            ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1),
        )
        Trainer(max_epochs=3, callbacks=[save], **options).fit(reader, data, ckpt_path=ckpt)
        return reader.seen

    whole = fit()
    steps = len(whole) // 3
    assert steps > 5 and len(whole) == 3 * steps
    assert len({str(batch["targets"]) for batch in whole}) == len(whole)  # no batch comes again
    for step in (1, steps - 1, steps, steps + 3, 3 * steps - 1):
        assert fit(tmp_path / f"step={step}.ckpt") == whole[step:], step
    with pytest.raises(UsageError, match="number of training samples|batch size"):
        fit(tmp_path / "step=2.ckpt", batch_size=5)
    path = poem if packing == "windows" else letters
    path.write_text(path.read_text().replace("1", "2"))
    with pytest.raises(
        UsageError, match="the training text is not the one .* though it is as long"
    ):
        fit(tmp_path / "step=2.ckpt")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches_of_one(
    packing: str, world_size: int, poem: Path, letters: Path
) -> None:
    """The last step of packed rows, too, as long as it has one for each rank."""

    def rows(ranks: int, rank: int, epoch: int, start: int = 0) -> list[dict[str, Tensor]]:
        data = corpus(
            poem if packing == "windows" else letters, packing, batch_size=6 // ranks, max_length=20
        )
        data._ranks = lambda: (ranks, rank)  # type: ignore[method-assign]
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        loader.sampler.start(epoch, start)  # type: ignore[attr-defined]
        return list(loader)

    for epoch in (0, 1):
        alone, shared = (
            rows(1, 0, epoch),
            [rows(world_size, rank, epoch) for rank in range(world_size)],
        )
        assert len(alone) > 10 and {len(part) for part in shared} == {len(alone)}
        for step, batch in enumerate(alone):
            for name, value in batch.items():
                rows_ = [
                    shared[i % world_size][step][name][i // world_size] for i in range(len(value))
                ]
                assert torch.equal(torch.stack(rows_), value)
        later = rows(world_size, 1, epoch, 7)
        assert all(
            torch.equal(a["tokens"], b["tokens"]) for a, b in zip(later, shared[1][7:], strict=True)
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_takes_every_packed_row_once(world_size: int, letters: Path) -> None:
    for batch_size in (4, 7):
        seen, steps = [], set()
        for rank in range(world_size):
            data = corpus(letters, "documents", batch_size=batch_size)
            data._ranks = lambda rank=rank: (world_size, rank)  # type: ignore[method-assign]
            batches = list(data.train_dataloader())
            steps.add(len(batches))
            seen += [row for batch in batches for row in batch["targets"].tolist()]
        rows = data.dataset("train")[list(range(len(data.dataset("train"))))]["targets"].tolist()
        assert sorted(seen) == sorted(rows) and len(steps) == 1


def test_batches_follow_from_the_seed(letters: Path) -> None:
    def first(seed: int) -> str:
        data = corpus(letters, loading=CorpusLoading(seed=seed))
        return str(next(iter(data.train_dataloader()))["tokens"].tolist())

    assert first(1) == first(1) and len({first(seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 1000, 4096, 4097])
def test_shuffled_is_a_permutation_in_parts(size: int) -> None:
    whole = LazyPermutation(size, 3, 1)[:]
    assert sorted(whole) == list(range(size))
    order = LazyPermutation(size, 3, 1)
    for start in (size // 2, 0, size // 3, size - 1):
        assert order[start : start + 7] == whole[start : start + 7]
    if size > 16:
        assert (
            len(
                {
                    str(LazyPermutation(size, seed, epoch)[:])
                    for seed in range(3)
                    for epoch in range(3)
                }
            )
            == 9
        )
        places = (
            torch.tensor([LazyPermutation(size, 0, epoch)[:].index(5) for epoch in range(200)])
            / size
        )
        assert abs(float(places.mean()) - 0.5) < 0.1 and len(places.unique()) > min(size, 200) / 2


def test_any_step_of_a_vast_corpus_is_reached_at_once() -> None:
    sampler = StreamBatchSampler(10**12, 8, 0, True, True)
    begin = time.perf_counter()
    for step in (0, 10**6, 10**11):
        sampler.start(0, step)
        assert len(next(iter(sampler))) == 8
    assert len(sampler) == 10**12 // 8
    assert time.perf_counter() - begin < 1


# What is said where something does not fit.


def test_unknown_characters_are_named(tmp_path: Path) -> None:
    text = "plain words " * 200
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text + "naïve " + text)
    data = corpus(tmp_path / "a.txt")
    metadata = data.metadata()
    (tmp_path / "tokenizer.json").write_text(metadata["tokenizer"])
    given = TokenizerConfig(file=str(tmp_path / "tokenizer.json"))
    for tokenizer in (CHARACTERS, given):
        other = corpus(tmp_path / "b.txt", tokenizer=tokenizer)
        if tokenizer is CHARACTERS:
            other.set_metadata(metadata)
        for _ in range(2):  # tokens on disk change nothing
            with pytest.raises(
                DataError,
                match=r"character 'ï' \(U\+00EF\) in the train split of .*b.txt is not in",
            ):
                other.setup("fit")
        lenient = corpus(tmp_path / "b.txt", tokenizer=given, skip_bad=True)
        with pytest.warns(
            UserWarning,
            match=r"3 of 4,32\d tokens in the train split .* are \[UNK\], such as .* 'ï'",
        ):
            lenient.setup("fit")
        assert int((lenient.file("train").tokens == lenient.tokenizer.special_ids.unk).sum()) == 3
    corpus(tmp_path / "b.txt").setup("fit")  # its own tokenizer learns all there is
    rare = corpus(tmp_path / "b.txt", tokenizer=TokenizerConfig("character", 2000, 2, False))
    with pytest.warns(UserWarning, match="--data.tokenizer.min_frequency 1"):
        rare.setup("fit")
    with pytest.warns(UserWarning, match=r"are \[UNK\]: a tokenizer of the kind bpe has none"):
        corpus(None, tokenizer=TokenizerConfig("word", 500, 2, False), max_length=64).setup("fit")


def test_the_quick_way_for_characters_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Plain,\n words", "", "[PAD] ï 𝄞\r\n", "e\u0301\0"]
    tokenizer = Tokenizer.train(texts[:2] + ["é"], CHARACTERS)
    tokens, sizes = tokenizer.encode_concatenated(texts)
    lists = tokenizer.encode_batch(texts)
    assert tokens.tolist() == sum(lists, []) and sizes.tolist() == [len(ids) for ids in lists]
    lower = Tokenizer.train(texts, TokenizerConfig("character", 200, 1, True))
    assert lower.encode_concatenated(["A"])[0].tolist() == lower.encode_batch(["a"])[0]
    with pytest.raises(UsageError, match="not UTF-8"):
        tokenizer.encode_concatenated(["\ud800"])


def test_a_tokenizer_that_does_not_match_a_checkpoint(letters: Path, tmp_path: Path) -> None:
    metadata = corpus(letters, "documents").metadata()
    data = corpus(letters, "documents")
    data.set_metadata(metadata)
    data.setup("fit")
    assert data.metadata() == metadata
    with pytest.raises(UsageError, match=r"tokenizer.kind bpe .*does not fit the checkpoint"):
        corpus(letters, tokenizer=TokenizerConfig("bpe", 2000, 1, False)).set_metadata(metadata)
    with pytest.raises(UsageError, match="max_length is 32, the checkpoint was trained with 16"):
        corpus(letters, max_length=32).set_metadata(metadata)
    (tmp_path / "tokenizer.json").write_text(Tokenizer.train(["other"], CHARACTERS).to_json())
    config = TokenizerConfig("character", 2000, 1, False, file=str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        UsageError, match=r"is not the checkpoint's \(\d+ tokens\): leave --data.tokenizer.file out"
    ):
        corpus(letters, tokenizer=config).set_metadata(metadata)
    alone = corpus(
        letters, skip_bad=True
    )  # one document, to a model that knows where documents end
    alone.set_metadata(metadata)
    own = corpus(letters, skip_bad=True, tokenizer=alone.config)
    own.tokenizer = alone.tokenizer
    assert alone.marks_documents and not own.marks_documents
    assert alone.file("val").tokens.tolist()[1:-1] == own.file("val").tokens.tolist()


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "abcdefghijklmnopq" + "r"
    )  # 16 characters to train on, and a window takes 17
    with pytest.raises(UsageError, match=r"train split of .*a.txt has 16 tokens, and at least 17"):
        corpus(tmp_path / "a.txt").setup("fit")
    with pytest.raises(UsageError, match="val split of .* has 1 tokens, and at least 2"):
        corpus(tmp_path / "a.txt", max_length=15, dataset=CorpusOptions(val_fraction=0.05)).setup(
            "fit"
        )
    corpus(tmp_path / "a.txt", max_length=15).setup("fit")
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(DataError, match="holds no text"):
        corpus(tmp_path / "a.txt").setup("fit")


def test_options_out_of_range(poem: Path) -> None:
    for options in ({"packing": "rows"}, {"max_length": 1}, {"batch_size": 0}):
        with pytest.raises(UsageError, match="packing is rows|max_length is 1|batch_size is 0"):
            corpus(poem, **options)
    with pytest.raises(UsageError, match="source is web"):
        CorpusData("web")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing to predict"):
        corpus(poem).setup("predict")


def test_a_text_that_changes_while_it_is_read(poem: Path) -> None:
    data = corpus(poem)
    data.source.statistics("train")
    poem.write_text(poem.read_text()[:-3000])
    with pytest.raises(DataError, match="changed while it was read"):
        data.setup("fit")


# Preparation that ends before its time, in a process of its own.

PREPARE = """
import resource, sys, time
from datamodules.tokens import token_cache
from datamodules.tokenizers import Tokenizer
from tests.datamodules.test_corpus import Path, DataError, corpus

how, path = sys.argv[1], Path(sys.argv[2])
token_cache.CHARACTERS_PER_CORE = 1  # a piece at a time
data = corpus(path)
data.tokenizer
encode, calls = Tokenizer.encode_concatenated, []

def slow(*args):
    calls.append(args)
    if how == "kill" and len(calls) == 3:
        print("writing", flush=True)
        time.sleep(60)
    return encode(*args)

Tokenizer.encode_concatenated = slow
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    data.setup("fit")
except DataError as error:
    print(error)
"""


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A text of 400 kB."""
    (tmp_path / "long.txt").write_text("a line of some words\n" * 20_000)
    return tmp_path / "long.txt"


def start(how: str, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREPARE, how, str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_nothing_that_looks_whole(long: Path, cache: Path) -> None:
    with start("kill", long) as process:
        assert process.stdout and process.stdout.readline() == "writing\n"
        assert any(path.stat().st_size > 100_000 for path in cache.iterdir())
        os.kill(process.pid, signal.SIGKILL)
    assert not list(cache.glob("*.tokens"))
    (left,) = cache.iterdir()
    os.utime(left, (0, 0))  # of long ago
    data, text = corpus(long), long.read_text()
    data.setup("fit")
    assert not left.exists() and {path.suffix for path in cache.iterdir()} == {".tokens"}
    assert data.tokenizer.decode(data.file("train").tokens.tolist()) == text[: int(len(text) * 0.9)]


def test_a_full_disk_is_said_and_nothing_is_left(long: Path, cache: Path) -> None:
    with start("full", long) as process:
        assert process.stdout
        said = process.stdout.read()
    assert (
        "cannot be written (File too large): set TESSERA_CACHE to a folder with space for it."
        in said
    )
    assert not list(cache.iterdir())
