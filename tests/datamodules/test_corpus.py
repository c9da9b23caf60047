"""Corpora for language models: the same batches for any number of ranks, every byte counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.corpus import CorpusData
from datamodules.sources import CorpusOptions
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.corpora import CHARACTERS, PACKINGS, corpus, letters, poem


def tokens_of(loader: Any) -> tuple[list[int], int]:
    """The targets of all batches without padding, and the bytes that they stand for."""
    batches = list(loader)
    targets = torch.cat([batch["targets"] for batch in batches])
    return targets[targets != -100].tolist(), sum(int(batch["bytes"].sum()) for batch in batches)


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(
    "tokenizer",
    [
        TokenizerConfig("bpe", 2000, 1, False),
        CHARACTERS,
        TokenizerConfig("word", 2000, 1, False),
        TokenizerConfig("wordpiece", 500, 2, True),
    ],
    ids=["bpe", "character", "word", "wordpiece"],
)
@pytest.mark.parametrize("packing", PACKINGS)
def test_batches_of_the_reference(packing: str, tokenizer: TokenizerConfig) -> None:
    data = corpus(None, packing, max_length=64, batch_size=12, tokenizer=tokenizer)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    metadata = data.metadata()
    stored = {"tokenizer", "tokenizer_options", "vocabulary", "pad_id", "max_length"}
    assert set(metadata) == {*stored, "marks_documents", "packing", "training_digest"}
    assert metadata["marks_documents"] is True
    assert metadata["vocabulary"] == data.tokenizer.vocab_size
    assert metadata["pad_id"] == 0
    names = ["tokens", "targets"] + ["documents", "positions"] * (packing == "documents")
    batches = list(data.train_dataloader())
    full = len(data.dataset("train")) // 12
    rest = len(data.dataset("train")) % 12 if packing == "documents" else 0
    assert len(batches) == data.train_batches() == full + (rest > 0)
    shapes = {**dict.fromkeys(names, (12, 64)), "bytes": (12,)}
    for batch in batches[:full]:
        assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
        assert {value.dtype for value in batch.values()} == {torch.int64}
    marks = [data.tokenizer.special_ids.bos, data.tokenizer.special_ids.eos]
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        targets, text_bytes = tokens_of(loader)
        text = "".join(piece.text for piece in data.source.split(split))
        assert text_bytes == len(text.encode())
        file = data.token_file(split)
        assert len(targets) == len(file.tokens) - (len(file) if packing == "documents" else 1)
        assert all(file[i][[0, -1]].tolist() == marks for i in range(len(file)))
    if packing == "documents":
        padded = torch.cat([batch["targets"] for batch in batches]) == -100
        assert data.padding_fraction() == pytest.approx(float(padded.double().mean()))
    else:
        assert data.padding_fraction() == 0


def test_one_document_has_no_special_tokens_and_its_end_is_held_back(tmp_path: Path) -> None:
    """As nanoGPT prepares tiny Shakespeare."""
    path = poem(tmp_path)
    text = path.read_text()
    data = corpus(path)
    data.setup("fit")
    assert data.metadata()["marks_documents"] is False
    cut = int(len(text) * 0.9)
    decode = data.tokenizer.decode
    assert decode(data.token_file("train").tokens.tolist()) == text[:cut]
    assert decode(data.token_file("val").tokens.tolist()) == text[cut:]
    assert decode(tokens_of(data.val_dataloader())[0]) == text[cut + 1 :]
    with pytest.warns(UserWarning, match="test split"):
        data.setup("test")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("kind", "first"), [("bpe", None), ("character", "é"), ("word", "été")])
def test_bytes_leave_out_a_first_token_that_nothing_predicts(
    packing: str, kind: Any, first: str | None, tmp_path: Path
) -> None:
    text = "été der Rosen, und kein anderer Sommer. " * 200
    (tmp_path / "a.txt").write_text(text)
    tokenizer = TokenizerConfig(kind, 300, 1, False)
    data = corpus(tmp_path / "a.txt", packing, dataset=CorpusOptions(), tokenizer=tokenizer)
    data.setup("fit")
    held_out = text[int(len(text) * 0.9) :]
    assert held_out.startswith("été")
    if first is None:  # byte-level pieces spell each byte as a character
        first_token = data.token_file("val").tokens[:1]
        size = len(data.tokenizer.convert_ids_to_tokens(first_token)[0])
    else:
        size = len(first.encode())
    assert tokens_of(data.val_dataloader())[1] == len(held_out.encode()) - size


def test_a_tokenizer_of_one_special_token(tmp_path: Path) -> None:
    """GPT-2's <|endoftext|> is between documents, once, and before the first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["0 1 2"], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(file=str(tmp_path / "tokenizer.json"))
    data = corpus(letters(tmp_path), "documents", tokenizer=config, max_length=1000)
    data.setup("fit")
    end = data.tokenizer.special_ids.eos
    assert end == data.tokenizer.special_ids.bos == data.metadata()["pad_id"] == data.pad_id
    file = data.token_file("train")
    assert file.unknown == 0  # though the token is GPT-2's for that, too
    assert file.tokens[0] == end
    assert file.offsets[0] == 1
    assert (file.tokens == end).sum() == len(file)
    batch = data.dataset("train")[list(range(len(data.dataset("train"))))]
    starts = (batch["positions"] == 0) & (batch["documents"] >= 0)
    assert int(starts.sum()) == len(file)
    assert (batch["tokens"][starts] == end).all()


# What is reported if something does not fit.


def test_unknown_characters_are_named(tmp_path: Path) -> None:
    text = "plain words " * 200
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text + "naïve " + text)
    metadata = corpus(tmp_path / "a.txt").metadata()
    (tmp_path / "tokenizer.json").write_text(metadata["tokenizer"])
    given = TokenizerConfig(file=str(tmp_path / "tokenizer.json"))
    from_checkpoint = corpus(tmp_path / "b.txt")
    from_checkpoint.set_metadata(metadata)
    from_file = corpus(tmp_path / "b.txt", tokenizer=given)
    for data in (from_checkpoint, from_file, from_file):  # tokens on disk change nothing
        with pytest.raises(DataError, match=r"'ï' \(U\+00EF\) in the train split of .*b.txt"):
            data.setup("fit")
    lenient = corpus(tmp_path / "b.txt", tokenizer=given, skip_bad=True)
    with pytest.warns(UserWarning, match=r"^3 of 4,32\d tokens .* 'ï'"):
        lenient.setup("fit")
    unk = lenient.tokenizer.special_ids.unk
    assert int((lenient.token_file("train").tokens == unk).sum()) == 3
    corpus(tmp_path / "b.txt").setup("fit")  # its own tokenizer learns all there is
    rare = corpus(tmp_path / "b.txt", tokenizer=TokenizerConfig("character", 2000, 2, False))
    with pytest.warns(UserWarning, match="--data.tokenizer.min_frequency 1"):
        rare.setup("fit")
    words = TokenizerConfig("word", 500, 2, False)
    with pytest.warns(UserWarning, match=r"\[UNK\].* bpe"):
        corpus(None, tokenizer=words, max_length=64).setup("fit")


def test_characters_are_encoded_alike_in_both_ways() -> None:
    texts = ["Plain,\n words", "", "[PAD] ï 𝄞\r\n", "e\u0301\0"]
    tokenizer = Tokenizer.train(texts[:2] + ["é"], CHARACTERS)
    tokens, sizes = tokenizer.encode_concatenated(texts)
    lists = tokenizer.encode_batch(texts)
    assert tokens.tolist() == sum(lists, [])
    assert sizes.tolist() == [len(ids) for ids in lists]
    lower = Tokenizer.train(texts, TokenizerConfig("character", 200, 1, True))
    assert lower.encode_concatenated(["A"])[0].tolist() == lower.encode_batch(["a"])[0]
    with pytest.raises(UsageError, match="not UTF-8"):
        tokenizer.encode_concatenated(["\ud800"])


def test_one_document_to_a_model_that_knows_where_documents_end(tmp_path: Path) -> None:
    path = letters(tmp_path)
    metadata = corpus(path, "documents").metadata()
    alone = corpus(path, skip_bad=True)
    alone.set_metadata(metadata)
    unmarked = corpus(path, skip_bad=True, tokenizer=alone.tokenizer_config)
    unmarked.tokenizer = alone.tokenizer
    assert alone.marks_documents and not unmarked.marks_documents
    marked_tokens = alone.token_file("val").tokens.tolist()
    assert marked_tokens[1:-1] == unmarked.token_file("val").tokens.tolist()


def test_too_little_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqr")  # 16 characters to train on, and a window takes 17
    with pytest.raises(UsageError, match="train .*a.txt has 16 .* 17 .*--data.max_length"):
        corpus(path).setup("fit")
    with pytest.raises(UsageError, match="val .*a.txt has 1 .* 2 "):
        corpus(path, max_length=15, dataset=CorpusOptions(val_fraction=0.05)).setup("fit")
    corpus(path, max_length=15).setup("fit")
    path.write_text("\n")
    with pytest.raises(DataError, match=r"a\.txt"):
        corpus(path).setup("fit")


def test_a_text_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = poem(tmp_path)
    data = corpus(path)
    data.source.statistics("train")
    path.write_text(path.read_text()[:-3000])
    with pytest.raises(DataError, match="changed"):
        data.setup("fit")


def test_the_sample_for_the_tokenizer_is_in_millions_of_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 1000)
    data = CorpusData(path=str(tmp_path / "a.txt"), dataset=CorpusOptions(sample=0.002))
    assert len("".join(data.training_texts())) == 2000
