"""Encoder-decoders from earlier runs and from Hugging Face, and what others make of ours."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from datamodules.tokenizers import SPECIAL_TOKENS, Tokenizer, TokenizerConfig
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from tasks.seq2seq.decoding import decoding_tokens
from tasks.seq2seq.pretrained import load_folder, read_folder
from tasks.seq2seq.translator import TranslationModel, load_model
from tests.datamodules.test_sentencepiece import ENGLISH, marian, train
from tests.tasks.command import PAIRS, SMALL_S2S, Malicious, checkpoint, run, same, write_pairs

transformers = pytest.importorskip("transformers")

TEXTS = ["two three", "one's nine eight seven six", "ten ten ten four"]
LINE = f"{PAIRS} --data.max_length 24 --data.batch_size 16 --trainer.max_epochs 1 --trainer.log_every_n_steps 1"
STILL = "--model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"
SIZES = {
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
}
T5_SIZES = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}


def ours(model: TranslationModel, texts: list[str] = TEXTS, beams: int = 5) -> list[str]:
    """Our translations, the best of beam search."""
    rows, _ = model.tokenizer.encode_sources(texts, 24)
    config = GenerationConfig(20, temperature=0, beams=beams, early_stopping="likely")
    start, end, pad = (model.metadata[name] for name in ("start", "end", "padding"))
    return [
        model.tokenizer.decode(best.tokens)
        for best, *_ in translate(model.net, rows, config, start, [end], [pad])
    ]


def theirs(model: Any, source: Any, target: Any, texts: list[str] = TEXTS) -> list[str]:
    """Translations by `generate`, with the options that came with the model."""
    inputs = source(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        return target.batch_decode(
            model.eval().generate(**inputs, max_new_tokens=20), skip_special_tokens=True
        )


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says that fails for its options."""
    capsys.readouterr()
    assert run(line, "seq2seq") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def random_model(folder: Path, family: str, sizes: dict[str, Any]) -> Any:
    """A random model of theirs, saved beside its tokenizer."""
    torch.manual_seed(0)
    options = {**sizes, "forced_eos_token_id": None, "forced_bos_token_id": None}
    if family == "t5":
        options = sizes
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        transformers.AutoConfig.for_model(family, **options)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name or family != "marian":
                parameter.add_(
                    torch.randn_like(parameter) * 0.2
                )  # far from symmetric, so that mistakes show
    model.save_pretrained(folder)
    return model


def marian_folder(folder: Path) -> Any:
    tokenizer = marian(folder)
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "de"}')
    size = len(tokenizer.encoder)
    special = {"pad_token_id": size - 1, "eos_token_id": 0, "decoder_start_token_id": size - 1}
    return random_model(
        folder, "marian", {**SIZES, "vocab_size": size, "scale_embedding": True, **special}
    )


def bart_folder(folder: Path) -> Any:
    """With the tokenizer's older files."""
    names = dict(
        zip(
            SPECIAL_TOKENS.values(),
            ("<a>", "<unk>", "<s>", "</s>", "<mask>", "<pad>", "<b>"),
            strict=True,
        )
    )
    model = json.loads(Tokenizer.train(TEXTS, TokenizerConfig("bpe", 300, 1)).to_json())["model"]
    numbers = {names.get(token, token): number for token, number in model["vocab"].items()}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    (folder / "merges.txt").write_text(
        "#version\n" + "\n".join(" ".join(pair) for pair in model["merges"])
    )
    special = {"pad_token_id": 5, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    return random_model(folder, "bart", {**SIZES, "vocab_size": len(numbers), **special})


def t5_folder(folder: Path) -> Any:
    """With more rows in the table than there are tokens, as in T5."""
    text = Tokenizer.train(TEXTS, TokenizerConfig("bpe", 300, 1)).to_json()
    for name, other in (("[PAD]", "<pad>"), ("[EOS]", "</s>"), ("[UNK]", "<unk>")):
        text = text.replace(json.dumps(name), json.dumps(other))
    content = json.loads(text) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    special = {"pad_token_id": 0, "eos_token_id": 6, "decoder_start_token_id": 0}
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return random_model(folder, "t5", {**T5_SIZES, "vocab_size": 320, **special, **gated})


FOLDERS = {"marian": marian_folder, "bart": bart_folder, "t5": t5_folder}
EXPECTED = {
    "marian": (-1, False),
    "bart": (3, True),
    "t5": (0, False),
}  # the decoder's first token, [BOS] before texts


@pytest.mark.parametrize("family", FOLDERS)
def test_hugging_face_and_back(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    Path("theirs").mkdir()
    model = FOLDERS[family](Path("theirs").resolve())
    config, options = read_folder(Path("theirs"))
    start, begin = EXPECTED[family]
    assert (options.start, options.begin) == (start % config.target_vocabulary, begin)  # type: ignore[operator]
    net, metadata, _ = load_folder("theirs")
    assert metadata["languages"] == (["en", "de"] if family == "marian" else [])
    assert ours(TranslationModel.of(net, metadata))
    line = f"fit {LINE} {STILL} --model.pretrained theirs --run_dir r"
    assert run(line, "seq2seq") == 0
    kept = checkpoint("r", "best")
    assert all(
        torch.allclose(kept["state_dict"][f"net.{n}"], v, atol=1e-6)
        for n, v in net.state_dict().items()
    )
    saved = kept["tessera"]["metadata"]
    for name in (
        "source_tokenizer",
        "target_tokenizer",
        "start",
        "end",
        "padding",
        "source_vocabulary",
    ):
        assert saved[name] == metadata[name]
    capsys.readouterr()
    assert (
        run("export --ckpt_path r/checkpoints/best.ckpt --format hf --output back", "seq2seq") == 0
    )
    assert f"transformers.{type(model).__name__}.from_pretrained('back')" in capsys.readouterr().out
    back = type(model).from_pretrained("back").eval()
    tokens = torch.randint(7, metadata["source_vocabulary"] - 1, (2, 12))
    with torch.inference_mode():
        expected, found = (
            each(input_ids=tokens, decoder_input_ids=tokens).logits for each in (model, back)
        )
    assert torch.allclose(found, expected, atol=1e-4) and expected.std() > 0.1
    again = load_model("back")
    best = TranslationModel.of(*load_folder("theirs"))
    assert ours(again) == ours(best) == ours(load_model("r/checkpoints/best.ckpt"))
    assert again.tokenizer.encode_sources(TEXTS, 24) == best.tokenizer.encode_sources(TEXTS, 24)


@pytest.mark.parametrize("said_in", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("family", FOLDERS)
def test_beams_are_those_of_generate(family: str, said_in: str) -> None:
    folder = Path("theirs").resolve()
    folder.mkdir()
    made = FOLDERS[family](folder)
    end, pad, start = (
        getattr(made.config, f"{name}_token_id") for name in ("eos", "pad", "decoder_start")
    )
    more: dict[str, dict[str, Any]] = {
        "marian": {"bad_words_ids": [[pad]], "forced_eos_token_id": end},
        "bart": {"forced_bos_token_id": 2, "forced_eos_token_id": end},
        "t5": {},
    }
    with torch.no_grad():  # so that it matters what becomes of padding
        (made.lm_head.weight if family == "t5" else made.final_logits_bias.T)[pad] += 1
    made.save_pretrained(folder)
    rules = {
        "eos_token_id": end,
        "pad_token_id": pad,
        "decoder_start_token_id": start,
        **more[family],
    }
    (folder / "generation_config.json").unlink()
    before = json.loads((folder / "config.json").read_text()) if said_in == "config.json" else {}
    (folder / said_in).write_text(json.dumps(before | rules))
    size, dice = made.config.vocab_size, torch.Generator().manual_seed(1)
    rows = [
        torch.randint(7, size - 1, (4 + i % 5,), generator=dice).tolist() + [end] for i in range(20)
    ]
    inputs = {
        "input_ids": torch.tensor([row + [pad] * (9 - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (9 - len(row)) for row in rows]),
    }
    options = {"num_beams": 5, "length_penalty": 0.7, "max_new_tokens": 12, "early_stopping": False}
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    found = theirs.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    texts = [
        row[: row.index(end) + 1] if end in row else row for row in found.sequences[:, 1:].tolist()
    ]
    model, config = (
        load_model("theirs"),
        GenerationConfig(12, 0.0, beams=5, length_penalty=0.7, early_stopping="likely"),
    )
    best = [some[0] for some in translate(model.net, rows, config, **model.tokens)]
    assert [one.tokens for one in best] == texts
    assert [one.score for one in best] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)
    if family != "t5":  # an end that was forced is none
        assert {one.tokens[-1] for one in best} == {end}
        assert all(one.finished == (len(one.tokens) < 12) for one in best)
    usual = [
        some[0].score
        for some in translate(model.net, rows, config, **decoding_tokens(model.tokenizer))
    ]
    assert usual != pytest.approx(found.sequences_scores.tolist(), abs=1e-3)


def test_rules_that_will_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs").mkdir()
    marian_folder(Path("theirs"))
    for said, words in (
        ({"bad_words_ids": [[8, 9]]}, "bans phrases of several tokens (bad_words_ids)"),
        ({"forced_eos_token_id": 4000}, "names token 4000"),
    ):
        Path("theirs/generation_config.json").write_text(json.dumps(said))
        assert words in refused("translate --ckpt_path theirs --text a", capsys)
    Path("theirs/generation_config.json").write_text(
        json.dumps({"no_repeat_ngram_size": 3, "min_length": 0})
    )
    assert run("translate --ckpt_path theirs --text a --max_new_tokens 3", "seq2seq") == 0
    assert "asks for no_repeat_ngram_size 3, which is not supported" in capsys.readouterr().err


def test_others_translate_with_ours_as_we_do(translator: Path) -> None:
    model = load_model(str(translator))
    expected = ours(model)
    assert len(set(expected)) == 3
    assert run(f"export --ckpt_path {translator} --output out", "seq2seq") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer(TEXTS)["input_ids"] == model.tokenizer.encode_sources(TEXTS, 24)[0]
    found = transformers.AutoModelForSeq2SeqLM.from_pretrained("out")
    assert (type(found).__name__, found.generation_config.num_beams) == ("MarianMTModel", 5)
    assert theirs(found, tokenizer, tokenizer) == expected
    assert ours(load_model("out")) == expected
    assert {file.name for file in Path("out").iterdir()} == {
        *(
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    }
    assert (
        run(
            f"export --ckpt_path {translator} --format safetensors --output out.safetensors",
            "seq2seq",
        )
        == 0
    )
    state = load_file("out.safetensors")
    assert state.keys() == model.net.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.net.state_dict().items())


def test_languages_with_a_tokenizer_each(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    line = (
        f"fit {SMALL_S2S} {PAIRS} --data.tokenizer.joint false --model.net.tying target --run_dir r"
    )
    assert run(line, "seq2seq") == 0
    assert run("export --ckpt_path r/checkpoints/best.ckpt --output out", "seq2seq") == 0
    mine, again = load_model("r/checkpoints/best.ckpt"), load_model("out")
    assert ours(mine) == ours(again)
    source, target = (
        transformers.AutoTokenizer.from_pretrained(f"out{place}")
        for place in ("", "/target_tokenizer")
    )
    assert theirs(transformers.MarianMTModel.from_pretrained("out"), source, target) == ours(mine)
    for pretrained in ("out", "r/checkpoints/best.ckpt"):
        assert (
            run(
                f"fit {LINE} {STILL} --model.pretrained {pretrained} --run_dir {pretrained[:1]}2",
                "seq2seq",
            )
            == 0
        )
        assert ours(load_model(f"{pretrained[:1]}2/checkpoints/best.ckpt")) == ours(mine)


def test_a_run_goes_on_from_another(translator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    line = f"fit {LINE} --model.pretrained {translator}"
    assert run(f"{line} {STILL} --run_dir r", "seq2seq") == 0
    assert ours(load_model("r/checkpoints/best.ckpt")) == ours(load_model(str(translator)))
    saved = checkpoint("r", "best")["tessera"]
    assert saved["net"]["encoder"]["width"] == 32
    other = Tokenizer.train(TEXTS * 3, TokenizerConfig("word", 12, 1))
    Path("other.json").write_text(other.to_json())
    said = refused(f"{line} --data.tokenizer.file other.json", capsys)
    assert f"({other.vocab_size} tokens) is not that of" in said


def test_what_they_have_no_model_for(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    for options, words in (
        (
            "--model.net.architecture prefix",
            "architecture encoder_decoder, but this one has prefix",
        ),
        ("--model.net.position rotary", "position sinusoidal, but this one has rotary"),
    ):
        folder = options.split()[-1]
        assert run(f"fit {SMALL_S2S} {PAIRS} {options} --run_dir {folder}", "seq2seq") == 0
        line = f"export --ckpt_path {folder}/checkpoints/best.ckpt --output out"
        assert words in refused(line, capsys) and not Path("out").exists()
        assert run(f"{line} --format safetensors", "seq2seq") == 0
        Path("out").unlink()


def test_folders_that_will_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    Path("theirs").mkdir()
    marian_folder(Path("theirs"))
    line = f"fit {LINE} --model.pretrained theirs"
    settings = json.loads(Path("theirs/config.json").read_text())
    Path("theirs/config.json").write_text(json.dumps(settings | {"model_type": "pegasus"}))
    assert 'model_type "pegasus" is not supported; choose a model of marian, bart, t5' in refused(
        line, capsys
    )
    Path("theirs/config.json").write_text(json.dumps(settings))
    Path("theirs/target.spm").rename("target.spm")
    assert "target.spm does not exist" in refused(line, capsys)
    shutil.move("target.spm", "theirs")
    Path("theirs/model.safetensors").unlink()
    assert "theirs has neither model.safetensors nor pytorch_model.bin" in refused(line, capsys)


def test_pieces_where_there_is_no_tokenizer_json() -> None:
    import sentencepiece

    Path("theirs").mkdir()
    numbers = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}
    train(Path("theirs"), "spiece", ENGLISH, **numbers).rename("theirs/spiece.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file="theirs/spiece.model")
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    random_model(Path("theirs").resolve(), "t5", {**T5_SIZES, "vocab_size": 128, **special})
    model = load_model("theirs")
    assert model.tokenizer.encode_sources(ENGLISH[:3], 99)[0] == [
        [*pieces.encode(text), 1] for text in ENGLISH[:3]
    ]
    assert (model.tokenizer.decoder_start_id, model.tokenizer.eos_id) == (0, 1) and ours(
        model, ENGLISH[:2]
    )


def test_older_files_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs").mkdir()
    model = marian_folder(Path("theirs").resolve())
    expected, older = load_model("theirs").net.state_dict(), Path("theirs/pytorch_model.bin")
    older.write_bytes(b"not read beside safetensors")
    assert same(load_model("theirs").net.state_dict(), expected)
    Path("theirs/model.safetensors").unlink()
    for new in (True, False):
        torch.save(model.state_dict(), older, _use_new_zipfile_serialization=new)
        assert same(load_model("theirs").net.state_dict(), expected)
        torch.save(
            model.state_dict() | {"extra": Malicious()}, older, _use_new_zipfile_serialization=new
        )
        said = refused("translate --ckpt_path theirs --text a", capsys)
        assert "--ckpt_path" in said and "could run code" in said and not Path("pwned").exists()


def test_older_weights_are_downloaded_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("theirs").mkdir()
    model = marian_folder(Path("theirs").resolve())
    expected = load_model("theirs").net.state_dict()
    torch.save(model.state_dict(), "pytorch_model.bin")
    asked: list[bool] = []

    def snapshot_download(_: str, allow_patterns: list[str]) -> str:
        asked.append("pytorch_model.bin" in allow_patterns)
        if asked[-1]:
            shutil.copy("pytorch_model.bin", "theirs")
        return "theirs"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    load_model("hf/someone/model")
    Path("theirs/model.safetensors").unlink()
    assert same(load_model("hf/someone/model").net.state_dict(), expected) and asked == [
        False,
        False,
        True,
    ]


def test_marians_files_are_downloaded_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda _, allow_patterns: asked.extend(allow_patterns)
    )
    run("fit --model.pretrained hf/someone/model", "seq2seq")
    assert {
        "source.spm",
        "target.spm",
        "vocab.json",
        "target_vocab.json",
        "model.safetensors",
    } <= set(asked)
    assert "source.spm, target.spm and vocab.json" in capsys.readouterr().err
