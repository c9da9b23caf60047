"""Batches of pairs: what is in them, that they are exact, resumable and hardly padded, and what a
checkpoint keeps."""

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
EN = [
    "a man",
    "two dogs run",
    "the street is wet",
    "a woman in a red coat waits for the bus at the corner",
]
DE = [
    "ein Mann",
    "zwei Hunde rennen auf der Wiese und bellen",
    "nass",
    "eine Frau wartet an der Ecke auf den Bus",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """240 pairs for training, 21 for validation, with another number on each line."""
    for split, size in (("train", 240), ("val", 21)):
        for name, texts in (("en", EN), ("de", DE)):
            lines = [f"{texts[i % 4]} {i if split == 'train' else i + 1000}\n" for i in range(size)]
            (tmp_path / f"{split}.{name}").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def data_of(folder: Path, stage: str = "fit", **options: Any) -> TranslationData:
    options = {"tokenizer": SMALL, "loading": TextLoading(multiple=2), **options}
    data = TranslationData("files", str(folder), "en-de", **options)
    data.prepare_data()
    data.setup(stage)
    return data


def rows(batch: dict[str, Any]) -> Iterator[tuple[list[int], list[int], list[int], int]]:
    """Source, decoder's input and targets of each pair without padding, and its index."""
    for source, keep, tokens, targets, index in zip(
        *(batch[name] for name in ("source", "source_padding_mask", "tokens", "targets", "index")),
        strict=True,
    ):
        real = targets != IGNORED
        assert not source[~keep].any() and not tokens[~real].any()  # [PAD] is 0
        assert real.int().diff().max() <= 0 and keep.int().diff().max() <= 0  # at the end only
        yield source[keep].tolist(), tokens[real].tolist(), targets[real].tolist(), int(index)


def test_languages_with_a_hyphen(folder: Path) -> None:
    for split in ("train", "val"):
        (folder / f"{split}.de").rename(folder / f"{split}.de-AT")
    data = TranslationData("files", str(folder), "en:de-AT", tokenizer=SMALL)
    data.prepare_data()
    data.setup("fit")
    assert data.metadata()["languages"] == ["en", "de-AT"]
    other = TranslationData("files", str(folder), "en-de", tokenizer=SMALL)
    with pytest.raises(
        UsageError, match="languages is en-de, the checkpoint was trained with en:de-AT"
    ):
        other.set_metadata(data.metadata())


@pytest.mark.parametrize("joint", [True, False])
def test_batches(joint: bool, folder: Path) -> None:
    data = data_of(folder, batch_size=16, tokenizer=replace(SMALL, joint=joint))
    tokenizer, pairs = data.tokenizer, data.source.split("train")
    assert (
        tokenizer.joint == joint and (tokenizer.source.digest == tokenizer.target.digest) == joint
    )
    batches, seen = list(data.train_dataloader()), []
    assert len(batches) == data.train_batches() == 15
    for batch in batches:
        assert {batch[name].dtype for name in ("source", "tokens", "targets", "index")} == {
            torch.int64
        }
        assert (
            batch["tokens"].shape == batch["targets"].shape
            and batch["source_padding_mask"].dtype == torch.bool
        )
        assert (
            batch["source"].shape == batch["source_padding_mask"].shape and "reference" not in batch
        )
        for source, tokens, targets, index in rows(batch):
            text, translation = (column[index].as_py() for column in pairs.columns)
            assert source == [*tokenizer.source.encode_batch([text])[0], EOS]
            assert targets == [*tokenizer.target.encode_batch([translation])[0], EOS]
            assert tokens == [BOS, *targets[:-1]]
            assert (
                tokenizer.source.decode(source) == text and tokenizer.decode(targets) == translation
            )
            seen.append(index)
        for side, keep in (
            ("source", batch["source_padding_mask"]),
            ("tokens", batch["targets"] != IGNORED),
        ):
            width, longest = batch[side].shape[1], int(keep.sum(1).max())
            assert width % 2 == 0 and 0 <= width - longest < 2
    assert sorted(seen) == list(range(240))
    cells = sum(batch["source"].numel() + batch["tokens"].numel() for batch in batches)
    kept = sum(
        int(batch["source_padding_mask"].sum() + (batch["targets"] != IGNORED).sum())
        for batch in batches
    )
    assert data.padding_share() == pytest.approx(1 - kept / cells)


def test_evaluation_has_every_pair_once_with_its_texts_as_they_were_read(folder: Path) -> None:
    data = data_of(folder, max_length=6, loading=TextLoading(eval_batch_size=4))
    found = {}
    for batch in data.val_dataloader():
        assert len(batch["text"]) == len(batch["reference"]) == len(batch["source"]) <= 4
        found.update(
            zip(
                batch["index"].tolist(),
                zip(batch["text"], batch["reference"], strict=True),
                strict=True,
            )
        )
        assert (
            max(batch["source"].shape[1], batch["tokens"].shape[1]) <= 6
        )  # the texts are whole all the same
    assert found == {i: (f"{EN[i % 4]} {i + 1000}", f"{DE[i % 4]} {i + 1000}") for i in range(21)}


def test_batches_hold_as_many_tokens_of_the_longer_side_as_asked_for(folder: Path) -> None:
    data = data_of(folder, max_length=64, loading=TextLoading(batch_tokens=256, multiple=1))
    cells = [
        max(batch["source"].numel(), batch["tokens"].numel()) for batch in data.train_dataloader()
    ]
    assert max(cells) <= 256 and sum(count > 200 for count in cells) >= len(cells) - 1
    assert len(cells) == data.train_batches()
    plain = data_of(folder, max_length=64, loading=TextLoading(buckets=False, multiple=1))
    assert plain.padding_share() > 3 * data.padding_share()


def test_batches_follow_from_seed_and_step_and_can_be_entered_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = TextLoading(batch_tokens=300, seed=3)

    def batches(place: dict[str, int] | None = None, **changes: Any) -> list[list[int]]:
        data = data_of(folder, max_length=64, loading=replace(loading, **changes))
        if place is not None:
            data._samples = 240
            data.load_state_dict({**data.batch_layout(1), **place})
        return [batch["index"].tolist() for batch in data.train_dataloader()]

    whole = batches()
    assert batches() == whole and batches(seed=4) != whole
    read: list[int] = []
    real = PairTokenizer.build_source
    monkeypatch.setattr(
        PairTokenizer, "build_source", lambda *given: read.append(1) or real(*given)
    )
    for number in (1, 7, len(whole) - 1):
        read.clear()
        assert batches({"epoch": 0, "batch": number}) == whole[number:]
        assert len(read) == sum(map(len, whole[number:]))  # what came before is not even looked at
    with pytest.raises(UsageError, match="batch_tokens 300, this run has 400"):
        data = data_of(folder, max_length=64, loading=replace(loading, batch_tokens=400))
        data.load_state_dict(
            {"batch_size": 64, "world_size": 1, "samples": 240, "batch_tokens": 300}
        )
        data.train_dataloader()


def test_ranks_share_each_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = TextLoading(batch_tokens=150, multiple=4)
    taken = []
    for rank in range(3):
        data = data_of(folder, max_length=64, loading=loading)
        monkeypatch.setattr(data, "_ranks", lambda rank=rank: (3, rank))
        taken.append([batch["index"].tolist() for batch in data.train_dataloader()])
    assert len({len(batches) for batches in taken}) == 1
    assert sorted(index for batches in taken for batch in batches for index in batch) == list(
        range(240)
    )
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in zip(*taken, strict=True))


def test_long_sides_are_truncated_counted_and_said_once(folder: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=r"^\d+ of 261 pairs have a side of more than 8 tokens, which was truncated",
    ):
        data = data_of(folder, max_length=8)
    for dataset in (data.dataset("train"), data.dataset("val")):
        lists = [[data.tokenizer.source.decode(row) for row in side] for side in dataset.tables]
        assert len(lists[0]) == len(dataset)
        long = [any(len(side[i]) > 7 for side in dataset.tables) for i in range(len(dataset))]
        assert dataset.truncated == sum(long)
    for batch in data.train_dataloader():
        for source, tokens, targets, _ in rows(batch):
            assert (
                max(len(source), len(tokens)) <= 8
                and source[-1] == targets[-1] == EOS
                and tokens[0] == BOS
            )


def test_what_other_models_have_around_a_text(folder: Path) -> None:
    prompt = "translate: "
    config = replace(
        SMALL, start=0, begin=True, prompt=prompt
    )  # begins with its padding, and has [BOS] before texts
    data = data_of(folder, tokenizer=config)
    assert data.metadata()["start"] == 0
    dataset, text = data.dataset("train"), data.tokenizer.source
    batch = dataset[[4, 1]]
    assert (
        batch["source"][0, 0] == BOS
        and text.decode(batch["source"][0].tolist()) == f"{prompt}{EN[0]} 4"
    )
    assert (
        batch["tokens"][:, :2].tolist() == [[0, BOS]] * 2
        and batch["targets"][:, 0].tolist() == [BOS] * 2
    )
    assert data.tokenizer.decode(batch["tokens"][1].tolist()) == f"{DE[1]} 1"
    (row,), (cut,) = data.tokenizer.encode_sources([f"{EN[0]} 4"], 128)
    assert row == batch["source"][0][batch["source_padding_mask"][0]].tolist() and not cut
    assert (
        dataset.token_counts[[4, 1]]
        == torch.stack([batch["source_padding_mask"].sum(1), (batch["targets"] >= 0).sum(1)], 1)
    ).all()
    rows, cut = data.tokenizer.encode_sources(["a man", "a man " * 30], 30)
    assert cut == [False, True] and len(rows[1]) == 30 and rows[1][-1] == EOS


def test_tokenizers_from_files(folder: Path, tmp_path: Path) -> None:
    files = []
    for name, texts in (("source", EN), ("target", DE)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(
            Tokenizer.train(texts * 3, TokenizerConfig("bpe", 300)).to_json(), encoding="utf-8"
        )
    first, second = (Tokenizer.from_file(file) for file in files)
    one = data_of(folder, tokenizer=PairTokenizerConfig(file=str(files[0])))
    assert one.tokenizer.joint and one.tokenizer.source.digest == first.digest
    two = data_of(
        folder, tokenizer=PairTokenizerConfig(file=str(files[0]), target_file=str(files[1]))
    )
    assert not two.tokenizer.joint
    assert (two.tokenizer.source.digest, two.tokenizer.target.digest) == (
        first.digest,
        second.digest,
    )
    metadata = two.metadata()
    assert (metadata["source_vocabulary"], metadata["target_vocabulary"]) == (
        first.vocab_size,
        second.vocab_size,
    )
    assert metadata["tokenizer_options"]["vocabulary"] == first.vocab_size
    for file in files:
        file.unlink()  # a checkpoint needs none
    data = TranslationData(
        "files",
        str(folder),
        "en-de",
        tokenizer=PairTokenizerConfig(**metadata["tokenizer_options"]),
    )
    data.set_metadata(metadata)
    data.setup("validate")
    assert data.tokenizer.target.digest == second.digest and not data.tokenizer.joint
    with pytest.raises(UsageError, match="target_file needs a file"):
        PairTokenizerConfig(target_file="x")


def test_facts_are_primitives_that_make_the_tokenizers_again(folder: Path, tmp_path: Path) -> None:
    for joint in (True, False):
        data = data_of(folder, tokenizer=replace(SMALL, joint=joint), max_length=20)
        torch.save(data.metadata(), tmp_path / "metadata.pt")
        metadata = torch.load(tmp_path / "metadata.pt", weights_only=True)
        assert metadata == data.metadata()
        assert (metadata["source_tokenizer"] == metadata["target_tokenizer"]) == joint
        numbers = {
            name: metadata[name]
            for name in ("start", "end", "padding", "source_padding", "max_length")
        }
        assert numbers == {
            "start": BOS,
            "end": EOS,
            "padding": 0,
            "source_padding": 0,
            "max_length": 20,
        }
        assert metadata["languages"] == ["en", "de"]
        again = PairTokenizer.from_metadata(metadata)
        assert (
            again.digest == data.tokenizer.digest
            and again.joint == joint
            and again.decoder_start_id == BOS
        )
        assert again.encode_sources(EN, 9) == data.tokenizer.encode_sources(EN, 9)


def test_data_and_checkpoint_must_agree(folder: Path, tmp_path: Path) -> None:
    metadata = data_of(folder).metadata()
    for options, words in (
        ({"max_length": 64}, "max_length is 64, the checkpoint was trained with 128"),
        ({"languages": "de-en"}, "languages is de-en, the checkpoint was trained with en-de"),
        (
            {"tokenizer": replace(SMALL, joint=False)},
            "tokenizer.joint False .* made with joint True",
        ),
        (
            {"tokenizer": replace(SMALL, start=0)},
            "tokenizer.start 0 .* made with start None",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            TranslationData(
                "files", str(folder), **{"languages": "en-de", "tokenizer": SMALL, **options}
            ).set_metadata(metadata)
    (folder / "train.en").unlink()  # what trained the checkpoint is not needed to measure it
    (folder / "train.de").unlink()
    data = TranslationData("files", str(folder), "en-de", tokenizer=SMALL)
    data.set_metadata(metadata)
    data.setup("validate")
    assert len(data.dataset("val")) == 21 and data.metadata() == metadata


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "text"}, "source is text, but must be one of dates, files, table, hub"),
        (
            {"source": "files"},
            "--data.languages is missing, but must be source and target, such as en-de",
        ),
        ({"source": "files", "languages": "en"}, "--data.languages is en, "),
        ({"languages": "en-"}, "--data.languages is en-, "),
        ({"languages": "en-de"}, "en-fr or fr-en, not en-de"),
        ({"path": "multi30k"}, "the source dates has no files"),
        ({"max_length": 3}, "max_length is 3"),
        (
            {"loading": TextLoading(batch_tokens=100)},
            "batch_tokens is 100, but must be at least max_length",
        ),
        ({"tokenizer": PairTokenizerConfig(start=8000)}, "start is 8000, but must be one of its"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, DataError), match=words):
        TranslationData(**options).setup("fit")


def test_nothing_to_predict(folder: Path) -> None:
    with pytest.raises(UsageError, match="translate texts with a checkpoint"):
        TranslationData("files", str(folder), "en-de").setup("predict")


def test_dates_need_no_option() -> None:
    data = TranslationData(tokenizer=PairTokenizerConfig(vocabulary=500))
    data.prepare_data()
    data.setup("fit")
    assert data.metadata()["languages"] == ["en", "fr"] and data.origin == "embedded"
    assert len(data.dataset("train")) == 8000 and data.dataset("train").truncated == 0
    (batch, *_) = data.val_dataloader()
    assert batch["text"][0].isascii() and len(data.dataset("val")) == 500


def test_the_tokens_are_kept_on_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    first = data_of(folder)
    files = sorted((tmp_path / "cache").rglob("*.*"))
    assert len(files) == 1 + 2 * 2  # a tokenizer, and the tokens of two sides of two splits

    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Tokenizer, "encode_chunks", fail)
    again = data_of(folder)
    assert sorted((tmp_path / "cache").rglob("*.*")) == files
    assert torch.equal(
        first.dataset("train")[[3, 5]]["tokens"], again.dataset("train")[[3, 5]]["tokens"]
    )


def test_all_arguments_are_options_of_the_command_line() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TranslationData, "data")
    names = {
        "source",
        "path",
        "languages",
        "batch_size",
        "max_length",
        "skip_bad",
        "dataset.test",
        "dataset.subset",
    }
    names |= {"tokenizer.joint", "tokenizer.kind", "tokenizer.target_file", "loading.batch_tokens"}
    found = parser.get_defaults()
    assert {f"data.{name}" for name in names} <= set(found.keys()) and found[
        "data.tokenizer.kind"
    ] == "bpe"
    text = " ".join(parser.format_help().split())
    for words in (
        "trained from both",
        "of pairs the tokens of the longer side",
        "Number of tokens at most",
    ):
        assert words in text, words


def test_multi30k_is_hardly_padded(real_data: Path) -> None:
    tokenizer = PairTokenizerConfig("word", vocabulary=8000)
    loading = TextLoading(batch_tokens=2048, multiple=1)
    options: dict[str, Any] = {"tokenizer": tokenizer, "loading": loading, "max_length": 64}
    data = TranslationData("files", str(real_data / "multi30k"), "en-de", **options)
    data.setup("fit")
    assert len(data.dataset("train")) == 29_000
    assert data.padding_share() < 0.03
    data = TranslationData("files", str(real_data / "multi30k"), "en-de", tokenizer=tokenizer)
    data.setup("fit")
    assert data.padding_share() < 0.05
