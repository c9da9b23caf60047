"""Every file in configs/ runs a few steps through the command line."""

from pathlib import Path

import pytest

from tasks.parsing import read_config
from tests.tasks.command import ROOT, metrics, run, write_images
from tests.test_readme import write_parquet

CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
FEW = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 1 --trainer.max_time null --model.net.stack.depth 1 --data.batch_size 4 "
    "--trainer.log_every_n_steps 1 --run_dir r"
)


@pytest.mark.parametrize("config", CONFIGS)
def test_config(config: str) -> None:
    options = read_config(config)
    data, more = options.get("data", {}), ""
    if data.get("source") == "hub":
        column, classes = ("fine_label", 100) if "cifar100" in config else ("label", 10)
        write_parquet(Path("hub"), column, classes)
        more = "--data.path hub"
    elif data.get("source") == "folder":
        more = f"--data.path {write_images(Path('images'), count=8, side=40)}"
    assert run(f"fit --config {config} {more} {FEW}") == 0
    assert sum("train/loss" in row for row in metrics("r")) == 2
    assert Path("r/checkpoints/best.ckpt").exists()


def test_all_are_tried() -> None:
    assert {"configs/vit/digits.yaml", "configs/logger/wandb.yaml", "configs/vit/cifar10.yaml"} <= set(CONFIGS)
    assert all((ROOT / config).read_text().startswith("#") for config in CONFIGS)  # each says what it is for
