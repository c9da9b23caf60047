"""Files of SentencePiece (Kudo 2018), as Marian has them, read without that package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.utils.files import read_bytes, read_object

SUFFIXES = (".spm", ".model")
UNIGRAM = 1  # the kind of model, in its options
NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # kinds of pieces
SPACE = "\u2581"
NEVER = -1e6  # score of a token that the file does not know, far below those of any cut into pieces that it does


class Piece(NamedTuple):
    """A token: how it is spelled, the logarithm of its probability, and of what kind it is."""

    text: str
    score: float
    kind: int


def read_sentencepiece(path: Path) -> str:
    """Content of a `tokenizer.json` that cuts texts as the file says.

    Marian keeps the numbers of tokens in a `vocab.json` beside it (for targets in `target_vocab.json`, where there is
    one): two files, of source and target, may share it. Pieces that it lacks are not used, where Marian has [UNK].

    Args:
        path: The file.

    Raises:
        ValueError: It is no such file, or holds a model of another kind, or the numbers have gaps.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces, charsmap = read_model(read_bytes(path))
    numbers = _numbers(path) or {piece.text: number for number, piece in enumerate(pieces)}
    if sorted(numbers.values()) != list(range(len(numbers))):
        raise ValueError("the numbers of its tokens have gaps")
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), "<unk>")
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    tokens = sorted(numbers, key=lambda token: numbers[token])
    backend = Tokenizer(
        models.Unigram([(token, scores.get(token, NEVER)) for token in tokens], numbers[unknown])
    )
    cleaned = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap), *cleaned] if charsmap else cleaned
    )
    control = {piece.text for piece in pieces if piece.kind in (UNKNOWN, CONTROL)} | {"<pad>"}
    names = "|".join(name.strip("<>") for name in control)
    # What a text says is text: the bracket of a typed control token becomes a word of its own.
    brackets = pre_tokenizers.Split(Regex(rf"<(?=({names})>)"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(SPACE), brackets])
    backend.decoder = decoders.Metaspace(SPACE)
    backend.add_special_tokens(sorted(control & numbers.keys()))
    backend.add_tokens(
        [token for token in tokens if token.startswith(">>") and token.endswith("<<")]
    )  # languages
    return backend.to_str()


def _numbers(path: Path) -> dict[str, int] | None:
    """Token: number, by the file beside; None where there is none."""
    names = (
        ("target_vocab.json", "vocab.json") if path.name.startswith("target") else ("vocab.json",)
    )
    file = next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    return None if file is None else read_object(file)


def read_model(data: bytes) -> tuple[list[Piece], bytes]:
    """Pieces in the order of their numbers, and what its normaliser replaces, in the spelling of that package.

    Raises:
        ValueError: It is no such file, or holds a model of another kind.
    """
    pieces, kind, charsmap = [], UNIGRAM, b""
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(value))
        elif number == 2:
            kind = dict(_fields(value)).get(3, UNIGRAM)
        elif number == 3:
            charsmap = dict(_fields(value)).get(2, b"")
    if not pieces or kind != UNIGRAM:
        raise ValueError("it is not a unigram model of SentencePiece")
    return pieces, charsmap


def _piece(data: bytes) -> Piece:
    import struct

    found = dict(_fields(data))
    return Piece(
        found[1].decode(), struct.unpack("<f", found.get(2, bytes(4)))[0], found.get(3, NORMAL)
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message of protocol buffers: an integer, or the bytes of anything else."""
    place = 0
    while place < len(data):
        key, place = _integer(data, place)
        if key & 7 == 0:
            value, place = _integer(data, place)
            yield key >> 3, value
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError("it is not a file of SentencePiece")
        size, place = _integer(data, place) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], place)
        if place + size > len(data):
            raise ValueError("it is truncated")
        yield key >> 3, data[place : place + size]
        place += size


def _integer(data: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, seven bits a byte, and the place behind it."""
    value = shift = 0
    while place < len(data):
        byte, place = data[place], place + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("it is not a file of SentencePiece")
    raise ValueError("it is truncated")
