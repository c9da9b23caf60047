"""Every file in configs/ runs a few steps through the command line."""

from pathlib import Path

import pytest
import yaml

from tasks.cli.config_files import read_config
from tests.helpers.command import ROOT, Console, run
from tests.helpers.marks import slow_except
from tests.helpers.results import metrics
from tests.helpers.tiny import write_corpus, write_images, write_pairs, write_reviews
from tests.test_readme import write_parquet

EVERY = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
ELSEWHERE = ("configs/trainer", "configs/sweep", "configs/lab")  # each has tests of its own
CONFIGS = [config for config in EVERY if not config.startswith(ELSEWHERE)]
TASKS = ("vit", "mae", "bert", "mlm", "lm", "igpt", "seq2seq")
FEW = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 1 --trainer.max_time null --data.batch_size 4 "
    "--trainer.log_every_n_steps 1 --run_dir r"
)
SHALLOW = "--model.net.stack.depth 1"
SMALL = {
    "mae": f"{SHALLOW} --model.net.decoder.depth 1",
    "lm": f"{SHALLOW} --trainer.max_steps -1 --trainer.val_check_interval 1.0 "
    "--trainer.check_val_every_n_epoch 1 --trainer.accumulate_grad_batches 1 "
    "--data.max_length 32 --model.samples.generation.max_new_tokens 4",
    "seq2seq": "--model.net.encoder.depth 1 --model.net.decoder.depth 1 "
    "--model.decoding.max_new_tokens 4 --data.loading.eval_batch_size 4 "
    "--data.loading.batch_tokens 256",
}


def task_of(config: str) -> str:
    """The task that a config is for; any for the config of a logger."""
    folder = Path(config).parts[1]
    return folder if folder in TASKS else "vit"


def write_data(task: str, config: str) -> str:
    """Options that name data of the kind that the config reads, written here."""
    data = read_config(config).get("data", {})
    source = data.get("source")
    if source == "folder":
        return f"--data.path {write_images(Path('images'), count=8, side=40)}"
    if source == "txt" and task == "seq2seq":
        languages = tuple(data["languages"].split("-"))
        write_pairs(Path("pairs"), test="test_2016_flickr", languages=languages)
        return "--data.path pairs"
    if task == "lm" and "path" in data:
        return f"--data.path {write_corpus(Path('texts'))}"
    if source != "hub":
        return ""
    if task in ("vit", "mae", "igpt"):
        column, classes = ("fine_label", 100) if "cifar100" in config else ("label", 10)
        write_parquet(Path("hub"), column, classes)
    else:
        write_reviews(Path("hub"))
    return "--data.path hub"


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("config", CONFIGS)
def test_options(config: str, console: Console) -> None:
    """A config whose options are all there is printed with the defaults of the others."""
    out, _ = console.printed(f"fit --config {ROOT / config} --print_config", task_of(config))
    assert yaml.safe_load(out)["model"]


@pytest.mark.parametrize("config", slow_except(CONFIGS[::8], CONFIGS))
def test_config(config: str) -> None:
    task = task_of(config)
    more = f"{write_data(task, config)} {SMALL.get(task, SHALLOW)}"
    if "swin" in config:
        more = more.replace(SHALLOW, "--model.net.depths [1,1,1] --model.net.stack.depth 3")
    if "teacher" in read_config(config).get("model", {}):
        plain = config.replace("_deit", "")
        assert run(f"fit --config {plain} {more} {FEW} --run_dir teacher", task) == 0
        more += " --model.teacher.path teacher"
    assert run(f"fit --config {config} {more} {FEW}", task) == 0
    assert sum("train/loss" in row for row in metrics("r")) == 2
    assert Path("r/checkpoints/best.ckpt").exists()
