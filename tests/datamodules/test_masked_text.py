"""Texts to pretrain on: every token once, pairs drawn anew in each epoch, nothing of the validation
texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from datamodules.masked_text import Chunks, MaskedTextData, NextSentencePairs
from datamodules.reviews import ReviewData
from datamodules.sources import CORPORA, TextDatasetOptions
from datamodules.text import TextLoading, TokenLists
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import UsageError

WORDS = TokenizerConfig("whitespace", min_frequency=1)
NUM_SPECIAL = 7  # ids below are special tokens


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(f"w{i}" for i in range(3000))], WORDS)


@pytest.fixture(scope="module")
def table() -> TokenLists:
    """Documents of 0 to 60 tokens, no token twice: each says where it is from."""
    lists, first = TokenLists(), NUM_SPECIAL
    for size in (21, 1, 0, 60, 7, 22, 2, 40, 14, 13):
        lists.append(list(range(first, first + size)))
        first += size
    return lists


@pytest.mark.parametrize("max_length", [4, 9, 16, 100])
def test_pieces_hold_every_token_once_and_are_full(
    tokenizer: Tokenizer, table: TokenLists, max_length: int
) -> None:
    dataset = Chunks(table, tokenizer, max_length, multiple=1)
    pieces = [dataset[[i]]["tokens"][0].tolist() for i in range(len(dataset))]
    assert all(piece[0] == 2 and piece[-1] == 3 and len(piece) <= max_length for piece in pieces)
    assert sum((piece[1:-1] for piece in pieces), []) == sum(table, [])
    assert len(pieces) == sum(-(-len(ids) // (max_length - 2)) for ids in table)
    assert dataset.token_counts.tolist() == [len(piece) for piece in pieces]


def spans(batch: dict[str, Tensor], row: int) -> tuple[list[int], list[int]]:
    """The two spans of a sample, taken apart by its segments."""
    tokens, segments, keep = (batch[name][row] for name in ("tokens", "segments", "padding_mask"))
    first, second = tokens[keep & (segments == 0)].tolist(), tokens[keep & (segments == 1)].tolist()
    assert first[0] == 2 and first[-1] == second[-1] == 3 and not segments[~keep].any()
    return first[1:-1], second[:-1]


def test_pairs_follow_each_other_or_are_of_two_documents(
    tokenizer: Tokenizer, table: TokenLists
) -> None:
    dataset = NextSentencePairs(table, tokenizer, 17, multiple=4, seed=3)
    owner = {token: number for number, ids in enumerate(table) for token in ids}
    follows, cuts, others, inner = [], set(), set(), 0
    for epoch in range(40):
        dataset.sampler = type("Epoch", (), {"epoch": epoch})()
        batch = dataset[list(range(len(dataset)))]
        assert (
            batch["tokens"].shape == batch["segments"].shape == batch["padding_mask"].shape
            and len(batch["is_next"]) > 0
        )
        for row in range(len(dataset)):
            first, second = spans(batch, row)
            piece = [int(token) for token in dataset.tokens(row)]
            assert first and second and first == piece[: len(first)]
            if batch["is_next"][row]:
                assert first + second == piece
            else:
                assert owner[second[0]] != owner[first[0]]
                assert (
                    second == list(range(second[0], second[-1] + 1))
                    and owner[second[0]] == owner[second[-1]]
                )
                others.add(owner[second[0]])
                inner += second[0] not in {ids[0] for ids in table if ids}
            if len(piece) > 1:
                follows.append(int(batch["is_next"][row]))
                cuts.add((row, len(first)))
            assert len(first) + len(second) + 3 <= int(dataset.token_counts[row])
    share, sigma = np.mean(follows), 0.5 / len(follows) ** 0.5
    assert abs(share - 0.5) < 4 * sigma
    assert inner > len(follows) / 8  # spans from the middle of another document
    assert others == {
        number for number, ids in enumerate(table) if ids
    }  # every other document is drawn
    full = int((dataset.size == 14).nonzero()[0])
    assert {cut for row, cut in cuts if row == full} == set(range(1, 14))


def test_pairs_follow_from_seed_epoch_and_number(tokenizer: Tokenizer, table: TokenLists) -> None:
    def draws(seed: int, epoch: int, rows: list[int]) -> list[Any]:
        dataset = NextSentencePairs(table, tokenizer, 17, multiple=4, seed=seed)
        dataset.sampler = type("Epoch", (), {"epoch": epoch})()
        return [spans(dataset[rows], i) for i in range(len(rows))]

    assert draws(0, 1, [3, 0, 4]) == draws(0, 1, [3, 0, 4])
    assert draws(0, 1, [0, 3])[1] == draws(0, 1, [3])[0]
    assert len({str(draws(seed, epoch, [3, 4, 5])) for seed in range(3) for epoch in range(3)}) == 9


def test_one_document_makes_no_pairs(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="two documents"):
        NextSentencePairs(TokenLists([[8, 9, 10], []]), tokenizer, 17, 4, 0)


class IncrementalDecoder(LightningModule):
    """Learns nothing, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append((batch["index"].tolist(), batch["tokens"].tolist()))
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_pairs_differ_from_epoch_to_epoch_and_survive_a_resume(tmp_path: Path) -> None:
    documents = [" ".join(f"w{i * j % 97}" for j in range(1, 60)) for i in range(1, 25)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    options |= {
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
    }

    def fit(ckpt: Path | None = None) -> list[Any]:
        data = MaskedTextData(
            "txt",
            str(tmp_path / "text.txt"),
            next_sentence=True,
            max_length=32,
            tokenizer=WORDS,
            loading=TextLoading(batch_tokens=128),
        )
        reader = IncrementalDecoder()
        save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        Trainer(max_epochs=2, callbacks=[save], **options).fit(reader, data, ckpt_path=ckpt)
        return reader.seen

    whole = fit()
    first, second = (
        {i: t for ids, rows in part for i, t in zip(ids, rows, strict=True)}
        for part in halves(whole)
    )
    assert (
        first.keys() == second.keys() and sum(first[i] != second[i] for i in first) > len(first) / 2
    )
    stop = len(whole) // 2 + 3
    assert fit(tmp_path / f"step={stop}.ckpt") == whole[stop:]


def halves(seen: list[Any]) -> tuple[list[Any], list[Any]]:
    return seen[: len(seen) // 2], seen[len(seen) // 2 :]


def write(tmp_path: Path, source: str) -> str | None:
    """Texts for a source: 40 with classes and 10 without, where its format has room for them."""
    texts = [f"text {i} of class {i % 2}, and more words" for i in range(40)]
    more = [f"more {i} without a class" for i in range(10)]
    folder = tmp_path / source
    if source == "reference":
        return None
    folder.mkdir()
    if source == "txt":
        for i, text in enumerate(texts + more):
            path = (
                folder / "train" / ("neg", "pos", "unsup")[2 if i >= 40 else i % 2] / f"{i:02}.txt"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(folder)
    rows = {"train": [{"text": t, "label": i % 2} for i, t in enumerate(texts)]}
    rows["unsupervised"] = [{"text": t, "label": -1} for t in more]
    for split, part in rows.items():
        if source == "jsonl":
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
        elif source == "csv":
            (folder / f"{split}.csv").write_text(
                "text,label\n" + "".join(f'"{r["text"]}",{r["label"]}\n' for r in part)
            )
        else:
            import pyarrow as pa
            from pyarrow import parquet

            parquet.write_table(pa.Table.from_pylist(part), folder / f"{split}.parquet")
    return str(folder)


def described(folder: str) -> None:
    """Renames the column of classes in tables to mood, and says as the hub does what it is."""
    from pyarrow import parquet

    features = {"mood": {"_type": "ClassLabel", "names": ["neg", "pos"]}}
    for path in Path(folder).iterdir():
        rows = parquet.read_table(path).rename_columns(["text", "mood"])
        info = {"huggingface": json.dumps({"info": {"features": features}})}
        parquet.write_table(rows.replace_schema_metadata(info), path)


@pytest.mark.parametrize("source", [*CORPORA, "hub, described"])
def test_corpora(source: str, tmp_path: Path) -> None:
    source, _, more = source.partition(", ")
    path = write(tmp_path, source)
    if more:
        described(str(path))
    options = TextDatasetOptions(
        val_fraction=0.25
    )  # not held back alike by chance where classes are not found
    data = MaskedTextData(source, path, max_length=16, dataset=options, tokenizer=WORDS)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    assert (
        data.metadata()["next_sentence"] is False
        and data.metadata()["vocabulary"] == data.tokenizer.vocab_size
    )
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"tokens", "padding_mask", "index"} and torch.equal(
        batch["padding_mask"], batch["tokens"] != 0
    )
    if path is None:
        data.setup("test")
        return
    train, val = data.source.corpus("train").to_pylist(), data.source.corpus("val").to_pylist()
    reviews = ReviewData(source, path, dataset=options, tokenizer=WORDS)  # type: ignore[arg-type]
    assert val == reviews.source.split("val").column.to_pylist()
    assert sorted(train) == sorted(
        reviews.source.split("train").column.to_pylist()
        + [f"more {i} without a class" for i in range(10)]
    )


def test_plain_files_need_no_classes(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two\nthree\n\n\nfour five\n \nsix\n")
    book = MaskedTextData("txt", str(tmp_path / "book.txt")).source
    assert book.records("train").column.to_pylist() == ["one two\nthree", "four five", "six"]  # type: ignore[union-attr]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "poem.txt").write_text("seven\n\neight")
    folder = MaskedTextData("txt", str(tmp_path)).source
    texts = folder.records("train").column.to_pylist()  # type: ignore[union-attr]
    assert [text.split()[0] for text in texts] == ["one", "seven"]
    (tmp_path / "t.csv").write_text("content\n" + "words\n" * 20)
    (tmp_path / "l.csv").write_text("text,label\n" + "words,\nmore,7\n" * 20 + "a,\n")
    labelled = MaskedTextData("csv", str(tmp_path / "l.csv"), tokenizer=WORDS)
    labelled.setup("fit")
    assert len(labelled.dataset("train")) + len(labelled.dataset("val")) == 41
    data = MaskedTextData("csv", str(tmp_path / "t.csv"), tokenizer=WORDS)
    data.setup("fit")
    assert (len(data.dataset("train")), len(data.dataset("val"))) == (18, 2)


def test_a_checkpoint_of_other_samples_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    metadata = MaskedTextData("csv", path, tokenizer=WORDS).metadata()
    with pytest.raises(
        UsageError, match="next_sentence is True, the checkpoint was trained with False"
    ):
        MaskedTextData("csv", path, next_sentence=True, tokenizer=WORDS).set_metadata(metadata)
    data = MaskedTextData("csv", path, tokenizer=WORDS)
    data.set_metadata(metadata)
    data.setup("fit")
    assert data.metadata() == metadata
    with pytest.raises(UsageError, match="source is reviews"):
        MaskedTextData("reviews")  # type: ignore[arg-type]
