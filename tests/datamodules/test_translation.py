"""Batches of pairs: what is in them, how little is padded, and what a checkpoint keeps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.text import TextLoading
from datamodules.tokenizers import PairTokenizer, PairTokenizerConfig, Tokenizer, TokenizerConfig
from datamodules.translation import TranslationData
from datamodules.utils.errors import DataError, UsageError

BOS, EOS, IGNORED = 5, 6, -100
SMALL = PairTokenizerConfig(vocabulary=400)
EN = ["a man", "two dogs run", "the street is wet", "a woman in a red coat waits at the corner"]
DE = ["ein Mann", "zwei Hunde rennen auf der Wiese und bellen", "nass", "eine Frau wartet hier"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """240 pairs for training, 21 for validation, with another number on each line."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    for split, size, first in (("train", 240, 0), ("val", 21, 1000)):
        for name, texts in (("en", EN), ("de", DE)):
            lines = [f"{texts[i % 4]} {i + first}\n" for i in range(size)]
            (tmp_path / f"{split}.{name}").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def unprepared(folder: Path, languages: str = "en-de", **options: Any) -> TranslationData:
    options = {"tokenizer": SMALL, "loading": TextLoading(multiple=2), **options}
    return TranslationData("files", str(folder), languages, **options)


def data_of(folder: Path, **options: Any) -> TranslationData:
    data = unprepared(folder, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def rows(batch: dict[str, Any]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Source, decoder's input and targets of each pair without padding, which is at the end."""
    names = ("source", "source_padding_mask", "tokens", "targets")
    for source, mask, tokens, targets in zip(*(batch[name] for name in names), strict=True):
        counted = targets != IGNORED
        assert not source[~mask].any() and not tokens[~counted].any()  # [PAD] is 0
        assert counted.int().diff().max() <= 0 and mask.int().diff().max() <= 0
        yield source[mask].tolist(), tokens[counted].tolist(), targets[counted].tolist()


@pytest.mark.parametrize("joint", [True, False])
def test_batches(joint: bool, folder: Path) -> None:
    data = data_of(folder, batch_size=16, tokenizer=replace(SMALL, joint=joint))
    pair = data.tokenizer
    assert pair.joint == (pair.source.digest == pair.target.digest) == joint
    en, de = (column.to_pylist() for column in data.source.split("train").columns)
    batches = list(data.train_dataloader())
    assert len(batches) == data.train_batches() == 15
    seen = []
    padded = kept = 0
    for batch in batches:
        assert "reference" not in batch
        for index, (source, tokens, targets) in zip(batch["index"], rows(batch), strict=True):
            assert source == [*pair.source.encode_batch([en[index]])[0], EOS]
            assert targets == [*pair.target.encode_batch([de[index]])[0], EOS]
            assert tokens == [BOS, *targets[:-1]]
            assert (pair.source.decode(source), pair.decode(targets)) == (en[index], de[index])
            seen.append(int(index))
        masks = {"source": batch["source_padding_mask"], "tokens": batch["targets"] != IGNORED}
        for name, mask in masks.items():
            width = batch[name].shape[1]
            assert width % 2 == 0 and 0 <= width - int(mask.sum(1).max()) < 2
            padded += mask.numel()
            kept += int(mask.sum())
    assert sorted(seen) == list(range(240))
    assert data.count_tokens() == (kept, padded)
    assert data.padding_share() == pytest.approx(1 - kept / padded)


def test_evaluation_has_every_pair_once_with_its_texts_as_they_were_read(folder: Path) -> None:
    data = data_of(folder, max_length=6, loading=TextLoading(eval_batch_size=4))
    found = {}
    for batch in data.val_dataloader():
        assert len(batch["source"]) <= 4
        assert max(batch["source"].shape[1], batch["tokens"].shape[1]) <= 6
        texts = zip(batch["text"], batch["reference"], strict=True)
        found.update(zip(batch["index"].tolist(), texts, strict=True))
    assert found == {i: (f"{EN[i % 4]} {i + 1000}", f"{DE[i % 4]} {i + 1000}") for i in range(21)}


def test_batches_by_tokens_of_the_longer_side(folder: Path) -> None:
    data = data_of(folder, max_length=64, loading=TextLoading(batch_tokens=256, multiple=1))
    batches = list(data.train_dataloader())
    sizes = [max(batch["source"].numel(), batch["tokens"].numel()) for batch in batches]
    assert max(sizes) <= 256
    assert sum(size > 200 for size in sizes) >= len(sizes) - 1
    random = data_of(folder, max_length=64, loading=TextLoading(buckets=False, multiple=1))
    assert random.padding_share() > 2 * data.padding_share()
    other_seed = TextLoading(batch_tokens=256, multiple=1, seed=1)
    others = data_of(folder, max_length=64, loading=other_seed).train_dataloader()
    assert [batch["index"].tolist() for batch in others] != [b["index"].tolist() for b in batches]


def test_ranks_share_each_step(folder: Path) -> None:
    taken = []
    for rank in range(3):
        data = data_of(folder, max_length=64, loading=TextLoading(batch_tokens=150, multiple=4))
        data._ranks = lambda rank=rank: (3, rank)  # type: ignore[method-assign]
        taken.append([batch["index"].tolist() for batch in data.train_dataloader()])
    indices = [index for batches in taken for batch in batches for index in batch]
    assert sorted(indices) == list(range(240))
    for step in zip(*taken, strict=True):
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_long_sides_are_truncated_and_counted(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"^(\d+) of 261 .*--data.max_length") as warnings:
        data = data_of(folder, max_length=8)
    count = 0
    for split in ("train", "val"):
        dataset = data.dataset(split)
        long = [any(len(table[i]) > 7 for table in dataset.tables) for i in range(len(dataset))]
        assert dataset.truncated == sum(long)
        count += sum(long)
    assert any(str(warning.message).startswith(f"{count} of") for warning in warnings)
    for batch in data.train_dataloader():
        for source, tokens, targets in rows(batch):
            assert max(len(source), len(tokens)) <= 8
            assert (source[-1], targets[-1], tokens[0]) == (EOS, EOS, BOS)


def test_start_token_bos_and_prompt_of_other_models(folder: Path) -> None:
    config = replace(SMALL, start=0, begin=True, prompt="translate: ")
    data = data_of(folder, tokenizer=config)
    assert data.metadata()["start"] == 0
    pair = data.tokenizer
    dataset = data.dataset("train")
    batch = dataset[[4, 1]]
    (source, tokens, targets), (_, other, _) = rows(batch)
    assert source[0] == BOS
    assert pair.source.decode(source) == f"translate: {EN[0]} 4"
    assert tokens[:2] == other[:2] == [0, BOS]
    assert targets[0] == BOS
    assert pair.decode(other) == f"{DE[1]} 1"
    assert dataset.token_counts[4].tolist() == [len(source), len(targets)]
    assert pair.encode_sources([f"{EN[0]} 4"], 128) == ([source], [False])
    sources, truncated = pair.encode_sources(["a man", "a man " * 30], 30)
    assert truncated == [False, True]
    assert len(sources[1]) == 30 and sources[1][-1] == EOS


@pytest.mark.parametrize("joint", [True, False])
def test_a_checkpoint_restores_the_tokenizers(joint: bool, folder: Path) -> None:
    data = data_of(folder, tokenizer=replace(SMALL, joint=joint), max_length=20)
    torch.save(data.metadata(), folder / "metadata.pt")
    metadata = torch.load(folder / "metadata.pt", weights_only=True)
    assert metadata == data.metadata()
    ids = {"start": BOS, "end": EOS, "padding": 0, "source_padding": 0, "max_length": 20}
    assert {name: metadata[name] for name in ids} == ids
    assert metadata["languages"] == ["en", "de"]
    again = PairTokenizer.from_metadata(metadata)
    assert again.digest == data.tokenizer.digest
    assert again.joint == joint
    assert again.encode_sources(EN, 9) == data.tokenizer.encode_sources(EN, 9)


def test_tokenizers_from_files(folder: Path) -> None:
    files = [folder / "source.json", folder / "target.json"]
    for file, texts in zip(files, (EN, DE), strict=True):
        file.write_text(Tokenizer.train(texts * 3, TokenizerConfig("bpe", 300)).to_json())
    source, target = (Tokenizer.from_file(file) for file in files)
    one = data_of(folder, tokenizer=PairTokenizerConfig(file=str(files[0]))).tokenizer
    assert one.joint and one.source.digest == source.digest
    config = PairTokenizerConfig(file=str(files[0]), target_file=str(files[1]))
    two = data_of(folder, tokenizer=config)
    assert two.tokenizer.source.digest == source.digest
    assert two.tokenizer.target.digest == target.digest
    metadata = two.metadata()
    sizes = (metadata["source_vocabulary"], metadata["target_vocabulary"])
    assert sizes == (source.vocab_size, target.vocab_size)
    assert metadata["tokenizer_options"]["vocabulary"] == source.vocab_size
    for file in files:
        file.unlink()  # a checkpoint needs none
    data = unprepared(folder, tokenizer=PairTokenizerConfig(**metadata["tokenizer_options"]))
    data.set_metadata(metadata)
    assert data.tokenizer.target.digest == target.digest
    assert not data.tokenizer.joint


def test_options_must_match_the_checkpoint(folder: Path) -> None:
    metadata = data_of(folder).metadata()
    for options, message in (
        ({"max_length": 64}, "max_length is 64.* 128"),
        ({"languages": "de-en"}, "languages is de-en.* en-de"),
        ({"languages": "en:de-AT"}, "languages is en:de-AT.* en-de"),
        ({"tokenizer": replace(SMALL, joint=False)}, "tokenizer.joint False.* joint True"),
        ({"tokenizer": replace(SMALL, start=0)}, "tokenizer.start 0.* start None"),
    ):
        with pytest.raises(UsageError, match=message):
            unprepared(folder, **options).set_metadata(metadata)
    for name in ("train.en", "train.de"):
        (folder / name).unlink()  # what trained the checkpoint is not needed to evaluate it
    data = unprepared(folder)
    data.set_metadata(metadata)
    data.setup("validate")
    assert len(data.dataset("val")) == 21
    assert data.metadata() == metadata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "text"}, "source is text"),
        ({"source": "files"}, "--data.languages is missing"),
        ({"source": "files", "languages": "en"}, "--data.languages is en,"),
        ({"languages": "en-"}, "--data.languages is en-,"),
        ({"languages": "en-de"}, "en-fr.*en-de"),
        ({"path": "multi30k"}, "source dates"),
        ({"max_length": 3}, "max_length is 3"),
        ({"loading": TextLoading(batch_tokens=100)}, "batch_tokens is 100"),
        ({"loading": TextLoading(batch_tokens=256, buckets=False)}, "buckets"),
        ({"loading": TextLoading(multiple=0)}, "multiple is 0"),
        ({"tokenizer": PairTokenizerConfig(start=500, vocabulary=400)}, "start is 500"),
    ],
)
def test_options_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        TranslationData(**{"tokenizer": SMALL, **options}).setup("fit")


def test_requests_that_need_something_else(folder: Path) -> None:
    with pytest.raises(UsageError, match="predict"):
        unprepared(folder).setup("predict")
    with pytest.raises(UsageError, match="target_file"):
        PairTokenizerConfig(target_file="x")


def test_dates_need_no_option() -> None:
    data = TranslationData(tokenizer=SMALL)
    data.prepare_data()
    data.setup("fit")
    assert data.metadata()["languages"] == ["en", "fr"]
    assert data.origin == "embedded"
    assert len(data.dataset("train")) == 8000
    assert data.dataset("train").truncated == 0
    batch = next(iter(data.val_dataloader()))
    assert batch["text"][0].isascii()
    assert len(data.dataset("val")) == 500


def test_multi30k_is_hardly_padded(real_data: Path) -> None:
    options: dict[str, Any] = {"tokenizer": PairTokenizerConfig("word", vocabulary=8000)}
    loading = TextLoading(batch_tokens=2048, multiple=1)
    for changes, limit in (({"loading": loading, "max_length": 64}, 0.03), ({}, 0.05)):
        data = TranslationData("files", str(real_data / "multi30k"), "en-de", **options, **changes)
        data.setup("fit")
        assert len(data.dataset("train")) == 29_000
        assert data.padding_share() < limit
