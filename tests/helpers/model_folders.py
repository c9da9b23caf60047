"""Folders with tiny random models of transformers and their tokenizers, for commands to load."""

import json
from pathlib import Path
from typing import Any

from datamodules.embedded.reviews import generate
from datamodules.tokenizers import SPECIAL_TOKENS, Tokenizer, TokenizerConfig
from tests.datamodules.tokenizers.test_sentencepiece import marian
from tests.parity.families import MODELS, Case
from tests.parity.vit import randomise

ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<a>", "<b>")
BART_TOKENS = ("<a>", "<unk>", "<s>", "</s>", "<mask>", "<pad>", "<b>")
VIT_MEAN = [0.1, 0.2, 0.3]
VIT_STD = [0.4, 0.5, 0.6]
NUMBERS = ["two three", "one's nine eight seven six", "ten ten ten four"]


def save_model(folder: Path, architecture: str, **settings: Any) -> Any:
    """A random model, saved in a folder."""
    folder.mkdir(exist_ok=True)
    model = Case(architecture, {**MODELS[architecture], **settings}).build()
    model.save_pretrained(folder.resolve())
    return model


def save_merges(folder: Path, texts: list[str], names: tuple[str, ...]) -> int:
    """A BPE tokenizer in older files, its special tokens called `names`; its number of tokens."""
    content = json.loads(Tokenizer.train(texts, TokenizerConfig("bpe", 300, 1)).to_json())
    renamed = dict(zip(SPECIAL_TOKENS.values(), names, strict=True))
    vocab = content["model"]["vocab"].items()
    ids = {renamed.get(token, token): number for token, number in vocab}
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("\n".join(["#version", *merges]))
    return len(ids)


def encoder_folder(
    folder: Path, architecture: str, classes: tuple[str, ...] = ("neg", "pos"), **settings: Any
) -> Any:
    """An encoder and its tokenizer."""
    folder.mkdir(exist_ok=True)
    texts = generate()["train"][0][:500]
    if architecture.startswith("Roberta"):
        size = save_merges(folder, texts, ROBERTA_TOKENS)
    else:
        tokenizer = Tokenizer.train(texts, TokenizerConfig(vocabulary=300))
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        size = tokenizer.vocab_size
    named: dict[str, Any] = {"id2label": dict(enumerate(classes)), "num_labels": len(classes)}
    return save_model(folder, architecture, vocab_size=size, **named, **settings)


def decoder_folder(folder: Path, architecture: str, texts: list[str], **settings: Any) -> Any:
    """A decoder and its tokenizer, whose tokens 5 and 6 begin and end documents."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.train(texts, TokenizerConfig("bpe", 300, lowercase=False))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    special = {"bos_token_id": 5, "eos_token_id": 6}
    more = {"vocab_size": tokenizer.vocab_size, **special, **settings}
    return save_model(folder, architecture, **more)


def marian_folder(folder: Path) -> Any:
    """Marian, with SentencePiece's files."""
    folder.mkdir(exist_ok=True)
    pad = len(marian(folder).encoder) - 1
    languages = {"source_lang": "en", "target_lang": "de"}
    (folder / "tokenizer_config.json").write_text(json.dumps(languages))
    special = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad}
    return save_model(folder, "MarianMTModel", vocab_size=pad + 1, **special)


def bart_folder(folder: Path) -> Any:
    """BART, with the tokenizer's older files."""
    folder.mkdir(exist_ok=True)
    size = save_merges(folder, NUMBERS, BART_TOKENS)
    special = {"pad_token_id": 5, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    return save_model(folder, "BartForConditionalGeneration", vocab_size=size, **special)


def t5_folder(folder: Path) -> Any:
    """T5, whose table has more rows than there are tokens."""
    folder.mkdir(exist_ok=True)
    text = Tokenizer.train(NUMBERS, TokenizerConfig("bpe", 300, 1)).to_json()
    for name, other in (("[PAD]", "<pad>"), ("[EOS]", "</s>"), ("[UNK]", "<unk>")):
        text = text.replace(json.dumps(name), json.dumps(other))
    content = json.loads(text) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    more = {"vocab_size": 320, "eos_token_id": 6, "num_decoder_layers": 2, **gated}
    return save_model(folder, "T5ForConditionalGeneration", **more)


def vit_folder(
    folder: Path,
    classes: tuple[str, ...] = ("cat", "crane", "crane"),
    architecture: str = "ViTForImageClassification",
    **settings: Any,
) -> Any:
    """A small ViT whose weights hide no mistake, and its preprocessor."""
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 96, "image_size": 32, "patch_size": 8, "encoder_stride": 8}
    named: dict[str, Any] = {"id2label": dict(enumerate(classes)), "num_labels": len(classes)}
    config = transformers.ViTConfig(**{**sizes, **named, **settings})
    model = randomise(getattr(transformers, architecture)(config))
    model.save_pretrained(folder.resolve())
    processor = transformers.ViTImageProcessor(image_mean=VIT_MEAN, image_std=VIT_STD)
    processor.save_pretrained(folder.resolve())
    return model


TRANSLATORS = {"marian": marian_folder, "bart": bart_folder, "t5": t5_folder}
