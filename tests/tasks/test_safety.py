"""Nothing that is read from disk or the hub runs code: each kind of file is tried with one that would make `pwned`."""

import ast
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

import pytest
import torch
import yaml

from tasks.checkpoints.pretrained import DOWNLOADED_FILES, weight_files
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.errors import DataError, UsageError
from tests.tasks.command import (
    ROOT,
    SMALL_LM,
    Malicious,
    process,
    run,
    write_corpus,
    write_images,
    write_pairs,
)
from tests.test_architecture import NAMES, SOURCES

TASKS = ("vit", "bert", "mlm", "lm", "seq2seq")
EVIL = "from pathlib import Path\nPath('pwned').touch()\nclass Thing: pass\n"
OBJECT = "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [pwned]]"


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    yield
    assert not Path("pwned").exists()


@pytest.fixture
def evil(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `evil` that Python finds; importing it is what must not happen."""
    Path("evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(".")
    yield
    assert "evil" not in sys.modules


def refused(line: str, task: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says that fails."""
    capsys.readouterr()
    code, said = run(line, task), capsys.readouterr().err
    assert code in (1, 2) and said.startswith("error: ") and said.count("\n") == 1, said
    assert "(add --debug for the traceback)" not in said
    return said


# The source ---------------------------------------------------------------------------------------------------------

CODE = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "runpy.run_path",
    "yaml.load",
    "torch.jit.load",
}
CODE |= {
    "yaml.unsafe_load",
    "yaml.full_load",
    "np.load",
    "numpy.load",
    "torch.hub.load",
    "shutil.unpack_archive",
}
MODULES = {
    "pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "tarfile",
    "zipfile",
    "pandas",
    "transformers",
}
EXCEPT = {  # for the name of an error, for checksums, and to read descriptions of parts and nothing else
    ("tasks/checkpoints/reading.py", "pickle"),
    ("tasks/checkpoints/reading.py", "zipfile"),
    ("tasks/checkpoints/sharded.py", "pickle"),
}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a file could run, or import, what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            yield from MODULES & {name.partition(".")[0] for name in names}
        if not isinstance(node, ast.Call):
            continue
        name, given = (
            ast.unparse(node.func),
            {word.arg: ast.unparse(word.value) for word in node.keywords},
        )
        if name in CODE or "trust_remote_code" in given or given.get("shell", "False") != "False":
            yield name
        loads = (
            name == "torch.load"
            or name.rpartition(".")[2] in ("fit", "test", "validate")
            and "ckpt_path" in given
        )
        if loads and given.get("weights_only") != "True":
            yield name


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_no_line_could(path: Path) -> None:
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    assert {(name, what) for what in unsafe(tree)} <= EXCEPT
    parts = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    pickles = [node for node in parts if ast.unparse(node).startswith("pickle.")]
    strict = (
        {"pickle.Unpickler"} if name == "tasks/checkpoints/sharded.py" else set()
    )  # see test_sharding.py
    assert {ast.unparse(node) for node in pickles} <= {"pickle.UnpicklingError"} | strict


def test_a_line_that_could_is_found() -> None:
    lines = [
        "torch.load(f)",
        "trainer.fit(m, ckpt_path=p)",
        "yaml.load(t)",
        "from tarfile import open",
        "eval(t)",
    ]
    assert all(list(unsafe(ast.parse(line))) for line in lines)
    assert not list(
        unsafe(ast.parse("torch.load(f, weights_only=True); net.eval(); re.compile(p)"))
    )


# Checkpoints --------------------------------------------------------------------------------------------------------

READS: dict[str, list[str]] = {  # every command of every task that reads a checkpoint
    "vit": [
        "validate {0}",
        "test {0}",
        "predict {0} --data.predict_path .",
        "export {0} --format timm",
    ],
    "bert": [
        "validate {0}",
        "test {0}",
        "predict {0} --text a",
        "export {0}",
        "tokenize {0} --text a",
    ],
    "mlm": ["validate {0}", "test {0}", "export {0}"],
    "lm": [
        "validate {0}",
        "test {0}",
        "generate {0} --prompt a",
        "score {0} --data.path t.txt",
        "export {0}",
    ],
    "seq2seq": [
        "validate {0}",
        "test {0}",
        "translate {0} --text a",
        "attend {0} --text a",
        "export {0}",
    ],
}
FITS = ["fit --resume r", "fit --model.pretrained {0}"]


def write_checkpoints() -> list[str]:
    """Files of the ways there are to save an object."""
    Path("t.txt").write_text("a text")
    saved = {
        "state_dict": {"net.w": torch.ones(2)},
        KEY: {"task": "vit", "metadata": {}},
        "extra": Malicious(),
    }
    torch.save(saved, "zip.ckpt")
    torch.save(saved, "old.ckpt", _use_new_zipfile_serialization=False)
    Path("plain.ckpt").write_bytes(pickle.dumps(saved))
    return ["zip.ckpt", "old.ckpt", "plain.ckpt"]


@pytest.mark.parametrize("task", TASKS)
def test_checkpoints_of_every_command(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = import_module(f"tasks.{task}.__main__").APP.commands.keys()
    assert {line.split()[0] for line in READS[task]} | {"fit"} == set(
        commands
    )  # see test_sharding.py
    for file in write_checkpoints():
        Path("r/checkpoints").mkdir(parents=True, exist_ok=True)
        Path("r/config.yaml").write_text("{}")
        shutil.copy(file, "r/checkpoints/last.ckpt")
        for line in READS[task] + FITS:
            said = refused(
                line.format(file if "fit" in line else f"--ckpt_path {file}"), task, capsys
            )
            assert "could run code" in said or "no checkpoint" in said, said


@pytest.mark.parametrize("file", ["zip.ckpt", "old.ckpt", "plain.ckpt"])
def test_such_a_file_would_run(file: str) -> None:
    write_checkpoints()
    with open(file, "rb") as opened:
        pickle.load(opened) if file == "plain.ckpt" else torch.load(opened, weights_only=False)
    assert Path("pwned").exists()
    Path("pwned").unlink()


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin", "w.safetensors"])
def test_weights_of_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Malicious()}, name)
    said = refused(f"fit --model.pretrained {name}", "vit", capsys)
    assert name in said and ("could run code" in said or name.endswith("safetensors"))


# Models in folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def model(lm_letters: Path) -> Path:
    """A folder of Hugging Face's layout, with code and pickles beside what it needs."""
    assert run(f"export --ckpt_path {lm_letters} --format hf --output model", "lm") == 0
    folder = Path("model")
    own = {
        name: "modeling_evil.Thing"
        for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    }
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps(content | {"auto_map": own, "trust_remote_code": True})
        )
    for name in (
        "modeling_evil.py",
        "tokenization_evil.py",
        "configuration_evil.py",
        "__init__.py",
    ):
        (folder / name).write_text(EVIL)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save({"weight": Malicious()}, folder / name)
    Path("t.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    return folder


def test_code_and_pickles_beside_a_model_stay_unread(model: Path) -> None:
    few = "--trainer.max_steps 1 --trainer.limit_val_batches 0"
    line = (
        f"fit --data.source files --data.path t.txt --data.max_length 32 --data.batch_size 4 {few}"
    )
    assert (
        run(
            f"{line} --model.pretrained model --trainer.limit_test_batches 0 --model.samples.every null",
            "lm",
        )
        == 0
    )
    assert run("generate --ckpt_path model --prompt a --max_new_tokens 2", "lm") == 0


def test_pickles_in_place_of_weights(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.safetensors").unlink()  # the next to be read is pytorch_model.bin
    data = "--data.source files --data.path t.txt --data.max_length 32 --data.batch_size 4"
    for line in (f"fit {data} --model.pretrained model", "generate --ckpt_path model --prompt a"):
        assert "pytorch_model.bin holds objects other than tensors" in refused(line, "lm", capsys)
    torch.save({"weight": Malicious()}, model / "model.safetensors")
    for line in (
        "generate --ckpt_path model --prompt a",
        "score --ckpt_path model --data.path model/config.json",
    ):
        assert "is truncated or not a file of weights" in refused(line, "lm", capsys)


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").touch()
    (tmp_path / "model").mkdir()
    index = {
        "weight_map": {"a": "../outside.safetensors", "b": str(tmp_path / "outside.safetensors")}
    }
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="model/outside.safetensors is missing"):
        weight_files(tmp_path / "model")


def test_no_code_and_no_pickle_is_downloaded() -> None:
    wrong = [
        "modeling_x.py",
        "pytorch_model.bin",
        "x.pt",
        "model.ckpt",
        "x.pkl",
        "x.npy",
        "x.zip",
        "rust_model.ot",
    ]
    assert not [name for name in wrong for pattern in DOWNLOADED_FILES if fnmatch(name, pattern)]


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_yaml_makes_no_objects(
    task: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(f"model:\n  compile: {OBJECT}\n")
    assert "not valid YAML" in refused("fit --config c.yaml", task, capsys)
    refused(f"fit '--model.compile={OBJECT}'", task, capsys)
    if task == "vit":
        shutil.copytree(finished, "r")
        with open("r/config.yaml", "a") as file:
            file.write(f"more: {OBJECT}\n")
        assert "not valid YAML" in refused("fit --resume r", task, capsys)


RUNS = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
THING = {"class_path": "evil.Thing"}
CLASSES: list[dict[str, Any]] = [
    {"model": {"optimizer": THING}},
    {"model": {"net": THING}},
    {"model": {"net": "evil.Thing"}},
    {"data": {"loading": THING}},
    {"data": {"source": RUNS}},
    {"trainer": {"callbacks": [THING]}},
    {"trainer": {"callbacks": [RUNS]}},
    {
        "trainer": {
            "callbacks": [
                {"class_path": "LambdaCallback", "init_args": {"on_fit_start": "evil.Thing"}}
            ]
        }
    },
    {
        "trainer": {
            "callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": RUNS}}]
        }
    },
    {
        "trainer": {
            "callbacks": [
                {"class_path": "LambdaCallback", "init_args": {"on_fit_start": "torch.nn.os.abort"}}
            ]
        }
    },
    {"trainer": {"logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": RUNS}}]}},
    {"trainer": {"strategy": THING, "plugins": [THING], "profiler": THING}},
    {"checkpoint": THING},
]


@pytest.mark.usefixtures("evil")
@pytest.mark.parametrize("options", CLASSES, ids=str)
def test_options_import_nothing(
    options: dict[str, Any], run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(json.dumps(options))
    refused("fit --config c.yaml", "vit", capsys)
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    (run_copy / "config.yaml").write_text(json.dumps({**config, **options}))
    refused(f"fit --resume {run_copy}", "vit", capsys)
    last = run_copy / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    saved[KEY]["config"] |= {
        name: saved[KEY]["config"].get(name, {}) | value for name, value in options.items()
    }
    saved[KEY]["net"] |= {"stack": THING}
    torch.save(saved, last)
    refused(f"test --ckpt_path {last}", "vit", capsys)
    refused(f"export --ckpt_path {last} --format timm", "vit", capsys)


@pytest.mark.usefixtures("evil")
def test_options_of_texts_import_nothing(
    lm_bytes: Path, translator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {
        "lm": "generate --ckpt_path x.ckpt --prompt a",
        "seq2seq": "translate --ckpt_path x.ckpt --text a",
    }
    for (task, line), source in zip(lines.items(), (lm_bytes, translator), strict=True):
        saved = read_checkpoint(source)
        saved[KEY]["config"]["data"]["tokenizer"] = saved[KEY]["config"]["model"]["optimizer"] = (
            THING
        )
        torch.save(saved, "x.ckpt")
        assert "evil.Thing" in refused("test --ckpt_path x.ckpt", task, capsys)
        saved[KEY]["net"] |= THING
        torch.save(saved, "x.ckpt")
        assert "x.ckpt" in refused(line, task, capsys)


@pytest.mark.slow
def test_classes_of_own_packages_are_trusted_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pytorch_lightning import Callback\n"
        "class Hello(Callback):\n    def on_fit_start(self, *_):\n        print('hello from mine')\n"
    )
    before = f"import os; sys.path.insert(0, {str(tmp_path)!r})\n"
    line = "fit --trainer.fast_dev_run 1 --trainer.callbacks+=mine.Hello"
    done = process(line, before, cwd=tmp_path)
    assert done.returncode == 2 and "set TESSERA_TRUST=mine if you trust it" in done.stderr
    done = process(line, f"{before}os.environ['TESSERA_TRUST'] = 'mine'", cwd=tmp_path)
    assert done.returncode == 0 and "hello from mine" in done.stdout, done.stderr


# Data ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ("vit", "bert"))
def test_a_data_set_with_a_loading_script(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data/data.py").write_text(EVIL)
    Path("data/train.pkl").write_bytes(pickle.dumps(Malicious()))
    for option in ("--data.path data", "--data.dataset.name data"):
        refused(f"fit --data.source hub {option}", task, capsys)


def test_a_script_beside_tables_stays_unread() -> None:
    from datasets import Dataset

    Path("data").mkdir()
    Path("data/data.py").write_text(EVIL)
    rows = {"text": ["good film", "bad film"] * 20, "label": [1, 0] * 20}
    Dataset.from_dict(rows).to_parquet("data/train-00000-of-00001.parquet")
    small = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --data.batch_size 4"
    few = "--trainer.limit_train_batches 1 --trainer.max_epochs 1 --trainer.limit_test_batches 0"
    assert run(f"fit --data.source hub --data.path data {small} {few}", "bert") == 0


def test_caches_are_no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", "cache")
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.source files --data.path texts --data.tokenizer.vocabulary 300"
    line += " --trainer.limit_train_batches 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
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
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0),
        b"IDAT": packed,
        b"IEND": b"",
    }
    whole = b"".join(
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d))
        for k, d in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + whole


def jpeg(side: int, before: bytes = b"") -> bytes:
    """A small picture whose header announces a large one, behind the bytes `before`."""
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    data = file.getvalue()
    start = data.index(b"\xff\xc0")
    return (
        data[:start]
        + before
        + data[start : start + 5]
        + struct.pack(">HH", side, side)
        + data[start + 9 :]
    )


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(pwned) (w) file closefile\nshowpage\n%%EOF\n"
PICTURES = {
    "bomb.png": lambda: png(40_000),
    "bomb.jpg": lambda: jpeg(60_000),
    "hidden.jpg": lambda: jpeg(60_000, b"\x00\x00"),
    "mark.jpg": lambda: jpeg(60_000, b"\xff\xd0"),
    "script.png": lambda: EPS,  # Pillow would have Ghostscript run it
    "drawing.png": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>',
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bin").mkdir()
    Path("bin/gs").write_text(f"#!/bin/sh\ntouch {Path('pwned').resolve()}\n")
    Path("bin/gs").chmod(0o755)
    monkeypatch.setenv(
        "PATH", f"{Path('bin').resolve()}:{Path(sys.executable).parent}:/usr/bin:/bin"
    )
    write_images(Path("images"))
    Path("images/train/cat", name).write_bytes(PICTURES[name]())
    said = refused(
        "fit --preset digits --model.net.channels null --data.source folder --data.path images",
        "vit",
        capsys,
    )
    assert name in said and "is not a readable image" in said


def write_bomb(path: Path, size: int = 2**27) -> None:
    """Zeros that are small only as a file."""
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    with pa.output_stream(str(path), compression=codec) as file:
        for _ in range(size // 2**20):
            file.write(bytes(2**20))


@pytest.mark.parametrize("ending", (".gz", ".zst"))
def test_texts_that_expand_beyond_measure(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    for name, task, line in [
        ("t.txt", "lm", "--data.source files --data.path t.txt{0}"),
        ("t.jsonl", "lm", "--data.source files --data.path t.jsonl{0}"),
        (
            "pairs/train.en",
            "seq2seq",
            "--data.source files --data.path pairs --data.languages en-up",
        ),
    ]:
        Path(name).unlink(missing_ok=True)
        write_bomb(Path(name + ending))
        said = refused(f"fit {line.format(ending)}", task, capsys)
        assert "expands to more than 200 times its size" in said, said


def test_texts_that_are_merely_dull_are_read() -> None:
    Path("t.txt.gz").write_bytes(gzip.compress(b"again and again\n" * 2**18))
    from datamodules.sources.readers.formats import open_decompressed

    with open_decompressed(Path("t.txt.gz")) as file:
        assert len(file.read()) == 2**22


def test_a_tokenizer_that_is_a_pickle(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer.json", "t.model"):
        Path(name).write_bytes(pickle.dumps(Malicious()))
        refused(f"tokenize --text a --tokenizer.file {name}", "bert", capsys)
    with pytest.raises((DataError, UsageError)):
        from datamodules.tokenizers import Tokenizer

        Tokenizer.from_file(Path("tokenizer.json"))
