"""SentencePiece models, as Marian has them: ids are those of its own package."""

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from datamodules.tokenizers import PairTokenizer, PairTokenizerConfig, Tokenizer
from datamodules.utils.errors import DataError
from tests.datamodules.tokenizers.test_tokenizers import TEXTS, encode

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
    *TEXTS,
]


def train(folder: Path, name: str, texts: list[str], size: int = 60, **options: Any) -> Path:
    """A trained model, `NAME.spm`."""
    model = BytesIO()
    options = {"vocab_size": size, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, **options
    )
    path = folder / f"{name}.spm"
    path.write_bytes(model.getvalue())
    return path


def marian(folder: Path) -> Any:
    """Marian's own tokenizer, of files in a folder."""
    from transformers import MarianTokenizer

    pieces = dict.fromkeys(("</s>", "<unk>", ">>deu<<"))
    for name, texts in (("source", ENGLISH), ("target", GERMAN)):
        model = sentencepiece.SentencePieceProcessor(model_file=str(train(folder, name, texts)))
        for i in range(model.vocab_size()):
            if not model.is_control(i) and not model.is_unknown(i):
                pieces[model.id_to_piece(i)] = None
    vocab = {piece: number for number, piece in enumerate((*pieces, "<pad>"))}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    files = {"source_spm": str(folder / "source.spm"), "target_spm": str(folder / "target.spm")}
    return MarianTokenizer(**files, vocab=str(folder / "vocab.json"))


@pytest.mark.parametrize("normalization", ["nmt_nfkc", "identity"])
def test_ids_are_those_of_the_package(normalization: str, tmp_path: Path) -> None:
    path = train(tmp_path, "only", ENGLISH, normalization_rule_name=normalization)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = Tokenizer.from_json(Tokenizer.from_file(path).to_json())
    assert ours.vocab_size == theirs.vocab_size()
    for text in ENGLISH[:3] + ODD:
        assert encode(ours, text) == theirs.encode(text), text
    for text in ENGLISH[:3]:
        assert ours.decode(theirs.encode(text)) == text
    assert [word.strip() for word in ours.unknown_words("the ж cat ж")] == ["ж"]


def test_marian_has_two_models_and_one_vocabulary(tmp_path: Path) -> None:
    theirs = marian(tmp_path)
    pad = theirs.pad_token_id
    files = {"file": str(tmp_path / "source.spm"), "target_file": str(tmp_path / "target.spm")}
    config = PairTokenizerConfig(start=pad, **files)
    pair = PairTokenizer.load_or_train(list, list, config)
    assert pair.source.vocab == pair.target.vocab == theirs.encoder
    assert pair.source.vocab_size == pair.target.vocab_size == len(theirs.encoder)
    assert (pair.eos_id, pair.metadata()["pad_id"], pair.decoder_start_id) == (0, pad, pad)
    texts = [*ENGLISH[:3], "the dog sat", ">>deu<< Where is the cat?", "ж"]
    expected = [theirs(text)["input_ids"] for text in texts]
    assert pair.encode_sources(texts, 100) == (expected, [False] * len(texts))
    assert expected[4][0] == theirs.encoder[">>deu<<"]
    assert theirs.unk_token_id in expected[5]
    for text in GERMAN[:3]:
        ids = theirs(text_target=text)["input_ids"]
        assert pair.build_target(encode(pair.target, text), 100) == [pad, *ids]
        assert pair.decode(ids) == text
    control = set(pair.source.special_ids.known().values()) - {pair.source.special_ids.unk}
    for text in ("a </s> b", "</s>", "<pad><unk>x</s>"):  # typed in a text they are text
        assert not control & set(encode(pair.source, text))
    own = {piece: i for i, piece in enumerate(["</s>", "<unk>", "▁der", "▁auf", "<pad>"])}
    (tmp_path / "target_vocab.json").write_text(json.dumps(own))
    assert Tokenizer.from_file(tmp_path / "source.spm").vocab == theirs.encoder
    assert Tokenizer.from_file(tmp_path / "target.spm").vocab == own


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    bpe = train(tmp_path, "bpe", ENGLISH, model_type="bpe").read_bytes()
    model = train(tmp_path, "source", ENGLISH).read_bytes()
    path = tmp_path / "wrong.spm"
    for content in (bpe, b"", b"hello", model[: len(model) // 2], b"\xff" * 10_000_000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"wrong.spm"):
            Tokenizer.from_file(path)
    gaps = '{"</s>": 0, "<unk>": 1, "a": 7}'
    no_unknown = '{"</s>": 0, "a": 1}'
    for text in (gaps, no_unknown, "{", "[]", '{"a": []}', "[" * 100_000):
        (tmp_path / "vocab.json").write_text(text)
        with pytest.raises(DataError, match=r"source.spm"):
            Tokenizer.from_file(tmp_path / "source.spm")
    os.mkfifo(tmp_path / "pipe.spm")
    with pytest.raises(DataError, match=r"pipe.spm"):
        Tokenizer.from_file(tmp_path / "pipe.spm")


@pytest.mark.parametrize(
    "option", ["byte_fallback", "treat_whitespace_as_suffix", "add_dummy_prefix"]
)
def test_models_that_split_in_another_way_are_refused(option: str, tmp_path: Path) -> None:
    size = 400 if option == "byte_fallback" else 60
    path = train(tmp_path, "a", ENGLISH, size, **{option: option != "add_dummy_prefix"})
    with pytest.raises(DataError, match=option):
        Tokenizer.from_file(path)


def test_symbols_of_ones_own(tmp_path: Path) -> None:
    """SentencePiece never splits them; control symbols stay text, whatever they are."""
    path = train(tmp_path, "own", ENGLISH, user_defined_symbols=["at"])
    with pytest.raises(DataError, match="user-defined symbol 'at'"):
        Tokenizer.from_file(path)
    path = train(tmp_path, "control", ENGLISH, control_symbols=["(x"])
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert Tokenizer.from_file(path).encode_batch(ENGLISH) == model.encode(ENGLISH)
