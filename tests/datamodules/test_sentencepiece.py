"""SentencePiece models, as Marian has them: equal to what it makes of texts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from datamodules.tokenizers import PairTokenizer, PairTokenizerConfig, Tokenizer
from datamodules.utils.errors import DataError
from tests.datamodules.test_tokenizers import TEXTS

ENGLISH = [
    "The cat sat on the mat.",
    "A dog and 12 cats, on the road!",
    "Where is the station?",
] * 20
GERMAN = [
    "Die Katze saß auf der Matte.",
    "Ein Hund und 12 Katzen, auf der Straße!",
    "Wo ist der Bahnhof?",
] * 20
ODD = [
    "",
    "  The  cat\tsat \n on the mat. ",
    "ﬁve ｆｕｌｌ １２ cats…",
    "the catcatcat ▁ on the dog-station",
    "Ünknown ж 👩‍👩‍👧 letters",
    "a typed </s> or <unk> or <pad> is text",
    *TEXTS,
]


def train(folder: Path, name: str, texts: list[str], size: int = 60, **options: Any) -> Path:
    """A trained file, `NAME.spm`."""
    from io import BytesIO

    model, path = BytesIO(), folder / f"{name}.spm"
    more = {"vocab_size": size, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, **more
    )
    path.write_bytes(model.getvalue())
    return path


def marian(folder: Path) -> Any:
    """Marian's own tokenizer, of files in a folder."""
    from transformers import MarianTokenizer

    pieces = dict.fromkeys(("</s>", "<unk>", ">>deu<<"))
    for name, texts in (("source", ENGLISH), ("target", GERMAN)):
        model = sentencepiece.SentencePieceProcessor(model_file=str(train(folder, name, texts)))
        numbers = range(model.vocab_size())
        pieces |= dict.fromkeys(
            model.id_to_piece(i)
            for i in numbers
            if not model.is_control(i) and not model.is_unknown(i)
        )
    numbers = {piece: number for number, piece in enumerate((*pieces, "<pad>"))}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    files = {"source_spm": str(folder / "source.spm"), "target_spm": str(folder / "target.spm")}
    return MarianTokenizer(**files, vocab=str(folder / "vocab.json"))


@pytest.mark.parametrize("norm", ["nmt_nfkc", "identity"])
def test_pieces_are_those_of_the_package(norm: str, tmp_path: Path) -> None:
    path = train(tmp_path, "only", ENGLISH, normalization_rule_name=norm)
    theirs, ours = (
        sentencepiece.SentencePieceProcessor(model_file=str(path)),
        Tokenizer.from_file(path),
    )
    ours = Tokenizer.from_json(ours.to_json())
    assert ours.vocab_size == theirs.vocab_size()
    for text in ENGLISH[:3] + ODD:
        if (
            "</s>" not in text and "<unk>" not in text
        ):  # one word there, as brackets part words here
            assert ours.encode_batch([text]) == [theirs.encode(text)], text
    for text in ENGLISH[:3]:
        assert ours.decode(theirs.encode(text)) == text


def test_marian_has_two_files_and_one_numbering(tmp_path: Path) -> None:
    theirs = marian(tmp_path)
    config = PairTokenizerConfig(
        file=str(tmp_path / "source.spm"),
        target_file=str(tmp_path / "target.spm"),
        start=len(theirs.encoder) - 1,
    )
    pair = PairTokenizer.load_or_train(list, list, config)
    assert pair.source.vocab_size == pair.target.vocab_size == len(theirs.encoder)
    assert pair.source.vocab == pair.target.vocab == theirs.encoder
    assert (pair.eos_id, pair.metadata()["padding"], pair.decoder_start_id) == (
        0,
        theirs.pad_token_id,
        theirs.pad_token_id,
    )
    texts = [*ENGLISH[:3], "the dog sat", ">>deu<< Where is the cat?", "ж"]
    expected = [theirs(text)["input_ids"] for text in texts]
    assert pair.encode_sources(texts, 100) == (expected, [False] * len(texts))
    assert expected[4][0] == theirs.encoder[">>deu<<"] and theirs.unk_token_id in expected[5]
    for text in GERMAN[:3]:
        ids = theirs(text_target=text)["input_ids"]
        assert pair.build_target(pair.target.encode_batch([text])[0], 100) == [
            pair.decoder_start_id,
            *ids,
        ]
        assert (
            pair.decode(ids)
            == text
            == theirs.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
        )


def test_what_a_text_says_is_text(tmp_path: Path) -> None:
    marian(tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path / "source.spm")
    control = set(tokenizer.special_ids.known().values()) - {tokenizer.special_ids.unk}
    for text in ("a </s> b", "</s>", "<pad><unk>x</s>"):
        assert not control & set(tokenizer.encode_batch([text])[0])


def test_targets_may_have_numbers_of_their_own(tmp_path: Path) -> None:
    marian(tmp_path)
    numbers = json.loads((tmp_path / "vocab.json").read_text())
    few = {piece: number for number, piece in enumerate(["</s>", "<unk>", "▁der", "▁auf", "<pad>"])}
    (tmp_path / "target_vocab.json").write_text(json.dumps(few))
    assert Tokenizer.from_file(tmp_path / "source.spm").vocab == numbers
    assert Tokenizer.from_file(tmp_path / "target.spm").vocab == few


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    wrong = train(tmp_path, "bpe", ENGLISH, model_type="bpe").read_bytes()
    right = train(tmp_path, "source", ENGLISH).read_bytes()
    path = tmp_path / "wrong.spm"
    contents = (wrong, b"", b"hello", right[: len(right) // 2], b"\xff" * 100, b"\xff" * 10_000_000)
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"wrong.spm"):
            Tokenizer.from_file(path)
    gaps, no_unknown = '{"</s>": 0, "<unk>": 1, "a": 7}', '{"</s>": 0, "a": 1}'
    for text in (gaps, no_unknown, "{", "[]", '{"a": []}', "[" * 100_000):
        (tmp_path / "vocab.json").write_text(text)
        with pytest.raises(DataError, match=r"source.spm"):
            Tokenizer.from_file(tmp_path / "source.spm")
    os.mkfifo(tmp_path / "pipe.spm")
    with pytest.raises(DataError, match=r"pipe.spm.*Not a regular file"):
        Tokenizer.from_file(tmp_path / "pipe.spm")
