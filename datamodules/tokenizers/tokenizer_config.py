"""What the files beside a `tokenizer.json` change in it: case, spaces and added tokens."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from datamodules.tokenizers.config import TruncateName
from datamodules.tokenizers.special_tokens import named_special_tokens
from datamodules.utils.errors import DataError
from datamodules.utils.files import read_object

CONFIG = "tokenizer_config.json"
TRUNCATE_KEY = "truncate"  # our own key there: transformers has no name for "both"
JsonObject = Mapping[str, Any]

# Classes of transformers, by the settings of `tokenizer_config.json` that they use.
BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
BYTE_LEVEL = tuple(
    f"{name}Tokenizer" for name in ("GPT2", "Roberta", "Bart", "Longformer", "Qwen2")
)
LLAMA = "LlamaTokenizer"
T5 = "T5Tokenizer"
MARIAN = "MarianTokenizer"  # and any other with a SentencePiece model
GENERIC = "PreTrainedTokenizerFast"
AS_IS = (GENERIC, "TokenizersBackend", "PreTrainedTokenizer")  # take tokenizer.json unchanged
KNOWN_CLASSES = (*BERT, *BYTE_LEVEL, LLAMA, T5, MARIAN, *AS_IS)
CLASS_OF_MODEL = {  # if the tokenizer's files do not name one
    **dict.fromkeys(("bert", "distilbert", "electra"), "BertTokenizer"),
    **dict.fromkeys(("roberta", "bart"), "RobertaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **{"gpt2": "GPT2Tokenizer", "t5": T5, "marian": MARIAN},
}


def tokenizer_class(settings: JsonObject, config: JsonObject, content: JsonObject) -> str:
    """Name of the class that transformers would use, without "Fast".

    From the contents of `tokenizer_config.json`, the model's `config.json` and `tokenizer.json`.
    """
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not name:
        name = CLASS_OF_MODEL.get(str(config.get("model_type")), GENERIC)
    if name not in AS_IS:
        name = str(name).removesuffix("Fast")
    byte_level = any(part.get("type") == "ByteLevel" for part in _parts(content, "pre_tokenizer"))
    return GENERIC if name == LLAMA and byte_level else name


def apply_settings(content: dict[str, Any], settings: JsonObject, name: str, folder: Path) -> None:
    """Changes the content of a `tokenizer.json` as the class `name` of transformers does.

    `settings` are those of `tokenizer_config.json` in this folder. Raises `DataError` if one has a
    wrong type, or contradicts the file in a way that is not supported.
    """
    for part in _parts(content, "normalizer"):
        if name in BERT and part.get("type") == "BertNormalizer":
            part["clean_text"] = True
            part["lowercase"] = flag(settings, "do_lower_case", True, folder)
            part["strip_accents"] = flag(settings, "strip_accents", None, folder)
            part["handle_chinese_chars"] = flag(settings, "tokenize_chinese_chars", True, folder)
    for part in _parts(content, "pre_tokenizer"):
        if name in BYTE_LEVEL and part.get("type") == "ByteLevel":
            part["add_prefix_space"] = flag(settings, "add_prefix_space", False, folder)
    for option, default, actual in (
        ("do_lower_case", True if name in BERT else None, _lowercases(content)),
        (
            "add_prefix_space",
            {LLAMA: True, **dict.fromkeys(BYTE_LEVEL, False)}.get(name),
            _adds_prefix_space(content),
        ),
    ):
        expected = flag(settings, option, default, folder)
        ignored = name in KNOWN_CLASSES and default is None
        if expected is not None and expected != actual and not ignored:
            raise DataError(
                f"{folder / CONFIG}: {option} is {str(expected).lower()} for a {name}, which "
                "contradicts tokenizer.json: set it to what the model was trained with."
            )


def flag(settings: JsonObject, name: str, default: bool | None, folder: Path) -> bool | None:
    """A setting that is true or false; `default` if it is missing or null.

    Raises `DataError` if it is something else.
    """
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise DataError(
            f"{folder / CONFIG}: {name} is {ascii(value)[:60]}, but must be true or false."
        )
    return value


def truncation_settings(kept: TruncateName) -> dict[str, str]:
    """Entries of `tokenizer_config.json` that say which part of a long text is kept."""
    side = "left" if kept == "tail" else "right"
    return {"truncation_side": side, TRUNCATE_KEY: kept}


def stored_truncation(folder: Path) -> TruncateName:
    """The part of a long text that `tokenizer_config.json` in a folder keeps; default: head."""
    with suppress(OSError, ValueError):
        settings = read_object(folder / CONFIG)
        if settings.get(TRUNCATE_KEY) == "both":
            return "both"
        if settings.get("truncation_side") == "left":
            return "tail"
    return "head"


def _parts(content: JsonObject, name: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre_tokenizer of a `tokenizer.json`, then its members if a sequence."""
    part = content.get(name)
    if not isinstance(part, dict):
        return
    yield part
    for members in (part.get("normalizers"), part.get("pretokenizers")):
        for member in members if isinstance(members, list) else []:
            yield from _parts({name: member}, name)


def _lowercases(content: JsonObject) -> bool:
    parts = _parts(content, "normalizer")
    return any(part.get("type") == "Lowercase" or part.get("lowercase") is True for part in parts)


def _adds_prefix_space(content: JsonObject) -> bool:
    for part in (*_parts(content, "normalizer"), *_parts(content, "pre_tokenizer")):
        if part.get("type") == "Prepend" or part.get("add_prefix_space") is True:
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


def add_tokens(
    content: dict[str, Any], settings: JsonObject, older: JsonObject, name: str, folder: Path
) -> dict[str, Any]:
    """A `tokenizer.json` with the tokens of `added_tokens_decoder`, else `added_tokens.json`.

    Args:
        content: Of the file.
        settings: Of `tokenizer_config.json` and `special_tokens_map.json`.
        older: Content of `added_tokens.json`.
        name: Class of transformers.
        folder: Of these files, for errors.

    Raises:
        DataError: An entry is not a token, or contradicts the file.
    """
    has_decoder = "added_tokens_decoder" in settings
    special = {*named_special_tokens(settings).values(), *_extra_special_tokens(settings)}
    if has_decoder:
        origin = f"{folder / CONFIG}: added_tokens_decoder"
        listed = _added_tokens(settings["added_tokens_decoder"], special, origin)
    else:
        origin = str(folder / "added_tokens.json")
        listed = _added_tokens(older, special, origin, ids_are_values=True)
    entries = content.get("added_tokens") or []
    own = {token["content"]: token for token in entries if isinstance(token, dict)}
    extra = {token for token in listed.keys() - own.keys() if not listed[token]["special"]}
    lost = {token for token in own if not own[token].get("special")} - special - listed.keys()
    if has_decoder and lost and name not in (*AS_IS, MARIAN):  # the class builds its tokenizer anew
        raise DataError(
            f"{origin} lacks {min(lost)!r}, which tokenizer.json adds: add it there, too."
        )
    if extra and name == MARIAN:
        raise DataError(
            f"{origin}: leave {ascii(min(extra))} out: SentencePiece takes no added tokens here."
        )
    changed = [
        entry
        for token, entry in listed.items()
        if token not in own or (has_decoder and own[token] != entry)
    ]
    content, ids = _with_tokens(content, changed)
    for token, entry in listed.items():
        token_id = ids[token] if token in ids else own[token]["id"]
        if token_id != entry["id"]:
            raise DataError(
                f"{origin} says that {ascii(token)} is token {entry['id']}, but the other files "
                f"have it as {token_id}: write the tokenizer's files again."
            )
    return content


def _with_tokens(
    content: dict[str, Any], entries: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, int | None]]:
    """A `tokenizer.json` with these tokens added or changed, and the ids that they have in it."""
    from tokenizers import AddedToken, Tokenizer

    if not entries:
        return content, {}
    backend = Tokenizer.from_str(json.dumps(content))
    for entry in entries:
        flags = {key: value for key, value in entry.items() if key != "id"}
        backend.add_tokens([AddedToken(**flags)])
    ids = {entry["content"]: backend.token_to_id(entry["content"]) for entry in entries}
    return json.loads(backend.to_str()), ids


def _extra_special_tokens(settings: JsonObject) -> Iterator[str]:
    """Further tokens that a `tokenizer_config.json` calls special."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        tokens = settings.get(name)
        if isinstance(tokens, dict):
            tokens = list(tokens.values())
        for token in tokens if isinstance(tokens, list) else []:
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                yield content


def _added_tokens(
    listed: Any, special: set[str], origin: str, ids_are_values: bool = False
) -> dict[str, dict[str, Any]]:
    """Added tokens by name, as a `tokenizer.json` has them, in the order of their ids."""
    if not isinstance(listed, dict):
        raise DataError(f"{origin} is a {type(listed).__name__}, but must be an object.")
    entries = []
    for key, value in listed.items():
        token_id = key
        token = value
        if ids_are_values:
            token_id = value
            token = {"content": key}
        elif key.isdecimal() and len(key) < 20:
            token_id = int(key)
        name = token.get("content") if isinstance(token, dict) else None
        if type(token_id) is not int or token_id < 0 or not isinstance(name, str) or not name:
            raise DataError(
                f"{origin}: {ascii(key)[:60]} is not a token with its id: write the tokenizer's "
                "files again."
            )
        flags = {
            flag: token.get(flag, False) for flag in ("special", "single_word", "lstrip", "rstrip")
        }
        flags["special"] = flags["special"] or name in special
        flags["normalized"] = token.get("normalized", not flags["special"])
        for flag_name, flag_value in flags.items():
            if not isinstance(flag_value, bool):
                raise DataError(
                    f"{origin}: {flag_name} of {ascii(key)[:60]} must be true or false."
                )
        entries.append({"id": token_id, "content": name, **flags})
    return {entry["content"]: entry for entry in sorted(entries, key=lambda entry: entry["id"])}
