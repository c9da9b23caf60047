"""What the files beside a `tokenizer.json` change in it, as in transformers: tokens, case, a space before texts."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from datamodules.tokenizers.control import named_roles
from datamodules.utils.errors import DataError

CONFIG = "tokenizer_config.json"
Settings = Mapping[str, Any]

# Classes of transformers that follow a setting, and what it is where nothing says; others follow none of them.
LOWER = dict.fromkeys(
    ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"), True
)
BYTE_LEVEL = (
    "GPT2Tokenizer",
    "RobertaTokenizer",
    "BartTokenizer",
    "LongformerTokenizer",
    "Qwen2Tokenizer",
)
SPACE = {**dict.fromkeys(BYTE_LEVEL, False), "LlamaTokenizer": True}
SPM = "MarianTokenizer"  # and any other of a file of SentencePiece
PLAIN = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "PreTrainedTokenizer",
)  # which take the file as it is
KEPT = (*PLAIN, SPM)  # with all tokens that the files have
NEITHER = (*KEPT, "T5Tokenizer")
CLASSES = {  # by the model, where the tokenizer's files do not name one
    **dict.fromkeys(("bert", "distilbert", "electra"), "BertTokenizer"),
    **dict.fromkeys(("roberta", "bart"), "RobertaTokenizer"),
    **{"gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"},
    **{"t5": "T5Tokenizer", "marian": SPM},
}
FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")  # of added tokens


def tokenizer_class(settings: Settings, config: Settings, content: Settings) -> str:
    """The class that transformers takes.

    Args:
        settings: Content of `tokenizer_config.json`.
        config: Content of the model's `config.json`.
        content: Content of `tokenizer.json`.
    """
    model = config.get("model_type")
    usual = CLASSES.get(model, PLAIN[0]) if isinstance(model, str) else PLAIN[0]
    found = settings.get("tokenizer_class") or config.get("tokenizer_class") or usual
    name = str(found).removesuffix("Fast") if found not in PLAIN else str(found)
    byte_level = any(part.get("type") == "ByteLevel" for part in parts(content, "pre_tokenizer"))
    return PLAIN[0] if name == "LlamaTokenizer" and byte_level else name


def follow(content: dict[str, Any], settings: Settings, kind: str, folder: Path) -> None:
    """Changes a `tokenizer.json` as a class of transformers does that is told these settings.

    Args:
        content: Of the file.
        settings: Content of `tokenizer_config.json`.
        kind: The class, as `tokenizer_class` gives it.
        folder: With these files, for errors.

    Raises:
        DataError: A setting is of a wrong type, or contradicts the file in a way that cannot be followed.
    """
    for part in parts(content, "normalizer"):
        if kind in LOWER and part.get("type") == "BertNormalizer":
            part |= {"lowercase": flag(settings, "do_lower_case", True, folder), "clean_text": True}
            part["strip_accents"] = flag(settings, "strip_accents", None, folder)
            part["handle_chinese_chars"] = flag(settings, "tokenize_chinese_chars", True, folder)
    for part in parts(content, "pre_tokenizer"):
        if kind in BYTE_LEVEL and part.get("type") == "ByteLevel":
            part["add_prefix_space"] = flag(settings, "add_prefix_space", False, folder)
    unknown = kind not in (*LOWER, *SPACE, *NEITHER)
    for name, classes, does in (
        ("do_lower_case", LOWER, lowers),
        ("add_prefix_space", SPACE, adds_space),
    ):
        said = flag(settings, name, classes.get(kind), folder)
        if said is not None and (unknown or kind in classes) and said != does(content):
            raise DataError(
                f"{folder / CONFIG}: {name} is {str(said).lower()} for a {kind}, which contradicts tokenizer.json: "
                "set it to what the model was trained with."
            )


def parts(content: Settings, name: str) -> Iterator[dict[str, Any]]:
    """A part of a `tokenizer.json`, such as its normalizer, or those that it is a sequence of."""
    part = content.get(name)
    if isinstance(part, dict):
        yield part
        for some in (part.get("normalizers"), part.get("pretokenizers")):
            for one in some if isinstance(some, list) else []:
                yield from parts({name: one}, name)


def lowers(content: Settings) -> bool:
    """Whether a `tokenizer.json` makes letters small."""
    return any(
        part.get("type") == "Lowercase" or part.get("lowercase") is True
        for part in parts(content, "normalizer")
    )


def adds_space(content: Settings) -> bool:
    """Whether a `tokenizer.json` puts a space before a text."""
    found = (*parts(content, "normalizer"), *parts(content, "pre_tokenizer"))
    schemes = [
        part.get("prepend_scheme", "always") != "never"
        for part in found
        if part.get("type") == "Metaspace"
    ]
    return any(schemes) or any(
        part.get("type") == "Prepend" or part.get("add_prefix_space") is True for part in found
    )


def flag(settings: Settings, name: str, usual: bool | None, folder: Path) -> bool | None:
    """A setting that is true or false; `usual` where it is not given, or null.

    Raises:
        DataError: It is something else.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(
            f"{folder / CONFIG}: {name} is {ascii(value)[:60]}, but must be true or false."
        )
    return usual if value is None else value


def add_tokens(
    content: dict[str, Any], settings: Settings, older: Settings, kind: str, folder: Path
) -> dict[str, Any]:
    """A `tokenizer.json` with the tokens that `added_tokens_decoder`, or else `added_tokens.json`, has besides.

    Args:
        content: Of the file.
        settings: Content of `tokenizer_config.json` and `special_tokens_map.json`.
        older: Content of `added_tokens.json`.
        kind: The class, as `tokenizer_class` gives it.
        folder: With these files, for errors.

    Raises:
        DataError: An entry is no token, or contradicts the file.
    """
    from tokenizers import AddedToken, Tokenizer

    decides = "added_tokens_decoder" in settings
    origin = (
        f"{folder / CONFIG}: added_tokens_decoder" if decides else str(folder / "added_tokens.json")
    )
    own = {
        token.get("content"): token
        for token in content.get("added_tokens") or []
        if isinstance(token, dict)
    }
    special = {*named_roles(settings).values(), *extra_tokens(settings)}
    found = dict(
        _entries(settings["added_tokens_decoder"] if decides else older, decides, special, origin)
    )
    forgotten = [
        name
        for name, token in own.items()
        if not token.get("special") and name not in special | found.keys()
    ]
    if decides and kind not in KEPT and forgotten:  # by a class that makes the tokenizer anew
        raise DataError(
            f"{origin} lacks {forgotten[0]!r}, which tokenizer.json adds: add it there, too."
        )
    if kind == SPM and (
        parting := [name for name in found.keys() - own.keys() if not found[name]["special"]]
    ):
        raise DataError(
            f"{origin}: {ascii(parting[0])} is added to SentencePiece, which is not supported: leave it out."
        )
    new = {
        name: token
        for name, token in found.items()
        if name not in own or (decides and own[name] != token)
    }
    backend = Tokenizer.from_str(json.dumps(content)) if new else None
    for name, token in found.items():
        number = own.get(name, token)["id"]
        if backend and name in new:
            backend.add_tokens(
                [AddedToken(**{key: value for key, value in token.items() if key != "id"})]
            )
            number = backend.token_to_id(name)
        if number != token["id"]:
            raise DataError(
                f"{origin} says that {ascii(name)} is token {token['id']}, which the other files have as {number}: "
                "write the tokenizer's files anew."
            )
    return dict(json.loads(backend.to_str())) if backend else content


def extra_tokens(settings: Settings) -> Iterator[str]:
    """Further tokens that a `tokenizer_config.json` calls special."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        found = settings.get(name) or []
        for token in (
            found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
        ):
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                yield content


def _entries(
    found: Any, decides: bool, special: Collection[str], origin: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of each added token, as a `tokenizer.json` has it, in the order of their numbers."""
    if not isinstance(found, dict):
        raise DataError(f"{origin} is a {type(found).__name__}, but must be an object.")
    entries = []
    for key, value in found.items():
        number, token = (key, value) if decides else (value, {"content": key})
        number = int(number) if decides and number.isdecimal() and len(number) < 20 else number
        flags = {name: token.get(name, False) for name in FLAGS} if isinstance(token, dict) else {}
        name = token.get("content") if isinstance(token, dict) else None
        if type(number) is not int or number < 0 or not isinstance(name, str) or not name:
            raise DataError(
                f"{origin}: {ascii(key)[:60]} is no token with its number: write the tokenizer's files anew."
            )
        flags["special"] = flags["special"] or name in special
        flags["normalized"] = token.get("normalized", not flags["special"])
        if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
            raise DataError(f"{origin}: {wrong[0]} of {ascii(key)[:60]} must be true or false.")
        entries.append((number, name, {"id": number, "content": name, **flags}))
    yield from ((name, token) for _, name, token in sorted(entries, key=lambda entry: entry[0]))
