"""Nothing that is read from disk or the hub runs code: each file here would make `pwned`."""

import gzip
import json
import pickle
import shutil
import struct
import sys
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import yaml
from datasets import Dataset
from PIL import Image

from datamodules.sources.readers.formats import open_decompressed
from tasks.checkpoints.pretrained import DOWNLOADED_FILES, weight_files
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.errors import DataError
from tests.helpers.command import Console, Patch, process, run
from tests.helpers.tiny import SMALL_LM, Malicious, write_corpus, write_images, write_pairs

EVIL = "from pathlib import Path\nPath('pwned').touch()\nclass Thing: pass\n"
OBJECT = "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [pwned]]"


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    yield
    assert not Path("pwned").exists()


@pytest.fixture
def evil(monkeypatch: Patch) -> Iterator[None]:
    """A module `evil` that Python finds, and that must not be imported."""
    Path("evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(".")
    yield
    assert "evil" not in sys.modules


# Checkpoints --------------------------------------------------------------------------------------

BOTH = ("look", "profile")
READS: dict[str, list[str]] = {  # every command that reads a checkpoint
    "vit": [
        "validate",
        "test",
        "predict --input .",
        "export --format timm",
        *BOTH,
        "probe",
        "compare FILE",
    ],
    "mae": ["validate", "test", "export", *BOTH],
    "bert": ["validate", "test", "predict --text a", "export", "tokenize --text a", *BOTH],
    "mlm": ["validate", "test", "fill_mask --text a", "export", *BOTH],
    "lm": ["validate", "test", "generate --prompt a", "score --input t.txt", "export", *BOTH],
    "igpt": ["validate", "test", "generate", "probe", "export", *BOTH],
    "seq2seq": ["validate", "test", "translate --text a", "attend --text a", "export", *BOTH],
}


def write_checkpoints() -> list[str]:
    """Files of the ways there are to save an object."""
    Path("t.txt").write_text("a text")
    entry = {"task": "vit", "metadata": {}}
    saved = {"state_dict": {"net.w": torch.ones(2)}, KEY: entry, "extra": Malicious()}
    torch.save(saved, "zip.ckpt")
    torch.save(saved, "old.ckpt", _use_new_zipfile_serialization=False)
    Path("plain.ckpt").write_bytes(pickle.dumps(saved))
    return ["zip.ckpt", "old.ckpt", "plain.ckpt"]


@pytest.mark.parametrize("task", READS)
def test_checkpoints_of_every_command(task: str, console: Console) -> None:
    commands = import_module(f"tasks.{task}.__main__").APP.commands.keys()
    assert {line.split()[0] for line in READS[task]} | {"fit"} == set(commands)
    Path("r/checkpoints").mkdir(parents=True)
    Path("r/config.yaml").write_text("{}")
    for file in write_checkpoints():
        shutil.copy(file, "r/checkpoints/last.ckpt")
        lines = [
            line.replace("FILE", file) if "FILE" in line else f"{line} --ckpt_path {file}"
            for line in READS[task]
        ]
        for line in (*lines, "fit --resume r", f"fit --model.pretrained {file}"):
            console.refused(line, "could run code", task=task)


@pytest.mark.parametrize("file", ["zip.ckpt", "old.ckpt", "plain.ckpt"])
def test_such_a_file_would_run(file: str) -> None:
    write_checkpoints()
    with open(file, "rb") as opened:
        pickle.load(opened) if file == "plain.ckpt" else torch.load(opened, weights_only=False)
    Path("pwned").unlink()


@pytest.mark.parametrize("name, said", [
    ("w.pth", "could run code"), ("w.bin", "could run code"), ("w.safetensors", ""),
    ("vit_tiny_patch16_224.pth", "could run code"),
])  # fmt: skip
def test_weights_of_others(name: str, said: str, console: Console) -> None:
    torch.save({"weight": Malicious()}, name)
    code = 1 if name.endswith("safetensors") else 2
    error = console.refused(f"fit --model.pretrained {name}", name, said, code=code)
    assert error.count("--model.pretrained") == 1


# Models in folders --------------------------------------------------------------------------------


@pytest.fixture
def model(lm_letters: Path) -> Path:
    """A folder of Hugging Face's layout, with code and pickles beside what it needs."""
    assert run(f"export --ckpt_path {lm_letters} --format hf --output model", "lm") == 0
    folder = Path("model")
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    code = {"auto_map": dict.fromkeys(classes, "modeling_evil.Thing"), "trust_remote_code": True}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | code))
    for name in ("modeling_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(EVIL)
    for name in ("pytorch_model.bin", "training_args.bin"):
        torch.save({"weight": Malicious()}, folder / name)
    Path("t.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    return folder


DATA = "--data.path t.txt --data.max_length 32 --data.batch_size 4"


@pytest.mark.usefixtures("model")
def test_code_and_pickles_beside_a_model_stay_unread() -> None:
    few = "--trainer.max_steps 1 --trainer.limit_val_batches 0 --trainer.limit_test_batches 0"
    line = f"fit {DATA} {few} --model.pretrained model --model.samples.every null"
    assert run(line, "lm") == 0
    assert run("generate --ckpt_path model --prompt a --max_new_tokens 2", "lm") == 0


def test_pickles_in_place_of_weights(model: Path, console: Console) -> None:
    (model / "model.safetensors").unlink()  # the next to be read is pytorch_model.bin
    for line in (f"fit {DATA} --model.pretrained model", "generate --ckpt_path model --prompt a"):
        console.refused(line, "pytorch_model.bin", task="lm")
    torch.save({"weight": Malicious()}, model / "model.safetensors")
    console.refused(line, "model.safetensors", task="lm", code=1)


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.touch()
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"a": "../outside.safetensors", "b": str(outside)}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="model/outside.safetensors"):
        weight_files(tmp_path / "model")


def test_no_code_and_no_pickle_is_downloaded() -> None:
    wrong = ["modeling_x.py", "pytorch_model.bin", "x.pt", "model.ckpt", "x.pkl", "x.npy", "x.zip"]
    assert not [name for name in wrong for pattern in DOWNLOADED_FILES if fnmatch(name, pattern)]


# Options ------------------------------------------------------------------------------------------


def test_yaml_makes_no_objects(run_copy: Path, console: Console) -> None:
    Path("c.yaml").write_text(f"model:\n  compile: {OBJECT}\n")
    console.refused("fit --config c.yaml", "c.yaml")
    console.refused(f"fit '--model.compile={OBJECT}'")
    with open(run_copy / "config.yaml", "a") as file:
        file.write(f"more: {OBJECT}\n")
    console.refused(f"fit --resume {run_copy}", "config.yaml")


RUNS = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
THING = {"class_path": "evil.Thing"}


def on_fit_start(function: Any) -> dict[str, Any]:
    arguments = {"on_fit_start": function}
    return {"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": arguments}]}}


CLASSES: list[dict[str, Any]] = [
    {"model": {"optimizer": THING}},
    {"model": {"net": "evil.Thing"}},
    {"data": {"loading": THING}},
    {"data": {"source": RUNS}},
    {"trainer": {"callbacks": [THING]}},
    on_fit_start("evil.Thing"),
    on_fit_start(RUNS),
    on_fit_start("torch.nn.os.abort"),
    {"trainer": {"logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": RUNS}}]}},
    {"trainer": {"strategy": THING, "plugins": [THING], "profiler": THING}},
    {"checkpoint": THING},
]


@pytest.mark.plain_every(3)
@pytest.mark.usefixtures("evil")
@pytest.mark.parametrize("options", CLASSES, ids=str)
def test_options_import_nothing(options: dict[str, Any], run_copy: Path, console: Console) -> None:
    Path("c.yaml").write_text(json.dumps(options))
    console.refused("fit --config c.yaml")
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    (run_copy / "config.yaml").write_text(json.dumps({**config, **options}))
    console.refused(f"fit --resume {run_copy}")
    last = run_copy / "checkpoints/last.ckpt"
    saved = torch.load(last, weights_only=True)
    for name, value in options.items():
        saved[KEY]["config"][name] = saved[KEY]["config"].get(name, {}) | value
    saved[KEY]["net"]["stack"] = THING
    torch.save(saved, last)
    console.refused(f"test --ckpt_path {last}", code=None)
    console.refused(f"export --ckpt_path {last} --format timm", code=None)


COMMANDS = {
    "lm": ("lm_bytes", "generate --ckpt_path x.ckpt --prompt a"),
    "seq2seq": ("translator", "translate --ckpt_path x.ckpt --text a"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("evil")
@pytest.mark.parametrize("task", COMMANDS)
def test_options_of_text_tasks_import_nothing(
    task: str, request: pytest.FixtureRequest, console: Console
) -> None:
    fixture, line = COMMANDS[task]
    saved = read_checkpoint(request.getfixturevalue(fixture))
    saved[KEY]["config"]["data"]["tokenizer"] = THING
    saved[KEY]["config"]["model"]["optimizer"] = THING
    torch.save(saved, "x.ckpt")
    console.refused("test --ckpt_path x.ckpt", "evil.Thing", task=task)
    saved[KEY]["net"] |= THING
    torch.save(saved, "x.ckpt")
    console.refused(line, task=task, code=1)


@pytest.mark.slow
def test_classes_of_own_packages_are_trusted_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pytorch_lightning import Callback\n"
        "class Hello(Callback):\n    def on_fit_start(self, *_):\n        print('hello')\n"
    )
    before = f"import os; sys.path.insert(0, {str(tmp_path)!r})\n"
    line = "fit --trainer.fast_dev_run 1 --trainer.callbacks+=mine.Hello"
    done = process(line, before, cwd=tmp_path)
    assert done.returncode == 2 and "TESSERA_TRUST=mine" in done.stderr
    done = process(line, f"{before}os.environ['TESSERA_TRUST'] = 'mine'", cwd=tmp_path)
    assert done.returncode == 0 and "hello" in done.stdout, done.stderr


# Data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ("vit", "bert"))
def test_a_data_set_with_a_loading_script(task: str, console: Console) -> None:
    Path("data").mkdir()
    Path("data/data.py").write_text(EVIL)
    Path("data/train.pkl").write_bytes(pickle.dumps(Malicious()))
    for option in ("--data.path data", "--data.dataset.name data"):
        console.refused(f"fit --data.source hub {option}", task=task, code=None)


def test_a_script_beside_tables_stays_unread() -> None:
    Path("data").mkdir()
    Path("data/data.py").write_text(EVIL)
    rows = {"text": ["good film", "bad film"] * 20, "label": [1, 0] * 20}
    Dataset.from_dict(rows).to_parquet("data/train-00000-of-00001.parquet")
    line = "fit --data.source hub --data.path data --data.batch_size 4 --model.net.stack.depth 1"
    line += " --model.net.stack.width 32 --model.net.stack.heads 2 --trainer.max_steps 1"
    assert run(f"{line} --trainer.limit_test_batches 0", "bert") == 0


def test_caches_are_no_pickles(monkeypatch: Patch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", "cache")
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.path texts --data.tokenizer.vocabulary 300"
    line += " --trainer.limit_train_batches 1 --trainer.limit_val_batches 1"
    line += " --trainer.limit_test_batches 0"
    assert run(line, "lm") == 0
    files = [path for path in Path("cache").rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(pickle.dumps(Malicious()))
    assert run(line, "lm") in (0, 1)


def png(side: int) -> bytes:
    """A black picture that is small only as a file."""
    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + side // 8)) for _ in range(side)) + rows.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        whole += struct.pack(">I", len(data)) + kind + data + checksum
    return whole


def jpeg(side: int, before: bytes = b"") -> bytes:
    """A small picture whose header announces a large one, behind the bytes `before`."""
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    data = file.getvalue()
    start = data.index(b"\xff\xc0")
    size = struct.pack(">HH", side, side)
    return data[:start] + before + data[start : start + 5] + size + data[start + 9 :]


EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    b"(pwned) (w) file closefile\nshowpage\n%%EOF\n"
)
PICTURES = {
    "bomb.png": lambda: png(40_000),
    "bomb.jpg": lambda: jpeg(60_000),
    "hidden.jpg": lambda: jpeg(60_000, b"\x00\x00"),
    "script.png": lambda: EPS,  # Pillow would have Ghostscript run it
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str, monkeypatch: Patch, console: Console) -> None:
    programs = Path("bin").resolve()
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {Path('pwned').resolve()}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin")
    write_images(Path("images"))
    Path("images/train/cat", name).write_bytes(PICTURES[name]())
    line = "fit --preset digits --model.net.channels null --data.source folder --data.path images"
    said = ["has 1,600,000,000 pixels", "shrink it"] if name == "bomb.png" else []
    console.refused(line, name, *said, code=1)


EXPANDING = [  # text file, task, options
    ("t.txt", "lm", "--data.path t.txt{0}"),
    ("t.jsonl", "lm", "--data.path t.jsonl{0}"),
    ("pairs/train.en", "seq2seq", "--data.path pairs --data.languages en-up"),
]


@pytest.mark.parametrize(
    "ending, codec", [(".gz", "gzip"), pytest.param(".zst", "zstd", marks=pytest.mark.slow)]
)
def test_texts_that_expand_beyond_measure(ending: str, codec: str, console: Console) -> None:
    write_pairs(Path("pairs"))
    for name, task, options in EXPANDING:
        Path(name).unlink(missing_ok=True)
        with pyarrow.output_stream(name + ending, compression=codec) as file:
            for _ in range(128):
                file.write(bytes(2**20))
        line = f"fit {options.format(ending)}"
        console.refused(line, Path(name).name, "200 times", task=task, code=1)


def test_texts_that_are_merely_dull_are_read() -> None:
    Path("t.txt.gz").write_bytes(gzip.compress(b"again and again\n" * 2**18))
    with open_decompressed(Path("t.txt.gz")) as file:
        assert len(file.read()) == 2**22


def test_a_tokenizer_that_is_a_pickle(console: Console) -> None:
    for name in ("tokenizer.json", "t.model"):
        Path(name).write_bytes(pickle.dumps(Malicious()))
        console.refused(f"tokenize --text a --tokenizer.file {name}", task="bert", code=None)
