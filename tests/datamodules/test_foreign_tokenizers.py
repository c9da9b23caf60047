"""Tokenizers that others trained: read from every layout, equal to what their own library makes of
a text."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from datamodules.tokenizers import SpecialTokenIds, Tokenizer, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.datamodules.test_tokenizers import KINDS, TEXTS, numbers, trained


def bert_folder(folder: Path) -> "object":
    from transformers import BertTokenizer

    ours = [
        token
        for token in sorted(trained().vocab, key=trained().vocab.get)
        if token not in ("[BOS]", "[EOS]")
    ]
    theirs = BertTokenizer(vocab={token: number for number, token in enumerate(ours)})
    theirs.save_pretrained(folder)
    return theirs


def roberta_folder(folder: Path) -> "object":
    from transformers import RobertaTokenizer

    model = json.loads(trained("bpe", lowercase=False).to_json())["model"]
    names = {
        "[CLS]": "<s>",
        "[PAD]": "<pad>",
        "[SEP]": "</s>",
        "[UNK]": "<unk>",
        "[MASK]": "<mask>",
    }
    vocabulary = {names.get(token, token): i for token, i in model["vocab"].items()}
    theirs = RobertaTokenizer(vocab=vocabulary, merges=[tuple(pair) for pair in model["merges"]])
    theirs.save_pretrained(folder)
    return theirs


def older(folder: Path) -> None:
    """Puts the files from before `tokenizer.json` in its place."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    if model["type"] == "WordPiece":
        (folder / "vocab.txt").write_text(
            "\n".join(sorted(model["vocab"], key=model["vocab"].get)) + "\n"
        )
    else:
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text(
            "#version\n" + "\n".join(" ".join(pair) for pair in model["merges"])
        )


@pytest.mark.parametrize("make", [bert_folder, roberta_folder])
@pytest.mark.parametrize("has_older_files", [False, True], ids=["tokenizer.json", "older files"])
def test_inputs_equal_those_of_transformers(
    make: Callable[[Path], object], has_older_files: bool, tmp_path: Path
) -> None:
    theirs = make(tmp_path)
    if has_older_files:
        older(tmp_path)
    ours = Tokenizer.from_json(Tokenizer.from_file(tmp_path).to_json())
    assert (
        ours.special_ids.pad,
        ours.special_ids.unk,
        ours.special_ids.cls,
        ours.special_ids.sep,
        ours.special_ids.mask,
    ) == (0, 1, 2, 3, 4)
    assert ours.vocab_size >= len(theirs)  # type: ignore[arg-type]
    for text, other in zip(TEXTS[:3], TEXTS[1:3] + ["Déjà vu ж 👩‍👩‍👧"], strict=True):
        a, b = ours.encode_batch([text, other])
        assert ours.build_inputs(a, 512).ids == theirs(text)["input_ids"]  # type: ignore[operator]
        for length in (9, 12, 512):
            pair = theirs(
                text,
                other,
                truncation="longest_first",
                max_length=length,
                return_token_type_ids=True,
            )  # type: ignore[operator]
            built = ours.build_inputs(a, length, b)
            assert len(built.ids) == len(pair["input_ids"]) == len(built.segments)
            if not built.truncated:
                assert built.ids == pair["input_ids"] and built.segments == pair["token_type_ids"]
        assert (
            ours.build_inputs(a, 9).ids == theirs(text, truncation=True, max_length=9)["input_ids"]
        )  # type: ignore[operator]


def test_a_file_that_we_write_is_read_by_others(tmp_path: Path) -> None:
    import tokenizers

    for kind in KINDS:
        ours = trained(kind)
        theirs = tokenizers.Tokenizer.from_str(ours.to_json())
        for text in TEXTS[:3]:
            assert theirs.encode(text).ids == ours.build_inputs(numbers(ours, text), 512).ids
    folder = tmp_path / "bert"
    bert_folder(folder)
    tokenizers.Tokenizer.from_str(Tokenizer.from_file(folder).to_json())  # no key of ours


def test_odd_names_are_taken_from_the_files_beside(tmp_path: Path) -> None:
    text = trained("word").to_json()
    for ours, odd in (("[CLS]", "<begin>"), ("[MASK]", "<hidden>"), ("[BOS]", "<other>")):
        text = text.replace(f'"{ours}"', f'"{odd}"')
    (tmp_path / "tokenizer.json").write_text(text)
    without = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert without.special_ids == replace(SpecialTokenIds(*range(7)), cls=None, mask=None, bos=None)
    with pytest.raises(UsageError, match=r"no \[MASK\] token"):
        without.special_id("mask")
    with pytest.raises(UsageError, match=r"no \[CLS\] token"):
        without.build_inputs([9], 5)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"cls_token": {"content": "<begin>"}, "bos_token": null}'
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"mask_token": "<hidden>", "model_max_length": 9}'
    )
    for file in (tmp_path, tmp_path / "tokenizer.json"):
        named = Tokenizer.from_file(file)
        again = pickle.loads(pickle.dumps(named))
        assert (
            named.special_ids == again.special_ids == replace(SpecialTokenIds(*range(7)), bos=None)
        )
        assert again.digest == named.digest != without.digest


def test_cutting_and_filling_of_a_file_are_ours(tmp_path: Path) -> None:
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(trained().to_json())
    plain = Tokenizer.from_json(theirs.to_str())
    theirs.enable_truncation(4)
    theirs.enable_padding(length=99)
    assert Tokenizer.from_json(theirs.to_str()).encode_batch(TEXTS) == plain.encode_batch(TEXTS)


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing.json does not exist"):
        Tokenizer.load_or_train([], TokenizerConfig(file=str(tmp_path / "missing.json")))
    with pytest.raises(UsageError, match="holds no tokenizer: it needs tokenizer.json"):
        Tokenizer.from_file(tmp_path)
    for content in ("hello", "", "[1]", "{}", '{"model": 1}', '{"model": {}}', "\ud800"):
        file = tmp_path / "tokenizer.json"
        file.write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(
            DataError, match="tokenizer.json (is not|cannot be read: it is not JSON of) a tokenizer"
        ):
            Tokenizer.from_file(file)
    file.write_text(trained().to_json())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json cannot be read"):
        Tokenizer.from_file(tmp_path)


TEXT_END, TURN_END = "<|endoftext|>", "<|im_end|>"


def decoders_tokenizer(
    folder: Path, opens: bool, settings: dict[str, object], has_older_files: bool
) -> Tokenizer:
    """A folder as decoders have it, whose tokenizer puts <|endoftext|> before a text or nothing."""
    content = (
        trained("bpe", lowercase=False)
        .to_json()
        .replace("[BOS]", TEXT_END)
        .replace("[EOS]", TURN_END)
    )
    content = json.loads(content)
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": TEXT_END, "type_id": 0}}],
        "pair": [],
    }
    template["special_tokens"] = {TEXT_END: {"id": TEXT_END, "ids": [5], "tokens": [TEXT_END]}}
    template["single"] += [{"Sequence": {"id": "A", "type_id": 0}}]
    template["pair"] = [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    plain = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    content["post_processor"] = template if opens else plain
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if has_older_files:
        older(folder)
    return Tokenizer.from_file(folder)


QWEN = {
    "tokenizer_class": "Qwen2Tokenizer",
    "bos_token": None,
    "eos_token": TURN_END,
    "add_bos_token": False,
}
LLAMA = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": TEXT_END, "eos_token": TURN_END}
GPT2 = {
    "tokenizer_class": "GPT2Tokenizer",
    "bos_token": TEXT_END,
    "eos_token": TEXT_END,
    "unk_token": TEXT_END,
}


@pytest.mark.parametrize(
    "settings, opens, has_older_files",
    [
        (QWEN, False, False),
        (LLAMA, True, False),
        (LLAMA, False, False),
        (GPT2, True, False),
        (GPT2, False, False),
        (GPT2, False, True),
        (GPT2 | {"add_bos_token": True}, False, True),
    ],
)
def test_a_document_begins_as_the_tokenizer_says(
    settings: dict[str, object], opens: bool, has_older_files: bool, tmp_path: Path
) -> None:
    import transformers

    ours = decoders_tokenizer(tmp_path, opens, settings, has_older_files)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (ids,) = ours.encode_batch(["the value"])
    begin = [] if ours.boundary_tokens.bos is None else [ours.boundary_tokens.bos]
    assert begin + ids == theirs("the value")["input_ids"]
    assert bool(begin) == (opens or "add_bos_token" in settings and settings is not QWEN)
    end = ours.vocab[str(settings["eos_token"])]
    assert ours.boundary_tokens.eos == end and ours.boundary_tokens.prefix == (
        None if begin else end
    )
    assert Tokenizer.from_json(ours.to_json()).boundary_tokens == ours.boundary_tokens
