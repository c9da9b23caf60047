"""Tokenizers that others trained: a `tokenizer.json`, or a folder in Hugging Face's layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datamodules.errors import DataError, UsageError
from datamodules.tokenizers.control import CONTROL, OTHER_NAMES, named_roles
from datamodules.tokenizers.sentencepiece import SUFFIXES, read_sentencepiece


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
    settings = {**_object(folder / "special_tokens_map.json"), **_object(folder / "tokenizer_config.json")}
    if file.suffix in SUFFIXES:
        content = json.loads(_made(read_sentencepiece, file))
    else:
        content = _object(file) if file.exists() else json.loads(_older(folder, settings))
    if named := named_roles(settings):
        content["control"] = named
    return json.dumps(content, ensure_ascii=False)


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{file} cannot be read: it is not JSON of a tokenizer ({error}).") from error


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
    except Exception as error:  # the package raises nothing more special
        raise DataError(f"the vocabulary in {path} cannot be read ({error}).") from error


def _bert(folder: Path, settings: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    backend = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=CONTROL["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return backend


def _roberta(folder: Path, settings: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    backend = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(settings.get("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()
    numbers = backend.get_vocab()
    if {"<s>", "</s>"} <= numbers.keys():  # not in GPT-2's files, which are of the same kind
        sep, cls = ("</s>", numbers["</s>"]), ("<s>", numbers["<s>"])
        backend.post_processor = processors.RobertaProcessing(sep, cls)
    elif settings.get("add_bos_token") and (begin := named_roles(settings).get("bos")) in numbers:
        backend.post_processor = processors.TemplateProcessing(f"{begin} $A", None, [(begin, numbers[begin])])
    return backend
