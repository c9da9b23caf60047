"""Batches of pairs: what is in them, how little is padded, and what a checkpoint keeps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datamodules.text import TextLoading
from datamodules.tokenizers import PairTokenizerConfig, Tokenizer, TokenizerConfig
from datamodules.translation import TranslationData
from datamodules.utils.errors import UsageError
from tests.helpers.refusals import refused
from tests.helpers.tables import table_bytes

BOS = 5
EOS = 6
IGNORED = -100
SMALL = PairTokenizerConfig(vocabulary=400)
EN = ["a man", "two dogs run", "the street is wet", "a woman in a red coat waits at the corner"]
DE = ["ein Mann", "zwei Hunde rennen auf der Wiese und bellen", "nass", "eine Frau wartet hier"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """240 pairs for training, 21 for validation, with another number on each line."""
    for split, size, first in (("train", 240, 0), ("val", 21, 1000)):
        for name, texts in (("en", EN), ("de", DE)):
            lines = [f"{texts[i % 4]} {i + first}\n" for i in range(size)]
            (tmp_path / f"{split}.{name}").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def unprepared(folder: Path, languages: str = "en-de", **options: Any) -> TranslationData:
    options = {"tokenizer": SMALL, "loading": TextLoading(multiple=2), **options}
    return TranslationData("txt", str(folder), languages, **options)


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


@pytest.mark.parametrize("languages", [None, "en"])
def test_two_languages_are_named_in_both_directions(folder: Path, languages: str | None) -> None:
    with refused(UsageError, "target, --data.languages de-en or --data.languages en-de."):
        TranslationData(path=str(folder), languages=languages)
    (folder / "train.fr").touch()
    with refused(UsageError, "such as en-de"):
        TranslationData(path=str(folder), languages=languages)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_two_columns_are_named_in_both_directions(suffix: str, tmp_path: Path) -> None:
    pair = {"en": "two", "pt-BR": "dois"}
    path = tmp_path / f"train{suffix}"
    for row in (pair, {"id": 1, "translation": pair}):
        if suffix != ".csv" or row is pair:  # where all cells are text
            path.write_bytes(table_bytes([row], suffix))
            with refused(UsageError, "--data.languages en:pt-BR or --data.languages pt-BR:en."):
                TranslationData(path=str(path))
    path.write_bytes(table_bytes([{**pair, "fr": "deux"}], suffix))
    with refused(UsageError, "such as en-de"):
        TranslationData(path=str(path))


@pytest.mark.parametrize("content", ["", "en,en\n", "en,de\n"])
def test_columns_that_cannot_be_read_are_not_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(content)
    with refused(UsageError, "such as en-de"):
        TranslationData(path=str(path))


@pytest.mark.parametrize("content, texts", [
    ('plain\teben\n"a ""quoted"" word"\tein Wort\n', ["plain", 'a "quoted" word']),  # by a program
    ('"Hello."\t"Hallo."\nplain\teben\n', ['"Hello."', "plain"]),
    ('"Hi" he said\tsagte er\n"a ""b"""\tb\n', ['"Hi" he said', '"a ""b"""']),
])  # fmt: skip
def test_quotation_marks_in_tsv(content: str, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("en\tde\n" + content)
    data = TranslationData(path=str(tmp_path / "train.tsv"), languages="en-de")
    source, _ = data.source.records("train").columns
    assert source.to_pylist() == texts


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
    assert data.padding_fraction() == pytest.approx(1 - kept / padded)


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
    assert random.padding_fraction() > 2 * data.padding_fraction()
    other_seed = TextLoading(batch_tokens=256, multiple=1, seed=1)
    others = data_of(folder, max_length=64, loading=other_seed).train_dataloader()
    assert [batch["index"].tolist() for batch in others] != [b["index"].tolist() for b in batches]


def test_long_sides_are_truncated_and_counted(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"^(\d+) of 261 .*--data.max_length") as warnings:
        data = data_of(folder, max_length=5)  # some pairs have two long sides
    count = 0
    for split in ("train", "val"):
        dataset = data.dataset(split)
        long = [any(len(table[i]) > 4 for table in dataset.tables) for i in range(len(dataset))]
        assert dataset.truncated == sum(long)
        count += sum(long)
    assert any(str(warning.message).startswith(f"{count} of") for warning in warnings)
    for batch in data.train_dataloader():
        for source, tokens, targets in rows(batch):
            assert max(len(source), len(tokens)) <= 5
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
