"""Folders with tokenizers, as the libraries of their models write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.datamodules.tokenizers.test_sentencepiece import marian
from tests.datamodules.tokenizers.test_tokenizers import TEXTS, trained

LETTERS = sorted(set("".join(TEXTS) + "DéjàVuF<new>N中文") - {" "})


def change(folder: Path, name: str, **entries: Any) -> None:
    """Changes entries of a JSON file; those that become ... are left out."""
    file = folder / name
    content = {**(json.loads(file.read_text()) if file.exists() else {}), **entries}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def change_part(folder: Path, name: str, **entries: Any) -> None:
    """Changes a part of a `tokenizer.json`, such as the normalizer."""
    part = json.loads((folder / "tokenizer.json").read_text())[name]
    change(folder, "tokenizer.json", **{name: part | entries})


def save(tokenizer: Any, folder: Path, model_type: str) -> Any:
    tokenizer.save_pretrained(folder)
    change(folder, "config.json", model_type=model_type)
    return tokenizer


def bert(folder: Path) -> Any:
    from transformers import BertTokenizer

    vocab = trained().vocab
    tokens = [token for token in sorted(vocab, key=vocab.__getitem__) if token[1:4] not in "BOSEOS"]
    ids = {token: i for i, token in enumerate(tokens)}
    return save(BertTokenizer(vocab=ids), folder, "bert")


def roberta(folder: Path) -> Any:
    from transformers import RobertaTokenizer

    model = json.loads(trained("bpe", lowercase=False).to_json())["model"]
    names = {f"[{name.upper()}]": f"<{name}>" for name in ("pad", "unk", "mask")}
    names |= {"[CLS]": "<s>", "[SEP]": "</s>"}
    vocab = {names.get(token, token): i for token, i in model["vocab"].items()}
    merges = [tuple(pair) for pair in model["merges"]]
    return save(RobertaTokenizer(vocab=vocab, merges=merges), folder, "roberta")


def byte_level(folder: Path, model_type: str, tokenizer_class: str) -> None:
    """A tokenizer as GPT-2's, whose token between documents is the one called [EOS] here."""
    end = "<|endoftext|>"
    content = json.loads(trained("bpe", lowercase=False).to_json().replace("[EOS]", end))
    added = [token for token in content["added_tokens"] if token["content"] == end]
    content |= {"added_tokens": added, "post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    change(folder, "tokenizer_config.json", tokenizer_class=tokenizer_class, eos_token=end)
    change(folder, "config.json", model_type=model_type)


def llama(folder: Path) -> Any:
    from transformers import LlamaTokenizer

    tokens = ["<unk>", "<s>", "</s>", "▁", *LETTERS, "▁t", "▁th"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return save(LlamaTokenizer(vocab=vocab, merges=[("▁", "t"), ("▁t", "h")]), folder, "llama")


def t5(folder: Path) -> Any:
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0)]
    pieces += [("film", -3.0), *((letter, -6.0) for letter in sorted(set("".join(TEXTS)) - {" "}))]
    return save(T5Tokenizer(vocab=pieces, extra_ids=0), folder, "t5")


def use_older_files(folder: Path) -> None:
    """Puts the files from before `tokenizer.json` in its place."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    if model["type"] == "WordPiece":
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    else:
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(pair) for pair in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version", *merges]))


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "bert": bert,
    "roberta": roberta,
    "gpt2": lambda folder: byte_level(folder, "gpt2", "GPT2Tokenizer"),
    "llama3": lambda folder: byte_level(folder, "llama", "PreTrainedTokenizerFast"),
    "llama": llama,
    "t5": t5,
    "marian": lambda folder: save(marian(folder), folder, "marian"),
}


def make_folder(family: str, folder: Path) -> Any:
    """A folder of `FOLDERS`, with the older files if the name says so: "bert, older"."""
    family, _, older = family.partition(", ")
    tokenizer = FOLDERS[family](folder)
    if older:
        use_older_files(folder)
    return tokenizer
