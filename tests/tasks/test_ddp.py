"""Two processes, launched by Lightning or by torchrun, are one run."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional as F

from datamodules.images import ImageData, LoadingOptions
from datamodules.reviews import ReviewData
from datamodules.text import TextLoading
from datamodules.tokenizers import TokenizerConfig
from datamodules.utils.batching import count_tokens
from datamodules.vision.augment import normalise
from modules.models.bert import BertClassifier, BertConfig
from modules.models.vit import ViT, ViTConfig
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tests.tasks.command import ROOT, checkpoint, metrics, run

TORCHRUN = "torch.distributed.run --standalone --nproc_per_node 2"
FIT = (
    "fit --trainer.max_epochs 1 --trainer.log_every_n_steps 1 --model.net.stack.depth 1 "
    "--model.augment.crop_padding 0 "
    "--trainer.accelerator cpu"
)
TWO = f"{FIT} --trainer.devices 2 --trainer.strategy ddp --data.batch_size 64"
COUNT = """
import json, pathlib
import pytorch_lightning as pl
class Count(pl.Callback):
    def on_train_start(self, trainer, task):
        self.seen = []
    def on_train_batch_end(self, trainer, task, outputs, batch, number):
        self.seen.append(batch["index"].tolist() if "index" in batch else [])
    def on_train_end(self, trainer, task):
        pathlib.Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(self.seen))
    def on_test_end(self, trainer, task):
        if trainer.is_global_zero:
            print("tested", int(task.metrics["test"]["confusion"].compute().sum()))
"""


def python(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m LINE` in `folder`, one thread for each of its processes."""
    command = [sys.executable, "-m", *shlex.split(line)]
    own = {name: value for name, value in os.environ.items() if name != "TESSERA_RUN_DIR"}
    environment = (
        own
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TESSERA_TRUST": "count"}
        | environment
    )
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def figures_of_images(folder: Path) -> tuple[int, float, float]:
    """Number of test images, and accuracy and loss of a run's best checkpoint on them, computed
    here in one batch.
    """
    saved = checkpoint(folder, "best")
    net = ViT(load_config(ViTConfig, saved[KEY]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    data = ImageData(loading=LoadingOptions(eval_batch_size=1000))
    data.setup("test")
    (batch,) = data.test_dataloader()
    metadata, labels = saved[KEY]["metadata"], batch["label"]
    with torch.no_grad():
        logits = net(normalise(batch["image"], metadata["mean"], metadata["std"]))
    return (
        len(labels),
        float((logits.argmax(-1) == labels).float().mean()),
        float(F.cross_entropy(logits, labels)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, place",
    [("", "runs/vit/latest"), (TORCHRUN, "runs/vit/latest"), (TORCHRUN, "chosen")],
)
def test_two_processes_are_one_run(launcher: str, place: str, tmp_path: Path) -> None:
    chosen = "--run_dir chosen" if place == "chosen" else ""
    (tmp_path / "count.py").write_text(COUNT)
    line = f"tasks.vit {TWO} --trainer.callbacks+=count.Count {chosen}"
    done = python(f"{launcher} -m {line}" if launcher else line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [
        done.stdout.count(text) for text in ("Results", "run folder", "next:", "epoch 1/1")
    ] == [1, 1, 1, 1]
    folder = (tmp_path / place).resolve()
    assert {path.parent for path in tmp_path.rglob("metrics.csv")} == {folder}
    assert (
        place == "chosen"
        or len([path for path in folder.parent.iterdir() if not path.is_symlink()]) == 1
    )
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "metrics.csv", "summary.json", "confusion.png", "curves.png", "checkpoints"
    }  # fmt: skip

    summary, rows = json.loads((folder / "summary.json").read_text()), metrics(folder)
    assert [int(row["step"]) for row in rows if "train/loss" in row] == list(
        range(summary["steps"])
    )
    assert [sum(name in row for row in rows) for name in ("val/acc", "test/acc")] == [1, 1]
    count, accuracy, loss = figures_of_images(folder)
    assert count == 1797 // 5 and f"tested {count}\n" in done.stdout
    assert summary["test/acc"] == pytest.approx(accuracy, abs=1e-6)
    assert summary["test/loss"] == pytest.approx(loss, abs=1e-5)

    assert run(f"{FIT} --data.batch_size 128 --run_dir alone") == 0  # the same samples in each step
    alone = json.loads(Path("alone/summary.json").read_text())
    assert alone["steps"] == summary["steps"]
    assert summary["test/loss"] == pytest.approx(alone["test/loss"], rel=1e-3)


def figures_of_texts(folder: Path) -> dict[str, float]:
    """The metrics of a run's best checkpoint on all test texts, computed here in one batch."""
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    saved = checkpoint(folder, "best")
    metadata = saved[KEY]["metadata"]
    net = BertClassifier(load_config(BertConfig, saved[KEY]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    tokenizer = TokenizerConfig(**metadata["tokenizer_options"])
    loading = TextLoading(eval_batch_size=1000)
    data = ReviewData(max_length=metadata["max_length"], tokenizer=tokenizer, loading=loading)
    data.set_metadata(metadata)
    data.setup("test")
    (batch,) = data.test_dataloader()
    labels = batch["label"]
    with torch.no_grad():
        logits = net(batch["tokens"], batch["padding_mask"])
    guesses, positive = logits.argmax(-1), logits.softmax(-1)[:, 1]
    return {
        "test/acc": accuracy_score(labels, guesses),
        "test/f1": f1_score(labels, guesses, average="macro"),
        "test/auroc": roc_auc_score(labels, positive),
        "test/loss": float(F.cross_entropy(logits, labels)),
    }


@pytest.mark.slow
def test_two_processes_share_all_texts(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    few = "fit --trainer.max_epochs 1 --trainer.log_every_n_steps 1 --model.net.stack.depth 1 --data.batch_size 150"
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.callbacks+=count.Count"
    done = python(f"tasks.bert {few} {two}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [
        done.stdout.count(text) for text in ("Results", "run folder", "next:", "epoch 1/1")
    ] == [1, 1, 1, 1]
    (folder,) = {path.parent for path in tmp_path.rglob("metrics.csv")}
    assert folder == (tmp_path / "runs/bert/latest").resolve()

    summary, rows = json.loads((folder / "summary.json").read_text()), metrics(folder)
    assert [int(row["step"]) for row in rows if "train/loss" in row] == list(
        range(summary["steps"])
    )
    assert summary["steps"] == 27  # 26 steps of 300 texts, and one of 200
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(rank) for rank in seen] == [27, 27]
    assert sorted(index for rank in seen for batch in rank for index in batch) == list(range(8000))
    options = yaml.safe_load((folder / "config.yaml").read_text())["data"]
    metadata = checkpoint(folder)[KEY]["metadata"]
    tokenizer = TokenizerConfig(**metadata["tokenizer_options"])
    data = ReviewData(
        max_length=metadata["max_length"],
        tokenizer=tokenizer,
        loading=TextLoading(**options["loading"]),
    )
    data.set_metadata(metadata)
    data.setup("fit")
    dataset = data.dataset("train")
    (share,) = (float(row["train/padding"]) for row in rows if "train/padding" in row)
    filled, total = count_tokens([*seen[0], *seen[1]], dataset.lengths, dataset.token_counts)
    assert share == pytest.approx(1 - filled / total, rel=1e-6)
    assert "tested 1000\n" in done.stdout
    for name, value in figures_of_texts(folder).items():
        assert summary[name] == pytest.approx(value, abs=1e-4 if name == "test/auroc" else 1e-5), (
            name
        )  # texts that nearly tie


@pytest.mark.slow
def test_torchruns_processes_agree_on_the_folder(tmp_path: Path) -> None:
    ask = "from tasks.tracking.run_folder import run_folder\nprint(f'folder {run_folder(\"vit\", None)}\\n', end='')"
    (tmp_path / "ask.py").write_text(ask)
    done = python(f"{TORCHRUN} ask.py", tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [line for line in done.stdout.splitlines() if line.startswith("folder")]
    assert (
        len(folders) == 2
        and len(set(folders)) == 1
        and str(tmp_path / "runs" / "vit") in folders[0]
    )


@pytest.mark.slow
def test_torchrun_refuses_the_folder_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    done = python(f"{TORCHRUN} -m tasks.vit {TWO} --run_dir .", tmp_path)
    assert done.returncode != 0
    assert done.stderr.count(f"error: --run_dir {tmp_path.resolve()} holds a run already") == 1
