"""Tokenizers that others trained: a `tokenizer.json`, or a folder in Hugging Face's layout."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.tokenizers.control import CONTROL, OTHER_NAMES, named_roles
from datamodules.tokenizers.sentencepiece import SUFFIXES, read_sentencepiece
from datamodules.tokenizers.settings import CONFIG, SPM, add_tokens, flag, follow, tokenizer_class
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import read_object

PROBE = "a \U00012000"  # with a character that hardly any vocabulary has
GAPS = 1000  # numbers that no token has: so many, and as many as there are tokens


def read_tokenizer(path: Path) -> str:
    """Content of a `tokenizer.json`, with what the files beside it say of the control tokens under the key "control".

    Args:
        path: The file, or a folder that holds it, or the files that were in use before it: `vocab.txt` of BERT,
            `vocab.json` and `merges.txt` of RoBERTa. Or a file of SentencePiece, such as Marian's `source.spm`.

    Raises:
        UsageError: It does not exist, or the folder holds no tokenizer. DataError: it cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a tokenizer.json, or a folder with one.")
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    own = _settings(folder / CONFIG)
    settings = {**_settings(folder / "special_tokens_map.json"), **own}
    if file.suffix in SUFFIXES:
        content = json.loads(_made(read_sentencepiece, file))
    else:
        content = _object(file) if file.exists() else json.loads(_older(folder, settings))
    kind = (
        SPM
        if file.suffix in SUFFIXES
        else tokenizer_class(own, _object(folder / "config.json"), content)
    )
    if not (
        file.suffix in SUFFIXES and file.name.startswith("target")
    ):  # the settings are those of the source
        content = _made(followed, folder, content, settings, kind)
    if named := named_roles(settings):
        content["control"] = named
    return json.dumps(content, ensure_ascii=False)


def followed(
    folder: Path, content: dict[str, Any], settings: dict[str, Any], kind: str
) -> dict[str, Any]:
    """The content of a `tokenizer.json` with what the files beside it say; see `datamodules.tokenizers.settings`."""
    follow(content, settings, kind, folder)
    return add_tokens(content, settings, _object(folder / "added_tokens.json"), kind, folder)


def _settings(file: Path) -> dict[str, Any]:
    """The object in a file whose tokens and class are texts."""
    found = _object(file)
    for name in ("tokenizer_class", *(f"{role}_token" for role in CONTROL)):
        value = found.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str) and value is not None:
            raise DataError(f"{file}: {name} is {ascii(value)[:60]}, but must be text.")
    return found


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read: it is not JSON of a tokenizer ({error})."
        ) from error


def _older(folder: Path, settings: dict[str, Any]) -> str:
    """A tokenizer from the files that were in use before `tokenizer.json`."""
    if (folder / "vocab.txt").is_file():
        make, names = _bert, set(CONTROL.values())
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        make, names = _roberta, {name for some in OTHER_NAMES.values() for name in some}
    else:
        raise UsageError(
            f"{folder} holds no tokenizer: it needs tokenizer.json, vocab.txt, or vocab.json with merges.txt."
        )
    backend = _made(make, folder, settings)
    names |= set(named_roles(settings).values())
    backend.add_special_tokens(sorted(names & backend.get_vocab().keys()))
    return backend.to_str()


def _made(make: Callable[..., Any], path: Path, *others: Any) -> Any:
    """What `make` makes of a file or folder.

    Raises:
        DataError: It cannot.
    """
    try:
        return make(path, *others)
    except (DataError, UsageError):
        raise
    except Exception as error:  # the package raises nothing more special
        raise DataError(
            f"the vocabulary in {path} cannot be read ({str(error) or type(error).__name__})."
        ) from error


def _bert(folder: Path, settings: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    backend = Tokenizer(
        models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=CONTROL["unk"])
    )
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=bool(flag(settings, "do_lower_case", True, folder)),
        strip_accents=flag(settings, "strip_accents", None, folder),
        handle_chinese_chars=bool(flag(settings, "tokenize_chinese_chars", True, folder)),
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return backend


def _roberta(folder: Path, settings: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    backend = Tokenizer(
        models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        bool(flag(settings, "add_prefix_space", False, folder))
    )
    backend.decoder = decoders.ByteLevel()
    numbers = backend.get_vocab()
    if {"<s>", "</s>"} <= numbers.keys():  # not in GPT-2's files, which are of the same kind
        sep, cls = ("</s>", numbers["</s>"]), ("<s>", numbers["<s>"])
        backend.post_processor = processors.RobertaProcessing(sep, cls)
    elif settings.get("add_bos_token") and (begin := named_roles(settings).get("bos")) in numbers:
        backend.post_processor = processors.TemplateProcessing(
            f"{begin} $A", None, [(begin, numbers[begin])]
        )
    return backend


def parsed(text: str, origin: str) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The package's own tokenizer.

    Args:
        text: Content of a `tokenizer.json`, and of the key "control", as in `read_tokenizer`.
        origin: Where it is from, for errors.

    Returns:
        The tokenizer, the content without that key, and what is under it.

    Raises:
        DataError: It is not a tokenizer, or the numbers of its tokens are impossible.
    """
    from tokenizers import Tokenizer

    try:
        content = json.loads(text)
        named = content.pop("control", {})
        backend = Tokenizer.from_str(json.dumps(content))
        check_numbers(backend.get_vocab(), content.get("added_tokens") or [])
        if not all(isinstance(token, str) for token in named.values()):
            raise ValueError("a control token is no text")
        if not isinstance((content.get("decoder") or content["model"]).get("type", ""), str):
            raise ValueError("the type of its decoder is no text")
        ids = backend.encode(PROBE).ids
        backend.decode_batch([ids[:1], [], ids])
    except (
        BaseException
    ) as error:  # the package raises nothing more special, and its panics are no `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{origin} is not a tokenizer ({str(error) or type(error).__name__})."
        ) from error
    return backend, content, named


def check_numbers(vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]]) -> None:
    """Checks that tokens have numbers of their own, with few gaps, and added tokens those that they say.

    Args:
        vocabulary: Token: number.
        added: Entries of a `tokenizer.json`.

    Raises:
        ValueError: They have not, or there is no token; says which.
    """
    if not vocabulary:
        raise ValueError("it has no tokens")
    names = {number: token for token, number in vocabulary.items()}
    if len(names) < len(vocabulary):
        token, number = next(
            (token, number) for token, number in vocabulary.items() if names[number] != token
        )
        raise ValueError(
            f"tokens {ascii(token)} and {ascii(names[number])} both have the number {number}"
        )
    if (last := max(names)) > GAPS + 2 * len(names):
        raise ValueError(
            f"token {ascii(names[last])} has the number {last}, but there are {len(names)} tokens"
        )
    for entry in added:
        if vocabulary.get(entry["content"]) != entry["id"]:
            raise ValueError(
                f"{ascii(entry['content'])} is added as token {entry['id']}, but its place is "
                f"{vocabulary.get(entry['content'])}"
            )
