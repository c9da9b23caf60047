"""Damaged folders of Hugging Face's layout, and what is downloaded: one sentence, or the model."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tasks.checkpoints.pretrained import downloading
from tasks.errors import DataError, UsageError
from tests.helpers.command import Capture, Console, Patch, environment, run
from tests.helpers.model_folders import decoder_folder, encoder_folder, marian_folder, save_model
from tests.helpers.results import checkpoint, same
from tests.helpers.tiny import PAIRS, Malicious, write_pairs

TEXTS = ["two three one four\n"] * 60
DEEP = b"[" * 100_000 + b"]" * 100_000
GENERATE = "generate --ckpt_path model --max_new_tokens 2"
BROKEN = {
    "a list": b"[[1, 2]]",
    "deep": b'{"model_type": ' + DEEP + b"}",
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "cut": b'{"model_type": "lla',
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "latin": b'{"model_type": "\xe9"}',
    "empty": b"",
}


@pytest.fixture
def folder() -> Path:
    """A tiny Llama and its tokenizer, in the folder `model`."""
    decoder_folder(Path("model"), "LlamaForCausalLM", TEXTS)
    return Path("model")


@pytest.mark.parametrize("content", [*BROKEN.values(), None], ids=[*BROKEN, "a pipe"])
def test_damaged_configs(content: bytes | None, folder: Path, console: Console) -> None:
    if content is None:
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
    else:
        (folder / "config.json").write_bytes(content)
    console.refused(GENERATE, "config.json", task="lm")
    for task in ("lm", "bert", "mlm", "seq2seq"):
        console.refused("fit --model.pretrained model", "config.json", task=task)


INDICES = ["5", '["a"]', '{"a": 5}', '{"a": ["b"]}', '{"a": "other.safetensors"}', '{"a": ""}']
INDICES = ["[]", "{}", *(f'{{"weight_map": {content}}}' for content in (*INDICES, DEEP.decode()))]


@pytest.mark.parametrize("content", INDICES, ids=lambda content: content[:40])
def test_damaged_indices(content: str, folder: Path, console: Console) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    console.refused(GENERATE, str(folder), task="lm", code=1)


def test_weights_in_several_files(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert run(GENERATE, "lm") == 0


def spoil(value: torch.Tensor, number: float) -> torch.Tensor:
    return value.masked_fill(torch.eye(*value.shape, dtype=torch.bool), number)


DAMAGES: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [  # of one weight; exit code
    (lambda value: spoil(value, torch.nan), 1),
    (lambda value: spoil(value, torch.inf).half(), 1),
    (lambda value: value.to(torch.float8_e4m3fn), 2),
    (lambda value: value.to(torch.int8), 2),
    (lambda value: value[0, 0], 2),
    (lambda value: value[:, :3], 2),
]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights(file: str, folder: Path, console: Console) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save: Any = save_file if file.endswith("safetensors") else torch.save
    name = "model.layers.1.self_attn.k_proj.weight"
    for change, code in DAMAGES:
        save(state | {name: change(state[name]).contiguous()}, folder / file)
        error = console.refused(GENERATE, task="lm", code=code)
        assert "k_proj" in error or "stack.blocks.1" in error
    del state[name]
    save(state, folder / file)
    console.refused(GENERATE, "k_proj", task="lm")


def test_a_tensor_without_the_memory_that_it_claims(folder: Path, capsys: Capture) -> None:
    (folder / "model.safetensors").unlink()
    huge = torch.zeros(1).expand(10**9, 16)
    torch.save({"model.embed_tokens.weight": huge}, folder / "pytorch_model.bin")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 10**9}))
    assert run(GENERATE, "lm") == 1
    assert "allocate" in capsys.readouterr().err


def test_older_weights_run_no_code(folder: Path, console: Console) -> None:
    older = folder / "pytorch_model.bin"
    older.write_bytes(b"not read beside safetensors")
    expected = console.printed(GENERATE, "lm")[0]
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for zipped in (True, False):
        torch.save(state, older, _use_new_zipfile_serialization=zipped)
        assert console.printed(GENERATE, "lm")[0] == expected
        code = state | {"extra": Malicious()}
        torch.save(code, older, _use_new_zipfile_serialization=zipped)
        console.refused(GENERATE, "--ckpt_path", task="lm")
        assert not Path("pwned").exists()
    older.unlink()
    console.refused(GENERATE, "pytorch_model.bin", task="lm")


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path, console: Console) -> None:
    letters = ["".join(map(chr, range(200, 900)))]
    other = Tokenizer.train(letters, TokenizerConfig("character", 999, 1))
    (folder / "tokenizer.json").write_text(other.to_json())
    console.refused(GENERATE, str(folder), f"{other.vocab_size} tokens", task="lm")


@pytest.mark.parametrize("file", ["vit.safetensors", "vit.pth"])
def test_weights_of_timm_that_are_not_finite(file: str, console: Console) -> None:
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=1)
    model.blocks[0].attn.qkv.weight.data[3, 3] = torch.nan
    save: Any = save_file if file.endswith("safetensors") else torch.save
    save(model.state_dict(), file)
    console.refused(f"fit --model.pretrained {file}", "blocks.0.attn.qkv.weight", code=1)


def test_texts_are_no_longer_than_the_window_of_attention(console: Console) -> None:
    window = {"sliding_window": 24}
    model = decoder_folder(Path("model"), "MistralForCausalLM", TEXTS, **window)
    Path("text.txt").write_text("".join(TEXTS))
    line = (
        "fit --data.path text.txt --model.samples.every null "
        "--trainer.max_steps 2 --data.batch_size 4 --trainer.log_every_n_steps 1"
    )
    assert run(f"{line} --model.pretrained model --run_dir r", "lm") == 0
    assert checkpoint("r", "best")["tessera"]["net"]["max_length"] == 24
    for source in ("model", "r/checkpoints/best.ckpt"):
        again = f"{line} --model.pretrained {source} --data.max_length 25 --run_dir s"
        console.refused(again, "--data.max_length 25", task="lm")
        generate = f"generate --ckpt_path {source} --prompt two --max_new_tokens"
        out, _ = console.printed(f"{generate} 21 --json true", "lm")
        assert isinstance(json.loads(out), dict)  # notes are in standard error
        for beams in (1, 2):
            options = f"{generate} 30 --beams {beams} --temperature 0"
            console.capture.readouterr()
            assert run(options, "lm") == 2
            assert "sliding_window" in console.capture.readouterr().err.splitlines()[-1]
    assert run("export --ckpt_path r/checkpoints/best.ckpt --format hf --output back", "lm") == 0
    settings = json.loads(Path("back/config.json").read_text())
    assert (settings["model_type"], settings["sliding_window"]) == (model.config.model_type, 24)


# The hub ------------------------------------------------------------------------------------------


@pytest.fixture
def downloads(monkeypatch: Patch) -> list[list[str]]:
    """Patterns of each download, which copies matching files of `hub` to `local`."""
    found: list[list[str]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        assert name == "someone/model"
        found.append(allow_patterns)
        Path("local").mkdir(exist_ok=True)
        for file in Path("hub").iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, "local")
        return "local"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return found


@pytest.mark.slow
def test_without_a_network_nothing_is_tried_again() -> None:
    """The hub's library would print that it does."""
    source = "timm/vit_tiny_patch16_224"
    code = f"import tessera; tessera.load({source!r})"
    nowhere = environment(HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME="cache")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert "Retrying" not in done.stderr and last.startswith("datamodules.utils.errors.DataError")
    assert f"{source} could not be downloaded" in last and "tessera.load FOLDER" in last


def test_older_files_are_downloaded_if_there_are_no_others(
    downloads: list[list[str]], console: Console
) -> None:
    from tasks.seq2seq.architectures import load_model

    state = marian_folder(Path("hub")).state_dict()
    expected = load_model("hub").net.state_dict()
    torch.save(state, "hub/pytorch_model.bin")
    line = "translate --ckpt_path hf/someone/model --text a"
    assert same(load_model("hf/someone/model").net.state_dict(), expected)
    assert len(downloads) == 1
    Path("local/model.safetensors").unlink()
    Path("hub/model.safetensors").unlink()
    assert same(load_model("hf/someone/model").net.state_dict(), expected)
    assert len(downloads) == 3
    Path("local/pytorch_model.bin").unlink()
    Path("hub/pytorch_model.bin").unlink()
    console.refused(line, "hf/someone/model has neither", task="seq2seq")
    Path("local/source.spm").unlink()
    shutil.rmtree("hub")
    console.refused(line, "source.spm", task="seq2seq", code=1)  # it cannot be downloaded


def test_an_encoder_of_the_hub_with_an_older_tokenizer(downloads: list[list[str]]) -> None:
    encoder_folder(Path("hub"), "BertForMaskedLM")
    ids = json.loads(Path("hub/tokenizer.json").read_text())["model"]["vocab"]
    Path("hub/tokenizer.json").unlink()
    Path("hub/vocab.txt").write_text("\n".join(sorted(ids, key=ids.get)) + "\n")
    options = "--trainer.limit_train_batches 1 --trainer.limit_val_batches 1 --trainer.max_steps 1"
    line = f"fit {options} --trainer.limit_test_batches 1 --data.max_length 16 --run_dir r"
    assert run(f"{line} --model.pretrained hf/someone/model", "mlm") == 0
    assert checkpoint("r")["tessera"]["metadata"]["vocabulary"] == 300
    assert {"vocab.json", "merges.txt", "target_vocab.json"} <= {*downloads[0]}


@pytest.mark.parametrize("change, named", [
    (lambda: Path("model/target.spm").unlink(), "target.spm"),
    (lambda: Path("model/model.safetensors").unlink(), "model.safetensors"),
    (lambda: save_model(Path("model"), "BertForMaskedLM"), "bert"),
])  # fmt: skip
def test_folders_of_translators(change: Callable[[], Any], named: str, console: Console) -> None:
    write_pairs(Path("pairs"))
    marian_folder(Path("model"))
    change()
    line = f"fit {PAIRS} --model.pretrained model"
    console.refused(line, named, task="seq2seq")


def test_a_request_that_cannot_be_met_is_no_failed_download() -> None:
    with pytest.raises(UsageError, match="^there is no such model$"), downloading("hf/x", "advice"):
        raise UsageError("there is no such model")
    with (
        pytest.raises(DataError, match="hf/x could not be downloaded"),
        downloading("hf/x", "wait"),
    ):
        raise OSError


def test_a_local_folder_may_have_the_name_of_a_model_of_the_hub(console: Console) -> None:
    Path("hf/llama").mkdir(parents=True)
    line = "generate --prompt a --ckpt_path hf/llama"
    assert "./hf/llama" in console.refused(line, task="lm", code=1)
    Path("hf/llama").rmdir()
    assert "./hf/llama" not in console.refused(line, task="lm", code=1)
