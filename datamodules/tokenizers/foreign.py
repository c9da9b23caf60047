"""Tokenizers that others trained: a `tokenizer.json`, or a folder in Hugging Face's layout."""

import json
from pathlib import Path
from typing import Any

from datamodules.errors import DataError, UsageError
from datamodules.tokenizers.control import CONTROL, named_roles

LAYOUTS = "tokenizer.json, vocab.txt (BERT), or vocab.json with merges.txt (RoBERTa)"


def read_tokenizer(path: Path) -> str:
    """Content of a `tokenizer.json`, with what the files beside it say of the control tokens under the key "control".

    Args:
        path: The file, or a folder that holds it or one of the older layouts (`LAYOUTS`).

    Raises:
        UsageError: It does not exist, or the folder holds no tokenizer. DataError: it cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a tokenizer.json, or a folder with one.")
    folder = path if path.is_dir() else path.parent
    settings = {**_settings(folder / "special_tokens_map.json"), **_settings(folder / "tokenizer_config.json")}
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8") if file.exists() else _older(folder, settings))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a tokenizer: it is not JSON ({error}).") from error
    if isinstance(content, dict) and (named := named_roles(settings)):
        content["control"] = named
    return json.dumps(content, ensure_ascii=False)


def _settings(file: Path) -> dict[str, Any]:
    """A JSON file with an object; empty where there is none."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: it is not JSON ({error}).") from error
    return content if isinstance(content, dict) else {}


def _older(folder: Path, settings: dict[str, Any]) -> str:
    """A tokenizer from the files that were in use before `tokenizer.json`.

    Raises:
        UsageError: There are none. DataError: they cannot be read.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words, pieces, merges = folder / "vocab.txt", folder / "vocab.json", folder / "merges.txt"
    try:
        if words.is_file():
            backend = Tokenizer(models.WordPiece.from_file(str(words), unk_token=CONTROL["unk"]))
            backend.normalizer = normalizers.BertNormalizer(
                lowercase=settings.get("do_lower_case", True),
                strip_accents=settings.get("strip_accents"),
                handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            )
            backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
            known = set(CONTROL.values())
        elif pieces.is_file() and merges.is_file():
            backend = Tokenizer(models.BPE.from_file(str(pieces), str(merges)))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(settings.get("add_prefix_space", False))
            backend.decoder = decoders.ByteLevel()
            known = {"<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"}
        else:
            raise UsageError(f"{folder} holds no tokenizer: it needs {LAYOUTS}.")
    except UsageError:
        raise
    except Exception as error:  # the package raises nothing more special
        raise DataError(f"the vocabulary in {folder} cannot be read: {error}.") from error
    known |= set(named_roles(settings).values())
    backend.add_special_tokens(sorted(known & backend.get_vocab().keys()))
    ends = [(token, backend.token_to_id(token)) for token in ("</s>", "<s>")]
    if all(number is not None for _, number in ends):
        backend.post_processor = processors.RobertaProcessing(*ends)
    return backend.to_str()
