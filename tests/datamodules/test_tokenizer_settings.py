"""Files beside a tokenizer.json that contradict it: ids are those of transformers, or the entry is
refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules.tokenizers import Tokenizer
from datamodules.utils.errors import DataError
from tests.datamodules.test_foreign_tokenizers import bert_folder, older, roberta_folder
from tests.datamodules.test_sentencepiece import marian
from tests.datamodules.test_tokenizers import TEXTS, trained

transformers = pytest.importorskip("transformers")

ODD = [
    *TEXTS[:3],
    "Déjà Vu: the FILM was <new>Great, \n and  <new> the<new> story",
    " The story of 中文, <NEW> dull",
    "<new>",
    "un<new>believably   GREAT ",
]
MARIANS = ["The cat sat on the mat.", "  The  cat, on a road ", ">>deu<< the dog sat"]
NEW = {
    "content": "<new>",
    "lstrip": False,
    "rstrip": False,
    "single_word": False,
    "normalized": True,
    "special": False,
}


def bert(folder: Path) -> None:
    bert_folder(folder)
    change(folder, "config.json", model_type="bert")


def roberta(folder: Path) -> None:
    roberta_folder(folder)
    change(folder, "config.json", model_type="roberta")


def byte_level(folder: Path, model_type: str, kind: str) -> None:
    """A tokenizer as GPT-2's, whose token between documents is the one called [EOS] here."""
    content = json.loads(
        trained("bpe", lowercase=False).to_json().replace("[EOS]", "<|endoftext|>")
    )
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] == "<|endoftext|>"
    ]
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    change(folder, "tokenizer_config.json", tokenizer_class=kind, eos_token="<|endoftext|>")
    change(folder, "config.json", model_type=model_type)


def gpt2(folder: Path) -> None:
    byte_level(folder, "gpt2", "GPT2Tokenizer")


def llama3(folder: Path) -> None:
    byte_level(folder, "llama", "PreTrainedTokenizerFast")


def llama(folder: Path) -> None:
    from transformers import LlamaTokenizer

    letters = sorted(set("".join(ODD)) - {" "})
    vocabulary = {
        name: number
        for number, name in enumerate(["<unk>", "<s>", "</s>", "▁", *letters, "▁t", "▁th"])
    }
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "t"), ("▁t", "h")]).save_pretrained(folder)
    change(folder, "config.json", model_type="llama")


def t5(folder: Path) -> None:
    from transformers import T5Tokenizer

    letters = sorted(set("".join(TEXTS)) - {" "})
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁the", -3.0),
        ("film", -3.0),
    ]
    T5Tokenizer(
        vocab=[*pieces, *((letter, -6.0) for letter in letters)], extra_ids=0
    ).save_pretrained(folder)
    change(folder, "config.json", model_type="t5")


def spm(folder: Path) -> None:
    marian(folder).save_pretrained(folder)
    change(folder, "config.json", model_type="marian")


def change(folder: Path, name: str, **entries: Any) -> None:
    """Changes entries of a JSON file; those that become ... are left out."""
    file = folder / name
    content = {**(json.loads(file.read_text()) if file.exists() else {}), **entries}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def old(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        make(folder)
        older(folder)

    return made


FOLDERS: dict[str, Callable[[Path], None]] = {
    **{
        "bert": bert,
        "bert, vocab.txt": old(bert),
        "roberta": roberta,
        "roberta, vocab.json": old(roberta),
    },
    **{
        "gpt2": gpt2,
        "gpt2, vocab.json": old(gpt2),
        "llama3": llama3,
        "llama": llama,
        "t5": t5,
        "marian": spm,
    },
}
CHANGES: dict[str, dict[str, Any]] = {
    **{
        f"{name} {value}": {name: value}
        for name in ("do_lower_case", "add_prefix_space")
        for value in (True, False)
    },
    **{f"{name} {value}": {name: value} for name in ("strip_accents",) for value in (True, False)},
    "tokenize_chinese_chars": {"tokenize_chinese_chars": False},
    "nothing said": {"do_lower_case": ..., "add_prefix_space": ..., "strip_accents": ...},
    "no class": {"tokenizer_class": ...},
    "plain class": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "do_lower_case": False,
        "add_prefix_space": True,
    },
    "fast class": {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False},
    "no token": {"added_tokens_decoder": {}},
    "token": {"added_tokens_decoder": {"LAST": NEW}},
    "special token": {
        "added_tokens_decoder": {"LAST": NEW | {"special": True, "content": "<other>"}}
    },
    "wide token": {"added_tokens_decoder": {"LAST": NEW | {"lstrip": True, "rstrip": True}}},
    "whole token": {"added_tokens_decoder": {"LAST": NEW | {"single_word": True}}},
    "exact token": {"added_tokens_decoder": {"LAST": NEW | {"normalized": False}}},
    "plain token": {"added_tokens_decoder": {"LAST": {"content": "<new>"}}},
    "two tokens": {"added_tokens_decoder": {"NEXT": NEW | {"content": "<own>"}, "LAST": NEW}},
    "token of another number": {"added_tokens_decoder": {"7": NEW}},
    "token far away": {"added_tokens_decoder": {"1000000000": NEW}},
    "known token elsewhere": {"added_tokens_decoder": {"LAST": NEW | {"content": "KNOWN"}}},
    "older token": {"added_tokens.json": {"<new>": "LAST"}},
    "older token far away": {"added_tokens.json": {"<new>": 10**9}},
    "older known token elsewhere": {"added_tokens.json": {"KNOWN": "LAST"}},
}
REFUSED = ("of another number", "far away", "elsewhere")
# What cannot be followed: a pipeline that has no place for it, and classes of transformers that cut
# otherwise.
MAY_BE_REFUSED = {("llama", "add_prefix_space False")} | {
    ("marian", name)
    for name in CHANGES
    if "token" in name and name not in ("no token", "special token")
}


def apply(folder: Path, changes: dict[str, Any]) -> None:
    """Makes the changes, with the numbers of tokens of this folder."""
    vocabulary = Tokenizer.from_file(
        file if (file := folder / "source.spm").exists() else folder
    ).vocab
    last = max(vocabulary.values()) + 1
    known = next(token for token, number in vocabulary.items() if number == last - 3)
    text = json.dumps(changes | {key: "..." for key, value in changes.items() if value is ...})
    text = text.replace('"KNOWN"', json.dumps(known)).replace("NEXT", str(last))
    text = text.replace(': "LAST"', f": {last}").replace("LAST", str(last + (str(last) in text)))
    found = {key: ... if value == "..." else value for key, value in json.loads(text).items()}
    if "added_tokens.json" in found:
        change(folder, "added_tokens.json", **found.pop("added_tokens.json"))
        found["added_tokens_decoder"] = ...
    change(folder, "tokenizer_config.json", **found)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("family", FOLDERS)
def test_ids_are_those_of_transformers_or_refused(
    family: str, changes: str, tmp_path: Path
) -> None:
    if (changes == "fast class" and not family.startswith("bert")) or (
        changes == "plain class" and ("," in family or family == "marian")
    ):
        pytest.skip("transformers cannot read it")
    FOLDERS[family](tmp_path)
    apply(tmp_path, CHANGES[changes])
    file = tmp_path / "source.spm" if family == "marian" else tmp_path
    must = any(word in changes for word in REFUSED)
    try:
        ours = Tokenizer.from_file(file)
    except DataError as error:
        assert must or (family, changes) in MAY_BE_REFUSED, error
        names = [name for name in CHANGES[changes] if name in str(error)]
        assert names and re.search(r"tokenizer_config.json|added_tokens.json", str(error))
        return
    assert not must
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in MARIANS if family == "marian" else ODD:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_batch([text]) == [expected], (
            text,
            theirs.convert_ids_to_tokens(expected),
        )
    assert Tokenizer.from_json(ours.to_json()).encode_batch(ODD) == ours.encode_batch(ODD)


def pipeline(folder: Path, name: str, **entries: Any) -> None:
    """Changes a part of a tokenizer.json, or one of those that it is made of."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content[name] |= entries
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "family, name, entries, said",
    [
        ("bert", "normalizer", {"lowercase": False}, {}),
        ("bert", "normalizer", {"lowercase": False}, {"do_lower_case": ...}),
        (
            "bert",
            "normalizer",
            {"lowercase": False, "strip_accents": True},
            {"do_lower_case": False},
        ),
        (
            "bert",
            "normalizer",
            {"handle_chinese_chars": False},
            {"tokenizer_class": "BertTokenizerFast"},
        ),
        (
            "bert",
            "normalizer",
            {"lowercase": False},
            {"tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        ("roberta", "pre_tokenizer", {"add_prefix_space": True}, {}),
        ("roberta", "pre_tokenizer", {"add_prefix_space": True}, {"add_prefix_space": ...}),
        ("gpt2", "pre_tokenizer", {"add_prefix_space": True}, {}),
        ("gpt2", "pre_tokenizer", {"add_prefix_space": True}, {"add_prefix_space": True}),
        ("llama3", "pre_tokenizer", {"add_prefix_space": True}, {"add_prefix_space": False}),
        (
            "llama3",
            "pre_tokenizer",
            {"add_prefix_space": True},
            {"tokenizer_class": "LlamaTokenizer"},
        ),
    ],
)
def test_a_file_that_says_otherwise(
    family: str, name: str, entries: dict[str, Any], said: dict[str, Any], tmp_path: Path
) -> None:
    FOLDERS[family](tmp_path)
    pipeline(tmp_path, name, **entries)
    change(tmp_path, "tokenizer_config.json", **said)
    ours, theirs = (
        Tokenizer.from_file(tmp_path),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    for text in ODD:
        assert ours.encode_batch([text]) == [theirs(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    "family, name, entries, said, word",
    [
        ("bert", "normalizer", {"type": "Lowercase"}, {"do_lower_case": False}, "do_lower_case"),
        (
            "llama",
            "pre_tokenizer",
            {"prepend_scheme": "never"},
            {"add_prefix_space": True},
            "add_prefix_space",
        ),
        (
            "bert",
            "normalizer",
            {"lowercase": True},
            {"tokenizer_class": "X", "do_lower_case": False},
            "do_lower_case",
        ),
        (
            "gpt2",
            "pre_tokenizer",
            {},
            {"tokenizer_class": "X", "add_prefix_space": True},
            "add_prefix_space",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    family: str, name: str, entries: dict[str, Any], said: dict[str, Any], word: str, tmp_path: Path
) -> None:
    FOLDERS[family](tmp_path)
    pipeline(tmp_path, name, **entries)
    change(tmp_path, "tokenizer_config.json", **said)
    with pytest.raises(
        DataError, match=rf"tokenizer_config.json: {word} is .* contradicts tokenizer.json"
    ):
        Tokenizer.from_file(tmp_path)


def test_a_token_of_the_file_that_the_settings_lack_is_refused(tmp_path: Path) -> None:
    bert(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(NEW | {"id": len(content["model"]["vocab"])})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert "<new>" in Tokenizer.from_file(tmp_path).vocab
    change(tmp_path, "tokenizer_config.json", added_tokens_decoder={})
    with pytest.raises(DataError, match="added_tokens_decoder lacks '<new>'"):
        Tokenizer.from_file(tmp_path)


WRONG: list[tuple[str, str, Any]] = [
    *(
        ("tokenizer_config.json", name, value)
        for name in ("do_lower_case", "strip_accents")
        for value in ("no", 1, [])
    ),
    *(
        ("tokenizer_config.json", "added_tokens_decoder", value)
        for value in ([], 5, "x", None, {"a": NEW})
    ),
    *(
        ("tokenizer_config.json", "added_tokens_decoder", {"7": value})
        for value in (None, "x", [], {}, {"content": 5})
    ),
    ("tokenizer_config.json", "added_tokens_decoder", {"-1": NEW}),
    ("tokenizer_config.json", "added_tokens_decoder", {"1" * 5000: NEW}),
    ("tokenizer_config.json", "added_tokens_decoder", {"136": NEW | {"lstrip": "yes"}}),
    ("tokenizer_config.json", "tokenizer_class", ["BertTokenizer"]),
    ("tokenizer_config.json", "cls_token", 5),
    ("tokenizer_config.json", "cls_token", {"content": []}),
    ("special_tokens_map.json", "cls_token", ["[CLS]"]),
    *(("added_tokens.json", "<new>", value) for value in (None, "136", 1.5, True, -1, [])),
    *(("tokenizer.json", name, []) for name in ("model", "normalizer", "pre_tokenizer", "decoder")),
    *(
        ("tokenizer.json", "added_tokens", value)
        for value in (5, [5], [{}], [{"id": "x"}], [NEW | {"id": 10**9}])
    ),
    *(
        ("tokenizer.json", "added_tokens", [NEW | {"id": number}])
        for number in (-1, 3, 1.5, 10**30, None)
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_entries_of_a_wrong_kind(number: int, tmp_path: Path) -> None:
    name, entry, value = WRONG[number]
    bert(tmp_path)
    change(tmp_path, name, **{entry: value})
    with pytest.raises(DataError) as found:
        Tokenizer.from_file(tmp_path)
    said = str(found.value)
    assert (name if name != "tokenizer.json" else str(tmp_path)) in said and len(said) < 600
    assert name == "tokenizer.json" or entry in said


@pytest.mark.parametrize("named", [5, [], "x", {"cls": 5}, {"cls": ["[CLS]"]}, {"cls": None}])
def test_names_of_special_tokens_are_strings(named: Any) -> None:
    with pytest.raises(DataError, match="is not a tokenizer"):
        Tokenizer.from_json(json.dumps(json.loads(trained().to_json()) | {"special_tokens": named}))


@pytest.mark.parametrize(
    "name, entries",
    [
        ("decoder", {"type": []}),
        ("model", {"unk_token": "x"}),
        ("post_processor", {"special_tokens": {}}),
        ("normalizer", {"type": "Sequence", "normalizers": -1}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": {"a": 1}}),
    ],
)
def test_parts_that_fail_only_in_use(name: str, entries: dict[str, Any], tmp_path: Path) -> None:
    bert(tmp_path)
    pipeline(tmp_path, name, **entries)
    with pytest.raises(DataError, match=str(tmp_path)):
        Tokenizer.from_file(tmp_path)


VOCABULARIES: dict[str, dict[str, Any]] = {
    "same number": {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 2},
    "far away": {"[PAD]": 0, "[UNK]": 1, "a": 10**9},
    "beyond": {"[PAD]": 0, "[UNK]": 1, "a": 2**40},
    "negative": {"[PAD]": 0, "[UNK]": 1, "a": -1},
    "text": {"[PAD]": "0", "[UNK]": "1"},
    "none": {},
}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "word"])
@pytest.mark.parametrize("case", VOCABULARIES)
def test_numbers_of_tokens_that_cannot_be(kind: str, case: str, tmp_path: Path) -> None:
    content = json.loads(trained(kind).to_json())
    content["model"] |= {"vocab": VOCABULARIES[case]} | ({"merges": []} if kind == "bpe" else {})
    content |= {"added_tokens": [], "post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"{tmp_path}.* is not a tokenizer"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"],
)
@pytest.mark.parametrize(
    "content", ["", "[]", "5", "null", "{", "[" * 10**6, '{"a":' * 10**5, "\udcff", "\0" * 99]
)
def test_files_that_hold_something_else(name: str, content: str, tmp_path: Path) -> None:
    bert(tmp_path)
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=name) as found:
        Tokenizer.from_file(tmp_path)
    assert len(str(found.value)) < 600


def test_few_gaps_are_no_mistake(tmp_path: Path) -> None:
    content = json.loads(trained("word").to_json())
    content["model"]["vocab"]["more"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(tmp_path).vocab_size == 901
