"""Tokenizers of other libraries: ids are those of transformers, or what cannot be followed is
refused by the name of its file and entry."""

import json
import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers

from datamodules.tokenizers import SpecialTokenIds, Tokenizer, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.datamodules.tokenizers.test_tokenizers import KINDS, TEXTS, encode, trained
from tests.helpers.tokenizer_folders import (
    FOLDERS,
    bert,
    change,
    change_part,
    make_folder,
    use_older_files,
)

CONFIG = "tokenizer_config.json"
ODD = [
    *TEXTS[:3],
    "Déjà Vu: the FILM was <new>Great, \n and  <new> the<new> story",
    " The story of 中文, <NEW> dull",
    "<new>",
    "un<new>believably   GREAT ",
]
MARIAN = ["The cat sat on the mat.", "  The  cat, on a road ", ">>deu<< the dog sat"]


@pytest.mark.parametrize("family", ["bert", "bert, older", "roberta", "roberta, older"])
def test_inputs_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_folder(family, tmp_path)
    ours = Tokenizer.from_json(Tokenizer.from_file(tmp_path).to_json())
    ids = ours.special_ids
    assert (ids.pad, ids.unk, ids.cls, ids.sep, ids.mask) == (0, 1, 2, 3, 4)
    assert ours.vocab_size >= len(theirs)
    for text, other in zip(TEXTS[:3], TEXTS[1:3] + ["Déjà vu ж 👩‍👩‍👧"], strict=True):
        a, b = ours.encode_batch([text, other])
        assert ours.build_inputs(a, 512).ids == theirs(text)["input_ids"]
        short = theirs(text, truncation=True, max_length=9)["input_ids"]
        assert ours.build_inputs(a, 9).ids == short
        for length in (9, 12, 512):
            options: dict[str, Any] = {"max_length": length, "return_token_type_ids": True}
            pair = theirs(text, other, truncation="longest_first", **options)
            built = ours.build_inputs(a, length, b)
            assert len(built.ids) == len(built.segments) == len(pair["input_ids"])
            if length == 512:
                assert built.ids == pair["input_ids"]
                assert built.segments == pair["token_type_ids"]


def test_our_files_are_read_by_the_package_tokenizers(tmp_path: Path) -> None:
    import tokenizers

    for kind in KINDS:
        ours = trained(kind)
        theirs = tokenizers.Tokenizer.from_str(ours.to_json())
        for text in TEXTS[:3]:
            assert theirs.encode(text).ids == ours.build_inputs(encode(ours, text), 512).ids
    bert(tmp_path)
    theirs = tokenizers.Tokenizer.from_str(Tokenizer.from_file(tmp_path).to_json())
    plain = Tokenizer.from_json(theirs.to_str())
    theirs.enable_truncation(4)
    theirs.enable_padding(length=99)
    assert Tokenizer.from_json(theirs.to_str()).encode_batch(TEXTS) == plain.encode_batch(TEXTS)


def test_special_tokens_are_found_by_the_names_in_other_files(tmp_path: Path) -> None:
    text = trained("word").to_json()
    for ours, odd in (("[CLS]", "<begin>"), ("[MASK]", "<hidden>"), ("[BOS]", "<other>")):
        text = text.replace(f'"{ours}"', f'"{odd}"')
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    all_ids = SpecialTokenIds(*range(7))
    unnamed = Tokenizer.from_file(file)
    assert unnamed.special_ids == replace(all_ids, cls=None, mask=None, bos=None)
    with pytest.raises(UsageError, match=r"\[MASK\]"):
        unnamed.special_id("mask")
    with pytest.raises(UsageError, match=r"\[CLS\]"):
        unnamed.build_inputs([9], 5)
    begin = {"content": "<begin>"}
    change(tmp_path, "special_tokens_map.json", cls_token=begin, bos_token=None)
    change(tmp_path, CONFIG, mask_token="<hidden>", model_max_length=9)
    for path in (tmp_path, file):
        named = Tokenizer.from_file(path)
        again = pickle.loads(pickle.dumps(named))
        assert named.special_ids == again.special_ids == replace(all_ids, bos=None)
        assert named.digest == again.digest != unnamed.digest


TEXT_END = "<|endoftext|>"
TURN_END = "<|im_end|>"
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": TURN_END, "add_bos_token": False}
LLAMA = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": TEXT_END, "eos_token": TURN_END}
GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
GPT2 |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), TEXT_END)


@pytest.mark.parametrize(
    ("settings", "has_template", "is_older", "has_bos"),
    [
        (QWEN | {"bos_token": None}, False, False, False),
        (LLAMA, True, False, True),
        (LLAMA, False, False, False),
        (GPT2, True, False, True),
        (GPT2, False, False, False),
        (GPT2, False, True, False),
        (GPT2 | {"add_bos_token": True}, False, True, True),
    ],
)
def test_documents_begin_as_in_transformers(
    settings: dict[str, Any], has_template: bool, is_older: bool, has_bos: bool, tmp_path: Path
) -> None:
    text = trained("bpe", lowercase=False).to_json()
    content = json.loads(text.replace("[BOS]", TEXT_END).replace("[EOS]", TURN_END))
    content["post_processor"] = None
    if has_template:
        begin = [{"SpecialToken": {"id": TEXT_END, "type_id": 0}}]
        begin += [{"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*begin, {"Sequence": {"id": "B", "type_id": 1}}]
        tokens = {TEXT_END: {"id": TEXT_END, "ids": [5], "tokens": [TEXT_END]}}
        template = {"single": begin, "pair": pair, "special_tokens": tokens}
        content["post_processor"] = {"type": "TemplateProcessing", **template}
    change(tmp_path, CONFIG, **settings)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if is_older:
        use_older_files(tmp_path)
    ours = Tokenizer.from_file(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    boundary = ours.boundary_tokens
    bos = [] if boundary.bos is None else [boundary.bos]
    assert [*bos, *encode(ours, "the value")] == theirs("the value")["input_ids"]
    assert bool(bos) == has_bos
    assert boundary.eos == ours.vocab[settings["eos_token"]]
    assert boundary.prefix == (None if has_bos else boundary.eos)
    assert Tokenizer.from_json(ours.to_json()).boundary_tokens == boundary


# Settings beside a tokenizer.json, in every family.

NEW = dict.fromkeys(("lstrip", "rstrip", "single_word", "special"), False)
NEW |= {"content": "<new>", "normalized": True}


def added(**entries: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": {"LAST": NEW | entries}}


# LAST is the first free id, KNOWN a token of the vocabulary.
CHANGES: dict[str, dict[str, Any]] = {
    "do_lower_case true": {"do_lower_case": True},
    "do_lower_case false": {"do_lower_case": False},
    "add_prefix_space true": {"add_prefix_space": True},
    "add_prefix_space false": {"add_prefix_space": False},
    "strip_accents true": {"strip_accents": True},
    "strip_accents false": {"strip_accents": False},
    "tokenize_chinese_chars": {"tokenize_chinese_chars": False},
    "nothing": {"do_lower_case": ..., "add_prefix_space": ..., "strip_accents": ...},
    "no class": {"tokenizer_class": ...},
    "plain class": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "do_lower_case": False,
        "add_prefix_space": True,
    },
    "fast class": {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False},
    "no token": {"added_tokens_decoder": {}},
    "token": added(),
    "special token": added(special=True, content="<other>"),
    "stripping token": added(lstrip=True, rstrip=True),
    "single-word token": added(single_word=True),
    "exact token": added(normalized=False),
    "bare token": {"added_tokens_decoder": {"LAST": {"content": "<new>"}}},
    "two tokens": {"added_tokens_decoder": {"LAST": NEW | {"content": "<own>"}, "NEXT": NEW}},
    "token of another id, refused": {"added_tokens_decoder": {"7": NEW}},
    "token far away, refused": {"added_tokens_decoder": {"1000000000": NEW}},
    "known token elsewhere, refused": added(content="KNOWN"),
    "older token": {"added_tokens.json": {"<new>": "LAST"}},
    "older token far away, refused": {"added_tokens.json": {"<new>": 10**9}},
    "older known token elsewhere, refused": {"added_tokens.json": {"KNOWN": "LAST"}},
}
# The pipeline has no place for it, or classes of transformers split differently.
MAY_BE_REFUSED = [("llama", "add_prefix_space false")]
MAY_BE_REFUSED += [
    ("marian", name)
    for name in CHANGES
    if "token" in name and name not in ("no token", "special token")
]
OLDER = ["bert, older", "roberta, older", "gpt2, older"]
CASES = [
    (family, name)
    for family, name in product([*FOLDERS, *OLDER], CHANGES)  # without those that they cannot read
    if (name != "fast class" or "bert" in family.split(", "))
    and (name != "plain class" or (family != "marian" and family not in OLDER))
]


def apply(folder: Path, changes: dict[str, Any]) -> None:
    """Makes the changes, with the ids of this folder's tokens."""
    model = folder / "source.spm"
    vocab = Tokenizer.from_file(model if model.exists() else folder).vocab
    last = max(vocab.values()) + 1
    known = next(token for token, number in vocab.items() if number == last - 3)

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {fill(key): fill(entry) for key, entry in value.items()}
        return known if value == "KNOWN" else value

    for name, value in fill(changes).items():
        if name == "added_tokens.json":
            ids = {token: last if id_ == "LAST" else id_ for token, id_ in value.items()}
            change(folder, name, **ids)
            change(folder, CONFIG, added_tokens_decoder=...)
        elif name == "added_tokens_decoder":
            names = {"LAST": str(last), "NEXT": str(last + 1)}
            entries = {names.get(key, key): entry for key, entry in value.items()}
            change(folder, CONFIG, added_tokens_decoder=entries)
        else:
            change(folder, CONFIG, **{name: value})


def check_ids(file: Path, texts: list[str]) -> None:
    """Ours are those of transformers, and the same after a round trip."""
    ours = Tokenizer.from_file(file)
    folder = file if file.is_dir() else file.parent
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    again = Tokenizer.from_json(ours.to_json())
    for text in texts:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert encode(ours, text) == encode(again, text) == expected, text


@pytest.mark.plain_every(9)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_settings_are_followed_or_refused(family: str, name: str, tmp_path: Path) -> None:
    make_folder(family, tmp_path)
    apply(tmp_path, CHANGES[name])
    file = tmp_path / "source.spm" if family == "marian" else tmp_path
    try:
        Tokenizer.from_file(file)
    except DataError as error:
        assert "refused" in name or (family, name) in MAY_BE_REFUSED
        assert any(entry in str(error) for entry in CHANGES[name])
        assert CONFIG in str(error) or "added_tokens.json" in str(error)
    else:
        assert "refused" not in name
        check_ids(file, MARIAN if family == "marian" else ODD)


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
UNKNOWN = {"tokenizer_class": "X"}
SPACE = {"add_prefix_space": True}


@pytest.mark.parametrize(
    ("family", "part", "entries", "settings", "refused"),
    [
        ("bert", "normalizer", {"lowercase": False}, {}, None),
        ("bert", "normalizer", {"lowercase": False}, {"do_lower_case": ...}, None),
        ("bert", "normalizer", {"strip_accents": True}, {"do_lower_case": False}, None),
        ("bert", "normalizer", {"handle_chinese_chars": False}, {}, None),
        ("bert", "normalizer", {"lowercase": False}, GENERIC, None),
        ("roberta", "pre_tokenizer", SPACE, {}, None),
        ("roberta", "pre_tokenizer", SPACE, {"add_prefix_space": ...}, None),
        ("gpt2", "pre_tokenizer", SPACE, {}, None),
        ("gpt2", "pre_tokenizer", SPACE, SPACE, None),
        ("llama3", "pre_tokenizer", SPACE, {"add_prefix_space": False}, None),
        ("llama3", "pre_tokenizer", SPACE, {"tokenizer_class": "LlamaTokenizer"}, None),
        ("bert", "normalizer", {"type": "Lowercase"}, {"do_lower_case": False}, "do_lower_case"),
        ("bert", "normalizer", {}, UNKNOWN | {"do_lower_case": False}, "do_lower_case"),
        ("gpt2", "decoder", {}, UNKNOWN | SPACE, "add_prefix_space"),
        ("llama", "pre_tokenizer", {"prepend_scheme": "never"}, SPACE, "add_prefix_space"),
    ],
)
def test_a_file_that_differs_from_its_settings(
    family: str, part: str, entries: Any, settings: Any, refused: str | None, tmp_path: Path
) -> None:
    make_folder(family, tmp_path)
    change_part(tmp_path, part, **entries)
    change(tmp_path, CONFIG, **settings)
    if refused is None:
        check_ids(tmp_path, ODD)
        return
    with pytest.raises(DataError, match=f"{CONFIG}: {refused} is"):
        Tokenizer.from_file(tmp_path)


def test_a_token_of_the_file_that_the_settings_lack_is_refused(tmp_path: Path) -> None:
    bert(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    token = NEW | {"id": len(content["model"]["vocab"])}
    change(tmp_path, "tokenizer.json", added_tokens=[*content["added_tokens"], token])
    assert "<new>" in Tokenizer.from_file(tmp_path).vocab
    change(tmp_path, CONFIG, added_tokens_decoder={})
    with pytest.raises(DataError, match="added_tokens_decoder.*<new>"):
        Tokenizer.from_file(tmp_path)


# Files that are damaged, or that somebody made up.

DECODER = "added_tokens_decoder"
WRONG: list[tuple[str, str, list[Any]]] = [
    (CONFIG, "do_lower_case", ["no", 1, []]),
    (CONFIG, "strip_accents", ["no", 1, []]),
    (CONFIG, DECODER, [[], 5, "x", None, {"a": NEW}, {"-1": NEW}, {"1" * 5000: NEW}]),
    (CONFIG, DECODER, [{"7": value} for value in (None, "x", [], {}, {"content": 5})]),
    (CONFIG, DECODER, [{"136": NEW | {"lstrip": "yes"}}]),
    (CONFIG, "tokenizer_class", [["BertTokenizer"]]),
    (CONFIG, "cls_token", [5, {"content": []}]),
    ("special_tokens_map.json", "cls_token", [["[CLS]"]]),
    ("added_tokens.json", "<new>", [None, "136", 1.5, True, -1, []]),
    *(("tokenizer.json", name, [[]]) for name in ("model", "normalizer", "decoder")),
    ("tokenizer.json", "pre_tokenizer", [[], {"type": "Sequence", "pretokenizers": {"a": 1}}]),
    ("tokenizer.json", "normalizer", [{"type": "Sequence", "normalizers": -1}]),
    ("tokenizer.json", "decoder", [{"type": []}]),
    ("tokenizer.json", "added_tokens", [5, [5], [{}], [{"id": "x"}], [NEW | {"id": 10**9}]]),
    ("tokenizer.json", "added_tokens", [[NEW | {"id": i}] for i in (-1, 3, 1.5, 10**30, None)]),
]


@pytest.mark.parametrize(("file", "entry", "values"), WRONG)
def test_entries_of_a_wrong_type(file: str, entry: str, values: list[Any], tmp_path: Path) -> None:
    bert(tmp_path)
    path = tmp_path / file
    original = path.read_text() if path.exists() else "{}"
    for value in values:
        path.write_text(original)
        change(tmp_path, file, **{entry: value})
        with pytest.raises(DataError) as found:
            Tokenizer.from_file(tmp_path)
        message = str(found.value)
        assert len(message) < 600
        if file == "tokenizer.json":
            assert str(tmp_path) in message
        else:
            assert file in message and entry in message


@pytest.mark.parametrize("names", [5, [], "x", {"cls": 5}, {"cls": ["[CLS]"]}, {"cls": None}])
def test_names_of_special_tokens_in_a_checkpoint_are_strings(names: Any) -> None:
    content = json.loads(trained().to_json()) | {"special_tokens": names}
    with pytest.raises(DataError, match="checkpoint"):
        Tokenizer.from_json(json.dumps(content))


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "word"])
@pytest.mark.parametrize("last", [2, 900, 10**9, 2**40, -1, "0"])
def test_ids_that_cannot_be(kind: str, last: Any, tmp_path: Path) -> None:
    """A few unused ids are no error."""
    vocab = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": last}
    content = json.loads(trained(kind).to_json())
    content["model"] |= {"vocab": vocab} | ({"merges": []} if kind == "bpe" else {})
    content |= {"added_tokens": [], "post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if last == 900:
        assert Tokenizer.from_file(tmp_path).vocab_size == 901
        return
    with pytest.raises(DataError, match=str(tmp_path)):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json"]
)
def test_files_that_hold_something_else(name: str, tmp_path: Path) -> None:
    bert(tmp_path)
    deep = ["[" * 10**6, '{"a":' * 10**5]
    for content in ("", "[]", "5", "null", "{", "hello", "\udcff", "\0" * 99, *deep):
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match=name) as found:
            Tokenizer.from_file(tmp_path)
        assert len(str(found.value)) < 600


def test_files_that_are_missing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(UsageError, match=str(path)):
            Tokenizer.load_or_train([], TokenizerConfig(file=str(path)))


def test_words_of_llama_begin_at_spaces(tmp_path: Path) -> None:
    """Its decoder is a sequence."""
    make_folder("llama", tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path)
    begins = {token: tokenizer.starts_word[i] for token, i in tokenizer.vocab.items()}
    assert begins["\u2581t"] and begins["\u2581th"] and not begins["t"]
