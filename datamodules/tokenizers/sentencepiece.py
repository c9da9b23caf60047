"""SentencePiece models (Kudo 2018), as Marian has them, converted to a `tokenizer.json`."""

import re
from pathlib import Path

from datamodules.utils.extras import requires_extra
from datamodules.utils.files import read_bytes, read_object

SUFFIXES = (".spm", ".model")
METASPACE = "\u2581"  # how a piece spells a space
UNUSED_SCORE = -1e6  # of tokens that the model lacks: far below any segmentation without them


def convert_sentencepiece(path: Path) -> str:
    """Content of a `tokenizer.json` that splits texts as a SentencePiece model does.

    Marian keeps the ids of tokens in a `vocab.json` beside it (for targets in `target_vocab.json`,
    if there is one): the models of source and target may share it. Pieces that it lacks are not
    used; they become [UNK]. Raises `ValueError` if it is not a unigram model, was trained with
    options that Marian does not use, or the ids have gaps.
    """
    with requires_extra("sentencepiece"):
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = ModelProto.FromString(read_bytes(path))
    if not model.pieces or model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        raise ValueError("it is not a unigram model of SentencePiece")
    settings = model.normalizer_spec
    others = {
        "byte_fallback": model.trainer_spec.byte_fallback,
        "treat_whitespace_as_suffix": model.trainer_spec.treat_whitespace_as_suffix,
        "add_dummy_prefix": not settings.add_dummy_prefix,
        "remove_extra_whitespaces": not settings.remove_extra_whitespaces,
    }
    if unusual := [name for name, is_unusual in others.items() if is_unusual]:
        raise ValueError(f"its option {unusual[0]} has a value that is not supported")
    kinds = ModelProto.SentencePiece
    unknown = next((piece.piece for piece in model.pieces if piece.type == kinds.UNKNOWN), "<unk>")
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == kinds.NORMAL}
    own = [piece.piece for piece in model.pieces if piece.type == kinds.USER_DEFINED]
    if own := [piece for piece in own if not is_language(piece)]:
        raise ValueError(f"its user-defined symbol {own[0]!r} is not supported")
    special = {
        piece.piece for piece in model.pieces if piece.type in (kinds.UNKNOWN, kinds.CONTROL)
    }
    special.add("<pad>")

    vocab = _vocabulary_beside(path)
    if not vocab:
        vocab = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError("the ids of its tokens have gaps")
    tokens = sorted(vocab, key=lambda token: vocab[token])

    unigram = [(token, scores.get(token, UNUSED_SCORE)) for token in tokens]
    backend = Tokenizer(models.Unigram(unigram, vocab[unknown]))
    cleanup = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if settings.precompiled_charsmap:
        charsmap = normalizers.Precompiled(settings.precompiled_charsmap)
        cleanup.insert(0, charsmap)
    backend.normalizer = normalizers.Sequence(cleanup)
    # A special token that is typed in a text is split after its bracket, so that it stays text.
    names = "|".join(re.escape(name.strip("<>")) for name in special)
    brackets = pre_tokenizers.Split(Regex(rf"<(?=({names})>)"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(METASPACE), brackets])
    backend.decoder = decoders.Metaspace(METASPACE)
    backend.add_special_tokens(sorted(special & vocab.keys()))
    backend.add_tokens([token for token in tokens if is_language(token)])
    return backend.to_str()


def is_language(token: str) -> bool:
    """Whether a token names a language, as Marian spells it."""
    return token.startswith(">>") and token.endswith("<<")


def _vocabulary_beside(path: Path) -> dict[str, int]:
    """Token: id, from the JSON file beside a model; empty if there is none."""
    names = ["vocab.json"]
    if path.name.startswith("target"):
        names.insert(0, "target_vocab.json")
    for name in names:
        if path.with_name(name).is_file():
            return read_object(path.with_name(name))
    return {}
