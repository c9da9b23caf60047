"""What the loggers hold, read back with their own readers."""

import base64
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tasks import __version__
from tasks.tracking.loggers import STEP
from tasks.tracking.media import Table, to_tensorboard, to_wandb
from tasks.tracking.run_folder import git_commit
from tests.helpers.command import ROOT, process, run
from tests.helpers.tiny import (
    FEW_STEPS,
    PAIRS,
    SHORT,
    SMALL_LM,
    SMALL_S2S,
    TINY,
    write_corpus,
    write_pairs,
)
from tests.helpers.wandb_files import (
    LOGGED,
    WANDB,
    config_of,
    counts_of,
    counts_of_csv,
    end_run,
    history,
    records,
    run_ids,
    scalars,
    tables,
)


def test_profilers_report_on_standard_error_or_in_a_file_of_the_run(tmp_path: Path) -> None:
    line = f"fit {SHORT} {FEW_STEPS} --trainer.profiler SimpleProfiler"
    done = process(f"{line} --run_dir r", cwd=tmp_path)
    assert done.returncode == 0 and "run_training_batch" in done.stderr, done.stderr
    done = process(f"{line} --trainer.profiler.filename steps --run_dir s", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "run_training_batch" in (tmp_path / "s/fit-steps.txt").read_text()


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


@pytest.mark.slow
def test_metrics_have_axes(tracked: Path) -> None:
    found = records(tracked)
    rows = history(found)
    names = {name for row in rows for name in row}
    assert names >= LOGGED | {"train/lr_matrix", "train/lr_scalar", "epoch"}
    media = ("val/mis", "test/mis", "val/con", "test/con")
    counts = {key: n for key, n in counts_of(rows).items() if not key[0].startswith(media)}
    assert set(counts_of_csv(str(tracked))) <= set(counts)
    assert {n for (name, _), n in counts.items() if "attention" not in name} == {1}
    axes = {one.metric.glob_name: one.metric for one in found if one.metric.ByteSize()}
    assert axes["*"].step_metric == STEP and axes["*"].options.step_sync
    assert any(record.stats.item for record in found)  # of the machine
    assert len(run_ids(found)) == 1
    config = config_of(found)
    assert config["model.net.stack.depth"] == 1
    assert config["model.net.num_classes"] == 10  # which the data decided
    assert config["tessera"] == __version__ and config["git_commit"] == git_commit() is not None


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_texts_of_a_language_model() -> None:
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.path texts --trainer.limit_train_batches 4"
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


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_in_wandb_have_their_colours(channels: int) -> None:
    picture = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    shown: dict[str, Any] = {}
    logger = SimpleNamespace(log_metrics=lambda values, step: shown.update(values))
    to_wandb(logger, "picture", picture, 3)
    pixels = np.array(shown["picture"].image.convert("RGB"))  # (H, W, 3)
    assert np.array_equal(pixels, picture.expand(3, -1, -1).permute(1, 2, 0).numpy())


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
@pytest.mark.parametrize(
    ("task", "names"), [("mae", {"reconstructed"}), ("igpt", {"samples", "completed"})]
)
def test_pictures_of_training_without_labels(task: str, names: set[str], tmp_path: Path) -> None:
    line = f"fit {TINY[task]} {FEW_STEPS} --config configs/logger/wandb.yaml --run_dir r"
    done = process(line, task=task, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for split in ("val", "test"):
        files = tmp_path.glob(f"r/wandb/*/files/media/images/{split}/*.png")
        found = {file.name.partition("_")[0]: file for file in files}
        assert found.keys() == names
    for name, file in found.items():  # of the test
        saved = Image.open(tmp_path / f"r/{name}.png").convert("RGB")
        assert np.array_equal(np.array(Image.open(file).convert("RGB")), np.array(saved))
