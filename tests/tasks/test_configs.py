"""Every file in configs/ runs a few steps through the command line."""

from pathlib import Path

import pytest

from tasks.cli.config_files import read_config
from tests.tasks.command import (
    ROOT,
    metrics,
    run,
    write_corpus,
    write_images,
    write_pairs,
    write_reviews,
)
from tests.test_readme import write_parquet

EVERY = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
ELSEWHERE = ("configs/trainer", "configs/sweep")  # see test_launch.py and test_loggers.py
CONFIGS = [config for config in EVERY if not config.startswith(ELSEWHERE)]
FEW = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 1 --trainer.max_time null --data.batch_size 4 --trainer.log_every_n_steps 1 --run_dir r"
)
SHALLOW = " --model.net.stack.depth 1"
MORE = {  # options of a task: what is measured in steps, or in documents of a length of their own
    "lm": f"{SHALLOW} --trainer.max_steps -1 --trainer.val_check_interval 1.0 --trainer.check_val_every_n_epoch 1 "
    "--trainer.accumulate_grad_batches 1 --data.max_length 32 --model.samples.generation.max_new_tokens 4",
    "seq2seq": " --model.net.encoder.depth 1 --model.net.decoder.depth 1 --model.decoding.max_new_tokens 4 "
    "--data.loading.eval_batch_size 4 --data.loading.batch_tokens 256",
}


def write_data(task: str, config: str, source: str | None) -> str:
    """Options that name data of the kind that the config reads, written here."""
    if source == "folder":
        return f"--data.path {write_images(Path('images'), count=8, side=40)}"
    if source == "files" and task == "seq2seq":
        languages = tuple(read_config(config)["data"]["languages"].split("-"))
        return f"--data.path {write_pairs(Path('pairs'), test='test_2016_flickr', languages=languages)}"
    if source == "files":
        return f"--data.path {write_corpus(Path('texts'))}"
    if source != "hub":
        return ""
    if task == "vit":
        write_parquet(
            Path("hub"), *(("fine_label", 100) if "cifar100" in config else ("label", 10))
        )
    else:
        write_reviews(Path("hub"))
    return "--data.path hub"


@pytest.mark.parametrize("config", CONFIGS)
def test_config(config: str) -> None:
    options = read_config(config)
    task = (
        folder
        if (folder := Path(config).parts[1]) in ("vit", "bert", "mlm", "lm", "seq2seq")
        else "vit"
    )
    more = write_data(task, config, options.get("data", {}).get("source"))
    more += MORE.get(task, SHALLOW)
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
        "configs/seq2seq/multi30k_cpu.yaml",
    } <= set(CONFIGS)
    assert all(
        (ROOT / config).read_text().startswith("#") for config in EVERY
    )  # each says what it is for
