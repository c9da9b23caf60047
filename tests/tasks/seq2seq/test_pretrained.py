"""Encoder-decoders from earlier runs and from Hugging Face, and what others make of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.pretrained.seq2seq import FAMILIES
from tasks.checkpoints.pretrained import ModelFolder
from tasks.seq2seq.architectures import TranslationModel, folder_tokenizers, load_model
from tasks.seq2seq.decoding import decoding_tokens
from tests.datamodules.tokenizers.test_sentencepiece import ENGLISH, train
from tests.helpers.command import Console, run
from tests.helpers.marks import slow_except
from tests.helpers.model_folders import (
    NUMBERS,
    TRANSLATORS,
    save_model,
)
from tests.helpers.results import checkpoint, same
from tests.helpers.tiny import NO_UPDATES, PAIRS, SMALL_S2S, write_pairs

LINE = (
    f"{PAIRS} --data.max_length 24 --data.batch_size 16 --trainer.max_epochs 1 "
    "--trainer.limit_train_batches 2 --trainer.log_every_n_steps 1"
)
BEST = "r/checkpoints/best.ckpt"
METADATA = (
    *("source_tokenizer", "target_tokenizer", "start", "end", "pad_id"),
    "source_vocabulary",
)


def ours(model: TranslationModel, texts: list[str] = NUMBERS) -> list[str]:
    """Our translations, the best of beam search."""
    rows, _ = model.tokenizer.encode_sources(texts, 24)
    config = GenerationConfig(20, temperature=0, beams=5, early_stopping="likely")
    start, end, pad = (model.metadata[name] for name in ("start", "end", "pad_id"))
    found = translate(model.net, rows, config, start, [end], [pad])
    return [model.tokenizer.decode(best.tokens) for best, *_ in found]


def theirs(model: Any, source: Any, target: Any) -> list[str]:
    """Translations by `generate`, with the options that came with the model."""
    inputs = source(NUMBERS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        found = model.eval().generate(**inputs, max_new_tokens=20)
    return target.batch_decode(found, skip_special_tokens=True)


# Family -> the decoder's first token, whether [BOS] comes before texts.
@pytest.mark.parametrize("family, start, begin", [
    ("marian", -1, False),
    pytest.param("bart", 3, True, marks=pytest.mark.slow),
    pytest.param("t5", 0, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_hugging_face_and_back(family: str, start: int, begin: bool, console: Console) -> None:
    write_pairs(Path("pairs"))
    model = TRANSLATORS[family](Path("theirs"))
    folder = ModelFolder("theirs", FAMILIES)
    options = folder_tokenizers(folder)
    assert (options.start, options.begin) == (start % folder.config.target_vocabulary, begin)
    first = load_model("theirs")
    metadata = first.metadata
    assert metadata["languages"] == (["en", "de"] if family == "marian" else [])
    assert run(f"fit {LINE} {NO_UPDATES} --model.pretrained theirs --run_dir r", "seq2seq") == 0
    kept = checkpoint("r", "best")
    for name, value in first.net.state_dict().items():
        torch.testing.assert_close(kept["state_dict"][f"net.{name}"], value, atol=1e-6, rtol=0)
    for name in METADATA:
        assert kept["tessera"]["metadata"][name] == metadata[name]
    out, _ = console.printed(f"export --ckpt_path {BEST} --format hf --output back", "seq2seq")
    assert f"transformers.{type(model).__name__}.from_pretrained('back')" in out
    back = type(model).from_pretrained("back").eval()
    tokens = torch.randint(7, metadata["source_vocabulary"] - 1, (2, 12))
    with torch.inference_mode():
        expected = model(input_ids=tokens, decoder_input_ids=tokens).logits
        found = back(input_ids=tokens, decoder_input_ids=tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1
    again = load_model("back")
    assert ours(again) == ours(first) == ours(load_model(BEST))
    sources = first.tokenizer.encode_sources(NUMBERS, 24)
    assert again.tokenizer.encode_sources(NUMBERS, 24) == sources


FILES = ("generation_config.json", "config.json")


@pytest.mark.parametrize("file", slow_except(FILES[:1], FILES))
@pytest.mark.parametrize("family", TRANSLATORS)
def test_beams_are_those_of_generate(family: str, file: str) -> None:
    model = TRANSLATORS[family](Path("theirs"))
    end = model.config.eos_token_id
    pad = model.config.pad_token_id
    with torch.no_grad():  # so that it matters what becomes of padding
        (model.lm_head.weight if family == "t5" else model.final_logits_bias.T)[pad] += 1
    model.save_pretrained(Path("theirs").resolve())
    Path("theirs/generation_config.json").unlink()
    rules = {
        "eos_token_id": end,
        "pad_token_id": pad,
        "decoder_start_token_id": model.config.decoder_start_token_id,
    }
    if family == "marian":
        rules |= {"bad_words_ids": [[pad]], "forced_eos_token_id": end}
    if family == "bart":
        rules |= {"forced_bos_token_id": 2, "forced_eos_token_id": end}
    path = Path("theirs", file)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | rules))
    size = model.config.vocab_size
    rows = [[*torch.randint(7, size - 1, (4 + i % 5,)).tolist(), end] for i in range(20)]
    inputs = {
        "input_ids": torch.tensor([row + [pad] * (9 - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (9 - len(row)) for row in rows]),
    }
    options = {"num_beams": 5, "length_penalty": 0.7, "max_new_tokens": 12, "early_stopping": False}
    others = transformers.AutoModelForSeq2SeqLM.from_pretrained("theirs").eval()
    found = others.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    texts = found.sequences[:, 1:].tolist()
    texts = [row[: row.index(end) + 1] if end in row else row for row in texts]
    ours = load_model("theirs")
    config = GenerationConfig(12, 0.0, beams=5, length_penalty=0.7, early_stopping="likely")
    best = [some[0] for some in translate(ours.net, rows, config, **ours.tokens)]
    assert [one.tokens for one in best] == texts
    scores = found.sequences_scores.tolist()
    assert [one.score for one in best] == pytest.approx(scores, abs=1e-3)
    if family != "t5":  # an end that was forced is none
        assert {one.tokens[-1] for one in best} == {end}
        assert all(one.finished == (len(one.tokens) < 12) for one in best)
    usual = translate(ours.net, rows, config, **decoding_tokens(ours.tokenizer))
    assert [some[0].score for some in usual] != pytest.approx(scores, abs=1e-2)


def test_transformers_translates_with_our_export_as_we_do(translator: Path) -> None:
    model = load_model(str(translator))
    expected = ours(model)
    assert len(set(expected)) == 3
    assert run(f"export --ckpt_path {translator} --output out", "seq2seq") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    texts = [*NUMBERS, "one [EOS] two [PAD]"]  # names of special tokens are text
    assert tokenizer(texts)["input_ids"] == model.tokenizer.encode_sources(texts, 24)[0]
    found = transformers.AutoModelForSeq2SeqLM.from_pretrained("out")
    assert (type(found).__name__, found.generation_config.num_beams) == ("MarianMTModel", 5)
    assert theirs(found, tokenizer, tokenizer) == expected
    assert ours(load_model("out")) == expected
    names = ("config", "generation_config", "tokenizer", "tokenizer_config")
    files = {"model.safetensors", *(f"{name}.json" for name in names)}
    assert {file.name for file in Path("out").iterdir()} == files
    line = f"export --ckpt_path {translator} --format safetensors --output out.safetensors"
    assert run(line, "seq2seq") == 0
    assert same(load_file("out.safetensors"), dict(model.net.state_dict()))


def test_languages_with_a_tokenizer_each(console: Console) -> None:
    write_pairs(Path("pairs"))
    options = "--data.tokenizer.joint false --data.tokenizer.truncate tail"
    options += " --model.net.tying target --run_dir r"
    assert run(f"fit {SMALL_S2S} {PAIRS} {options}", "seq2seq") == 0
    assert run(f"export --ckpt_path {BEST} --output out", "seq2seq") == 0
    expected = ours(load_model(BEST))
    back = load_model("out")
    assert ours(back) == expected
    long = [" ".join(NUMBERS * 5)]
    (ids,), _ = back.tokenizer.encode_sources(long, 24)
    assert ids == load_model(BEST).tokenizer.encode_sources(long, 24)[0][0] and len(ids) == 24
    source = transformers.AutoTokenizer.from_pretrained("out")
    target = transformers.AutoTokenizer.from_pretrained("out/target_tokenizer")
    model = transformers.MarianMTModel.from_pretrained("out")
    assert theirs(model, source, target) == expected
    for pretrained, folder in (("out", "a"), (BEST, "b")):
        line = f"fit {LINE} {NO_UPDATES} --model.pretrained {pretrained} --run_dir {folder}"
        assert run(line, "seq2seq") == 0
        assert ours(load_model(f"{folder}/checkpoints/best.ckpt")) == expected
    back = f"fit {LINE} --data.languages up-en --model.pretrained {BEST}"
    console.refused(back, "translates en-up", "--data.languages is up-en", task="seq2seq")


def test_another_tokenizer_is_refused(translator: Path, console: Console) -> None:
    write_pairs(Path("pairs"))
    other = Tokenizer.train(NUMBERS * 3, TokenizerConfig("word", 12, 1))
    Path("other.json").write_text(other.to_json())
    line = f"fit {LINE} --model.pretrained {translator} --data.tokenizer.file other.json"
    console.refused(line, f"({other.vocab_size} tokens)", task="seq2seq")
    line = f"fit {LINE} --model.pretrained {translator} --data.tokenizer.joint false"
    console.refused(line, "--data.tokenizer.joint is for a new tokenizer", task="seq2seq")


def test_a_model_that_only_safetensors_can_hold(console: Console) -> None:
    write_pairs(Path("pairs"))
    line = f"fit {SMALL_S2S} {LINE} --model.net.architecture prefix --run_dir r"
    assert run(line, "seq2seq") == 0
    line = f"export --ckpt_path {BEST} --output out"
    console.refused(line, "architecture", task="seq2seq")
    assert run(f"{line}.safetensors --format safetensors", "seq2seq") == 0


def test_t5_with_a_sentencepiece_model() -> None:
    Path("theirs").mkdir()
    numbers = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}
    train(Path("theirs"), "spiece", ENGLISH, **numbers).rename("theirs/spiece.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file="theirs/spiece.model")
    sizes = {"vocab_size": 128, "num_decoder_layers": 2}
    save_model(Path("theirs"), "T5ForConditionalGeneration", **sizes)
    model = load_model("theirs")
    expected = [[*pieces.encode(text), 1] for text in ENGLISH[:3]]
    assert model.tokenizer.encode_sources(ENGLISH[:3], 99)[0] == expected
    assert (model.tokenizer.decoder_start_id, model.tokenizer.eos_id) == (0, 1)
