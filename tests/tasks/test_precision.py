"""Every task trains in every precision, and what is made of it then works; loss curves hardly depend on it."""

import math
from pathlib import Path

import pytest

from tests.tasks.command import PAIRS, SMALL_LM, SMALL_S2S, metrics, run, write_corpus, write_images, write_pairs

BERT = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --data.tokenizer.vocabulary 300"
LM = f"{SMALL_LM} --data.source files --data.path texts --data.tokenizer.kind character --data.tokenizer.vocabulary 99"
RUNS = {
    "vit": "--model.net.stack.depth 1",
    "bert": f"{BERT} --data.batch_size 4",
    "mlm": f"{BERT} --data.batch_size 4",
    "lm": LM,
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}
AFTER = {  # the run's checkpoint is 0
    "vit": ["predict --ckpt_path {0} --data.predict_path images"],
    "bert": ["predict --ckpt_path {0} --text good"],
    "mlm": ["test --ckpt_path {0} --trainer.limit_test_batches 1"],
    "lm": ["generate --ckpt_path {0} --prompt a", "score --ckpt_path {0} --data.path text.txt"],
    "seq2seq": ["translate --ckpt_path {0} --text two", "attend --ckpt_path {0} --text two --out a.png"],
}
TWO_STEPS = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)


def write_data() -> None:
    """What the runs read."""
    write_corpus(Path("texts"))
    write_pairs(Path("pairs"))
    write_images(Path("images"), side=8)
    Path("text.txt").write_text("def f(x): return x\n" * 4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "32"])
@pytest.mark.parametrize("task", RUNS)
def test_two_steps(task: str, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_data()
    line = f"fit {RUNS[task]} {TWO_STEPS} --run_dir r --trainer.precision {precision}"
    assert run(line, task) == 0, capsys.readouterr().err
    losses = [float(row["train/loss"]) for row in metrics("r") if "train/loss" in row]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    for command in AFTER[task]:
        assert run(command.format("r/checkpoints/best.ckpt"), task) == 0, capsys.readouterr().err
