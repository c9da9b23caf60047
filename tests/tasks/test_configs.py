"""Every file in configs/ runs a few steps through the command line."""

from pathlib import Path

import pytest

from tasks.parsing import read_config
from tests.tasks.command import ROOT, metrics, run, write_corpus, write_images, write_reviews
from tests.test_readme import write_parquet

CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
FEW = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 1 --trainer.max_time null --model.net.stack.depth 1 --data.batch_size 4 "
    "--trainer.log_every_n_steps 1 --run_dir r"
)
STEPS = (  # of what is measured in them, or in documents of a length of their own
    " --trainer.max_steps -1 --trainer.val_check_interval 1.0 --trainer.check_val_every_n_epoch 1 "
    "--trainer.accumulate_grad_batches 1 --data.max_length 32 --model.samples.generation.max_new_tokens 4"
)


def write_data(task: str, config: str, source: str | None) -> str:
    """Options that name data of the kind that the config reads, written here."""
    if source == "folder":
        return f"--data.path {write_images(Path('images'), count=8, side=40)}"
    if source == "files":
        return f"--data.path {write_corpus(Path('texts'))}"
    if source != "hub":
        return ""
    if task == "vit":
        write_parquet(Path("hub"), *(("fine_label", 100) if "cifar100" in config else ("label", 10)))
    else:
        write_reviews(Path("hub"))
    return "--data.path hub"


@pytest.mark.parametrize("config", CONFIGS)
def test_config(config: str) -> None:
    options = read_config(config)
    task = folder if (folder := Path(config).parts[1]) in ("vit", "bert", "mlm", "lm") else "vit"
    more = write_data(task, config, options.get("data", {}).get("source"))
    more += STEPS if task == "lm" else ""
    assert run(f"fit --config {config} {more} {FEW}", task) == 0
    assert sum("train/loss" in row for row in metrics("r")) == 2
    assert Path("r/checkpoints/best.ckpt").exists()


def test_all_are_tried() -> None:
    assert {
        "configs/vit/digits.yaml",
        "configs/logger/wandb.yaml",
        "configs/bert/imdb.yaml",
        "configs/mlm/imdb.yaml",
        "configs/lm/gpt2.yaml",
    } <= set(CONFIGS)
    assert all((ROOT / config).read_text().startswith("#") for config in CONFIGS)  # each says what it is for
