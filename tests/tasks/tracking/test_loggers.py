"""What the loggers hold, read back with their own readers."""

import base64
import hashlib
import json
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
import yaml
from jsonargparse import Namespace

from tasks import __version__
from tasks.base import Task
from tasks.errors import UsageError
from tasks.tracking.loggers import STEP
from tasks.tracking.media import Table, to_tensorboard
from tasks.tracking.metrics_csv import LoggedRows
from tasks.tracking.run_folder import git_commit
from tasks.training.trainer_options import place_loggers
from tests.helpers.command import ROOT, Patch, process, python, run
from tests.helpers.results import checkpoint, metrics
from tests.helpers.tiny import PAIRS, SHORT, SMALL_LM, SMALL_S2S, write_corpus, write_pairs

LOGGED = {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_s"}
LOGGED |= {"val/loss", "val/acc", "test/acc"}
WANDB = "--config configs/logger/wandb.yaml"
BOTH = f"{WANDB} --config configs/logger/tensorboard.yaml"
KILL_AFTER_SENDING = """
import os, signal, sys
from tasks.cli.lazy_imports import import_lightning
import_lightning()
from tests.helpers import faults
def end(*_):
    sys.modules["wandb"].finish()
    os.kill(os.getpid(), signal.SIGKILL)
faults.at("step", end)
"""
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123",
    "DATABASE_PASSWORD": "correct horse battery staple",
}


def entries(data: bytes) -> Iterator[bytes]:
    """Of a W&B file: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    assert data[:4] == b":W&B"
    place = 7
    entry = b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too short for a header: the rest of the block is empty
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):  # as it is being written
            return
        entry += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def records(folder: Path) -> list[Any]:
    """All records of the W&B files in a run folder, by W&B's own description of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(path for path in folder.rglob("*.wandb") if not path.parent.is_symlink())
    return [Record.FromString(entry) for path in files for entry in entries(path.read_bytes())]


def end_run(folder: str = "r") -> None:
    """End the W&B run as a process does, and wait until W&B's own process has written its file."""
    wandb.finish()
    for _ in range(200):
        found = [(path.stat().st_mtime, path) for path in Path(folder).rglob("*.wandb")]
        if found and any(record.HasField("exit") for record in records(max(found)[1].parent)):
            return
        time.sleep(0.05)
    raise AssertionError(f"the newest of {found} is not complete")


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The rows that were logged, values by name."""
    rows = []
    for record in found:
        items = record.history.item
        names = ["/".join(item.nested_key) or item.key for item in items]
        rows.append(dict(zip(names, [json.loads(item.value_json) for item in items], strict=True)))
    return [row for row in rows if row]


def run_ids(found: list[Any]) -> set[str]:
    """The ids of W&B's runs, which may all be continued."""
    runs = [record.run for record in found if record.run.run_id]
    assert all(run.resume for run in runs)
    return {run.run_id for run in runs}


def tables(folder: str | Path) -> list[Any]:
    """The tables of W&B in a run folder."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("*.table.json"))]


def logged(rows: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often each name was logged at each step."""
    inner = ("_", "trainer/", "epoch")
    return Counter(
        (n, row["trainer/global_step"]) for row in rows for n in row if not n.startswith(inner)
    )


def written(folder: str) -> Counter[tuple[str, int]]:
    """The same of `metrics.csv`."""
    return Counter(
        (n, int(row["step"])) for row in metrics(folder) for n in row if n not in ("step", "epoch")
    )


def scalars(folder: str) -> tuple[Any, Counter[tuple[str, int]]]:
    """What TensorBoard shows of a run folder, and how often each scalar was logged at each step."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(f"{folder}/tensorboard")
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name not in ("epoch", "hp_metric")]
    return events, Counter((name, event.step) for name in names for event in events.Scalars(name))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with W&B, which keeps checkpoints, and TensorBoard; not to be changed."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("tracked")
    config = yaml.safe_load((ROOT / "configs/logger/wandb.yaml").read_text())
    config["trainer"]["logger+"][0]["init_args"]["log_model"] = "all"
    (folder / "wandb.yaml").write_text(yaml.safe_dump(config))
    line = f"fit {SHORT} --model.net.pool cls --config {folder}/wandb.yaml --run_dir {folder}/run"
    line += " --model.optimizer.optimizer muon --model.optimizer.muon_lr 2e-3"
    settings = {"WANDB_DATA_DIR": str(folder / "staging"), "WANDB_SILENT": "false"}
    settings |= {"WANDB_X_STATS_SAMPLING_INTERVAL": "0.1"}
    before = f"import os; os.environ.update({settings!r})"
    done = process(f"{line} --config configs/logger/tensorboard.yaml", before, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "wandb: " in done.stderr and "warning" not in done.stderr.lower(), done.stderr
    return folder / "run"


def test_metrics_have_axes(tracked: Path) -> None:
    found = records(tracked)
    rows = history(found)
    names = {name for row in rows for name in row}
    assert names >= LOGGED | {"train/lr_matrix", "train/lr_scalar", "epoch"}
    media = ("val/mis", "test/mis", "val/con", "test/con")
    counts = {key: n for key, n in logged(rows).items() if not key[0].startswith(media)}
    assert set(written(str(tracked))) <= set(counts)
    assert {n for (name, _), n in counts.items() if "attention" not in name} == {1}
    axes = {one.metric.glob_name: one.metric for one in found if one.metric.ByteSize()}
    assert axes["*"].step_metric == STEP and axes["*"].options.step_sync
    assert any(record.stats.item for record in found)  # of the machine
    assert len(run_ids(found)) == 1
    config = config_of(found)
    assert config["model.net.stack.depth"] == 1
    assert config["model.net.num_classes"] == 10  # which the data decided
    assert config["tessera"] == __version__ and config["git_commit"] == git_commit() is not None


def config_of(found: list[Any]) -> dict[str, Any]:
    """The options that W&B shows of a run."""
    items = [item for record in found for item in record.config.update]
    return {item.key: json.loads(item.value_json) for item in items}


def test_pictures_of_a_vit(tracked: Path) -> None:
    logged_values = {n: value for row in history(records(tracked)) for n, value in row.items()}
    for split in ("val", "test"):
        for name, kind in (("misclassified", "table"), ("confusion", "image")):
            assert logged_values[f"{split}/{name}/_type"] == f"{kind}-file"
        assert logged_values[f"{split}/misclassified/nrows"] > 0
        assert logged_values[f"{split}/attention/width"] > 300
    found = tables(tracked)
    assert found and found[0]["columns"] == ["image", "label", "prediction", "probability"]
    assert all(row[1] != row[2] for table in found for row in table["data"])

    events, counts = scalars(str(tracked))
    assert events.Scalars("hp_metric")
    assert {name for name, _ in counts} >= LOGGED and sum(n == "val/acc" for n, _ in counts) == 2
    names = ("misclassified", "confusion", "attention")
    assert set(events.Tags()["images"]) == {f"{s}/{n}" for s in ("val", "test") for n in names}


def test_checkpoints_are_artifacts(tracked: Path) -> None:
    """The last version with each alias is the checkpoint that is there now."""
    sent = [record.artifact for record in records(tracked) if record.artifact.type == "model"]
    assert {artifact.name for artifact in sent} == {f"model-{(tracked / 'wandb_id').read_text()}"}
    for alias, file in (("best", "best"), ("latest", "last")):
        artifact = next(one for one in reversed(sent) if alias in one.aliases)
        content = (tracked / "checkpoints" / f"{file}.ckpt").read_bytes()
        digest = base64.b64encode(hashlib.md5(content).digest()).decode()
        contents = [(item.path, item.digest) for item in artifact.manifest.contents]
        assert contents == [("model.ckpt", digest)]
    assert list(sent[-1].aliases) == ["latest"]  # W&B itself calls so what comes last


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    """Also without network: W&B's run keeps its id, and no logger shows a value twice."""
    pytest.importorskip("tensorboard")
    line = f"{SHORT} --checkpoint.every_n_train_steps 3 --trainer.max_epochs 3 {BOTH} --run_dir r"
    done = process(f"fit {line}", KILL_AFTER_SENDING, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert run("fit --resume r") == 0
    end_run()
    found = records(Path("r"))
    assert run_ids(found) == {Path("r/wandb_id").read_text()}
    rows = history(found)
    assert all(row["_step"] == row[STEP] for row in rows if STEP in row)  # W&B keeps a step once
    assert set(written("r").values()) == {1} and set(written("r")) <= set(logged(rows))
    values = {(name, row[STEP]): value for row in rows for name, value in row.items()}
    for row in metrics("r"):
        for name in row.keys() - {"step", "epoch"}:
            assert values[name, int(row["step"])] == float(row[name])
    shown = scalars("r")[1]
    assert {n: c for n, c in shown.items() if n[0] != "train/samples_per_s"} == dict(written("r"))


@pytest.mark.slow
@pytest.mark.parametrize("key", [True, False], ids=["no network", "no account"])
def test_training_continues_without_w_and_b(key: bool, tmp_path: Path) -> None:
    """And nothing that a run writes has a secret of the environment in it."""
    secrets = dict(SECRETS)
    if not key:
        del secrets["WANDB_API_KEY"]
    more = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    more |= {"WANDB_INIT_TIMEOUT": "2", "WANDB_SILENT": "false", "HOME": str(tmp_path), **secrets}
    code = f"import os; os.environ.update({more!r})"
    done = process(f"fit {SHORT} {BOTH} --run_dir r", code, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("warning: W&B"))
    assert ("refused" in line or "deadline" in line) if key else "API key" in line
    assert "wandb sync" in line
    rows = history(records(Path("r")))
    assert {name for row in rows for name in row} >= LOGGED
    texts = [done.stdout.encode(), done.stderr.encode()]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 15
    for text in texts:
        assert not [name for name, secret in SECRETS.items() if secret.encode() in text]


class Online:
    """W&B's run as `wandb.init` gives it where there is a server, which keeps what was logged."""

    asked: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def __init__(self, **options: Any) -> None:
        self.id = options["id"]
        self.config = SimpleNamespace(update=lambda *_, **__: 0)
        self.starting_step = max((row[STEP] for row in self.rows), default=-1) + 1
        self.asked.append(options)

    def log(self, values: dict[str, Any], **_: Any) -> None:
        self.rows.append(dict(values))


def test_a_run_resumed_online_is_the_same_run(monkeypatch: Patch) -> None:
    """Its first process failed, with steps logged that come after the checkpoint."""
    step = Task.training_step

    def failing(self: Task, batch: Any, number: int) -> Any:
        if self.global_step == 7:
            raise ValueError("a bad sample")
        return step(self, batch, number)

    monkeypatch.setattr(Online, "asked", [])
    monkeypatch.setattr(Online, "rows", [])
    monkeypatch.setattr(wandb, "init", Online)
    monkeypatch.setattr(Task, "training_step", failing)
    line = f"{SHORT} --checkpoint.every_n_train_steps 3 --trainer.max_epochs 3"
    assert run(f"fit {line} {WANDB} --run_dir r") == 1
    assert max(row[STEP] for row in Online.rows) == 6 and checkpoint("r")["global_step"] == 6
    monkeypatch.setattr(Task, "training_step", step)
    assert run("fit --resume r") == 0
    for options in Online.asked:
        assert options["id"] == Path("r/wandb_id").read_text()
        assert (options["resume"], options["project"]) == ("allow", "tessera")
    counts = logged(Online.rows)
    assert set(written("r")) <= set(counts) and set(counts.values()) == {1}


def agent_command(sweep: dict[str, Any]) -> list[str]:
    """The command line that W&B's own functions make of a sweep's first values."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    values = {}
    for name, parameter in sweep["parameters"].items():
        values[name] = {"value": parameter.get("values", [parameter.get("min")])[0]}
    known = create_sweep_command_args({"args": values})
    known |= {"env": ["/usr/bin/env"], "program": [sweep["program"]], "interpreter": ["python"]}
    words: list[str] = []
    for part in create_sweep_command(sweep["command"]):
        words += known[part[2:-1]] if part[:2] == "${" else [part]
    return words


SWEEPS = {  # more options, so that it is short
    "vit": "",
    "bert": "--data.batch_size 4",
    "mlm": "--data.batch_size 4",
    "lm": "--model.samples.every null",
    "seq2seq": "--data.loading.eval_batch_size 4",
}


@pytest.mark.parametrize(
    "task", ["vit", *(pytest.param(task, marks=pytest.mark.slow) for task in list(SWEEPS)[1:])]
)
def test_sweep(task: str, monkeypatch: Patch) -> None:
    sweep = yaml.safe_load((ROOT / f"configs/sweep/{task}.yaml").read_text())
    environment, python, flag, module, *words = agent_command(sweep)
    assert [environment, python, flag, module] == ["/usr/bin/env", "python", "-m", f"tasks.{task}"]
    assert (ROOT / sweep["program"]).is_file()
    monkeypatch.setenv("WANDB_RUN_ID", f"of-{task}")
    line = f"{' '.join(words)} --trainer.max_epochs 1 --run_dir r"
    line += "".join(f" --trainer.limit_{split}_batches 1" for split in ("train", "val", "test"))
    more = SWEEPS[task]
    if "data.batch_size" in sweep["parameters"]:
        more = more.replace("--data.batch_size 4", "")
    assert run(f"{line} {more}", task) == 0
    end_run()
    found = records(Path("r"))
    assert run_ids(found) == {f"of-{task}"}
    assert sweep["metric"]["name"] in {name for row in history(found) for name in row}
    given = dict(word[2:].split("=") for word in words if word.startswith("--") and "=" in word)
    assert given.keys() == sweep["parameters"].keys()
    config = config_of(found)
    assert all(config[name] == yaml.safe_load(value) for name, value in given.items())


def test_texts_of_a_language_model() -> None:
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.source files --data.path texts --trainer.limit_train_batches 4"
    assert run(f"{line} --model.samples.every 2 {WANDB} --run_dir r", "lm") == 0
    end_run()
    keys = {name for row in history(records(Path("r"))) for name in row}
    assert keys >= {"train/loss", "train/tokens_per_s", "train/mfu"}
    assert keys >= {"val/perplexity", "val/bits_per_byte"}
    found = tables("r")
    assert {tuple(table["columns"]) for table in found} == {("step", "prompt", "text")}
    rows = sorted(row for table in found for row in table["data"])
    assert [row[0] for row in rows] == [2, 4]
    for step, _, text in rows:
        assert Path(f"r/samples/step_{step:07}.txt").read_text() == text + "\n"


def test_texts_in_tensorboard() -> None:
    shown: list[tuple[str, str, int]] = []
    experiment = SimpleNamespace(add_text=lambda *entry: shown.append(entry))
    table = Table(("prompt", "text"), [("The", " end\nof")])
    to_tensorboard(SimpleNamespace(experiment=experiment), "samples", table, 3)
    assert shown == [("samples", "1. prompt\n\n    The\n\n1. text\n\n     end\n    of", 3)]


def test_translations() -> None:
    write_pairs(Path("pairs"))
    line = f"fit {SMALL_S2S} {PAIRS} --trainer.max_epochs 6 --trainer.check_val_every_n_epoch 6"
    assert run(f"{line} {WANDB} --run_dir r", "seq2seq") == 0
    end_run()
    values = {name: value for row in history(records(Path("r"))) for name, value in row.items()}
    for split, count in (("val", 16), ("test", 12)):
        assert values[f"{split}/translations/nrows"] == count
        assert values[f"{split}/attention/_type"] == "image-file"
    found = tables("r")
    assert {tuple(table["columns"]) for table in found} == {("source", "translation", "reference")}
    lines = Path("r/translations.tsv").read_text().splitlines()[1:]
    test = next(table["data"] for table in found if len(table["data"]) == 12)
    assert [line.split("\t")[1:4] for line in lines] == test


@pytest.mark.slow
def test_two_processes_are_one_run_of_w_and_b(tmp_path: Path) -> None:
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp"
    done = python(f"tasks.vit fit {SHORT} {two} {WANDB} --run_dir r", tmp_path)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*.wandb") if not path.parent.is_symlink()]
    assert len(files) == 1 and len(list(Path("r/wandb").glob("*run-*-*"))) == 1
    counts = logged(history(records(Path("r"))))
    assert set(counts) >= set(written("r")) and set(counts.values()) == {1}


@pytest.mark.slow
def test_a_logger_that_is_configured_again_logs_once(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs/logger/wandb.yaml").read_text())
    config["trainer"]["logger+"][0]["init_args"]["id"] = "chosen"
    Path("wandb.yaml").write_text(yaml.safe_dump(config))
    again = "--config wandb.yaml --config configs/logger/tensorboard.yaml"
    again += " --trainer.limit_test_batches 0"
    assert run(f"fit {SHORT} {again} --run_dir r") == 0
    end_run()
    assert run(f"fit --resume r --trainer.max_epochs 3 {again}") == 0
    end_run()
    assert len(yaml.safe_load(Path("r/config.yaml").read_text())["trainer"]["logger"]) == 2
    assert Path("r/wandb_id").read_text() == "chosen"
    assert run_ids(records(Path("r"))) == {"chosen"}
    for counts in (logged(history(records(Path("r")))), scalars("r")[1]):
        losses = {step: count for (name, step), count in counts.items() if name == "train/loss"}
        assert losses == dict.fromkeys(range(12), 1)


@pytest.mark.parametrize("kept, given, agent, found", [
    (None, {}, None, 8),
    (None, {"id": "chosen"}, "agent", "chosen"),
    (None, {"version": "chosen"}, None, "chosen"),
    ("kept", {}, "agent", "kept"),
    ("kept", {"id": "kept"}, None, "kept"),
    ("kept", {"id": "other"}, None, UsageError),
    (None, {"save_dir": "other"}, None, UsageError),
])  # fmt: skip
def test_id_and_folder_of_w_and_b(
    kept: str | None, given: Any, agent: str | None, found: Any, monkeypatch: Patch
) -> None:
    """A run keeps its id; else one is as chosen, as W&B's agent says, or new."""
    if kept:
        Path("wandb_id").write_text(kept)
    if agent:
        monkeypatch.setenv("WANDB_RUN_ID", agent)
    values = Namespace(**{"save_dir": ".", "version": None, "id": None, **given})
    options = Namespace(class_path="pytorch_lightning.loggers.WandbLogger", init_args=values)
    if found is UsageError:
        with pytest.raises(UsageError):
            place_loggers([options], Path.cwd(), LoggedRows(None))
        return
    place_loggers([options], Path.cwd(), LoggedRows(None))
    assert options.class_path == "tasks.tracking.loggers.WandbLogger"
    assert values.version is None and values.save_dir == str(Path.cwd())
    assert found in (values.id, len(values.id))


@pytest.mark.slow
def test_an_old_configuration_makes_a_new_run_of_w_and_b() -> None:
    few = "--trainer.limit_train_batches 1 --trainer.max_epochs 1 --trainer.limit_test_batches 0"
    assert run(f"fit {SHORT} {few} {WANDB} --run_dir a") == 0
    end_run("a")
    assert run("fit --config a/config.yaml --run_dir b") == 0
    end_run("b")
    assert Path("a/wandb_id").read_text() != Path("b/wandb_id").read_text()


def test_rollout_looks_where_all_attention_goes() -> None:
    """Blocks that copy one patch into the class token, and nothing else anywhere."""
    from tasks.vit.attend import rollout

    weights = torch.eye(5)[None, None].repeat(1, 2, 1, 1)  # a class token and 2 x 2 patches
    weights[:, :, 0] = torch.tensor([0.0, 0, 0, 1, 0])

    def features(_: Any, record: Any) -> None:
        record.self_attn.extend([weights, weights])

    config: Any = SimpleNamespace(prefix_tokens=1, pool="cls", grid=(2, 2))
    net: Any = SimpleNamespace(features=features, config=config)
    assert torch.equal(rollout(net, torch.zeros(1, 1, 4, 4)), torch.tensor([[[0.0, 0], [1, 0]]]))
