"""Reading tokenizers from elsewhere: a `tokenizer.json`, or a folder in Hugging Face's layout."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datamodules.tokenizers.sentencepiece import SUFFIXES, convert_sentencepiece
from datamodules.tokenizers.special_tokens import (
    ALTERNATIVE_NAMES,
    SPECIAL_TOKENS,
    named_special_tokens,
)
from datamodules.tokenizers.tokenizer_config import (
    CONFIG,
    MARIAN,
    add_tokens,
    apply_settings,
    flag,
    tokenizer_class,
)
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import read_object

SPECIAL_TOKENS_KEY = "special_tokens"  # our own key in a tokenizer.json: role: token
PROBE = "a \U00012000"  # to try a tokenizer with; hardly any vocabulary has the second character
MAX_GAPS = 1000  # ids without a token, in addition to as many as there are tokens


def read_tokenizer(path: Path) -> str:
    """Content of a `tokenizer.json`, with the special tokens of other files under its own key.

    `path` is that file, or a SentencePiece model, such as Marian's `source.spm`, or a folder with a
    `tokenizer.json` or the older files: `vocab.txt` of BERT, `vocab.json` and `merges.txt` of
    RoBERTa. Raises `UsageError` if there is none, `DataError` if it cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a tokenizer.json, or a folder with one.")
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json" if path.is_dir() else path
    is_sentencepiece = file.suffix in SUFFIXES
    config = _settings(folder / CONFIG)
    settings = {**_settings(folder / "special_tokens_map.json"), **config}
    if is_sentencepiece:
        with _errors_naming(file):
            content = json.loads(convert_sentencepiece(file))
        name = MARIAN
    else:
        content = _object(file) if file.exists() else json.loads(_older_files(folder, settings))
        name = tokenizer_class(config, _object(folder / "config.json"), content)

    if not (is_sentencepiece and file.name.startswith("target")):  # the settings are the source's
        with _errors_naming(folder):
            apply_settings(content, settings, name, folder)
            older = _object(folder / "added_tokens.json")
            content = add_tokens(content, settings, older, name, folder)
    named = named_special_tokens(settings)
    if named:
        content[SPECIAL_TOKENS_KEY] = named
    return json.dumps(content, ensure_ascii=False)


def _settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file, whose class and special tokens must be strings."""
    settings = _object(file)
    for name in ("tokenizer_class", *(f"{role}_token" for role in SPECIAL_TOKENS)):
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(token, str):
            raise DataError(f"{file}: {name} is {ascii(value)[:60]}, but must be a string.")
    return settings


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        message = f"{file} cannot be read: it is not JSON of a tokenizer ({error})."
        raise DataError(message) from error


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Turns errors of the libraries into a `DataError` that names a file or folder."""
    try:
        yield
    except (DataError, UsageError):
        raise
    except Exception as error:  # the libraries raise nothing more specific
        reason = str(error) or type(error).__name__
        raise DataError(f"the vocabulary in {path} cannot be read ({reason}).") from error


def _older_files(folder: Path, settings: dict[str, Any]) -> str:
    """A tokenizer from the files that were in use before `tokenizer.json`."""
    if (folder / "vocab.txt").is_file():
        with _errors_naming(folder):
            backend = _bert(folder, settings)
        names = set(SPECIAL_TOKENS.values())
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        with _errors_naming(folder):
            backend = _byte_level(folder, settings)
        names = {name for alternatives in ALTERNATIVE_NAMES.values() for name in alternatives}
    else:
        raise UsageError(
            f"{folder} holds no tokenizer.json, vocab.txt, or vocab.json with merges.txt."
        )
    names |= set(named_special_tokens(settings).values())
    backend.add_special_tokens(sorted(names & backend.get_vocab().keys()))
    return backend.to_str()


def _bert(folder: Path, settings: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = str(folder / "vocab.txt")
    backend = Tokenizer(models.WordPiece.from_file(vocab, unk_token=SPECIAL_TOKENS["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=bool(flag(settings, "do_lower_case", True, folder)),
        strip_accents=flag(settings, "strip_accents", None, folder),
        handle_chinese_chars=bool(flag(settings, "tokenize_chinese_chars", True, folder)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _byte_level(folder: Path, settings: dict[str, Any]) -> Any:
    """RoBERTa's and GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Tokenizer(model)
    add_prefix_space = bool(flag(settings, "add_prefix_space", False, folder))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    vocab = backend.get_vocab()
    bos = named_special_tokens(settings).get("bos")
    if {"<s>", "</s>"} <= vocab.keys():  # RoBERTa
        backend.post_processor = processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])
        )
    elif settings.get("add_bos_token") and bos in vocab:
        backend.post_processor = processors.TemplateProcessing(
            f"{bos} $A", None, [(bos, vocab[bos])]
        )
    return backend


def parse_tokenizer(text: str, origin: str) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The tokenizer of the package `tokenizers`, tried on a text.

    Args:
        text: Result of `read_tokenizer`.
        origin: Where it is from, for errors.

    Returns:
        The tokenizer, the content of its file, and the special tokens of other files (role: token).

    Raises:
        DataError: It is not a tokenizer, or the ids of its tokens are impossible.
    """
    from tokenizers import Tokenizer

    try:
        content = json.loads(text)
        named = content.pop(SPECIAL_TOKENS_KEY, {})
        backend = Tokenizer.from_str(json.dumps(content))
        check_ids(backend.get_vocab(), content.get("added_tokens") or [])
        if not all(isinstance(token, str) for token in named.values()):
            raise ValueError("a special token is not a string")
        if not isinstance((content.get("decoder") or content["model"]).get("type", ""), str):
            raise ValueError("the type of its decoder is not a string")
        ids = backend.encode(PROBE).ids
        backend.decode_batch([ids[:1], [], ids])
    except BaseException as error:  # a panic of the package is not an `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error) or type(error).__name__
        raise DataError(f"{origin} is not a tokenizer ({reason}).") from error
    return backend, content, named


def check_ids(vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ValueError` unless ids are unique, with few gaps, and those of the added tokens."""
    if not vocab or len(set(vocab.values())) < len(vocab):
        raise ValueError("it has no tokens, or two with the same id")
    last = max(vocab.values())
    if last > MAX_GAPS + 2 * len(vocab):
        raise ValueError(f"it has a token with the id {last}, but {len(vocab)} tokens in all")
    for entry in added:
        if vocab.get(entry["content"]) != entry["id"]:
            raise ValueError(f"{ascii(entry['content'])} does not have the id {entry['id']}")
