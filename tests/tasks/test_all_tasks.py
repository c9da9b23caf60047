"""Every task through its command line: the default run, losses, and suggested commands."""

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.task_runs import FEW_STEPS, NO_UPDATES, losses, printed, summary
from tests.tasks.command import (
    DEFAULT_SECONDS,
    PAIRS,
    SMALL_LM,
    SMALL_S2S,
    checkpoint,
    metrics,
    process,
    run,
    same,
    write_corpus,
    write_pairs,
    write_reviews,
)
from tests.tasks.forked import python
from tests.tasks.test_resume import KILL

DEFAULT_RUNS = [  # task, metric, and the interval in which it lies
    ("vit", "test/acc", 0.98, 1),
    ("bert", "test/acc", 0.97, 1),
    ("mlm", "test/acc", 0.2, 1),
    ("lm", "test/bits_per_byte", 1, 2.3),
    ("seq2seq", "test/exact", 0.98, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "metric", "low", "high"), DEFAULT_RUNS)
def test_default_run(task: str, metric: str, low: float, high: float, tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", task=task, cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert low <= summary(tmp_path / f"runs/{task}/latest")[metric] <= high
    assert seconds <= DEFAULT_SECONDS


NET = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2"
BASE = {
    "vit": f"{NET} --model.net.stack.depth 1 --data.batch_size 16",
    "bert": f"{NET} --data.tokenizer.vocabulary 300 --data.batch_size 8",
    "mlm": f"--preset tiny {NET} --data.source hub --data.path hub --data.max_length 48 "
    "--data.batch_size 8 --data.tokenizer.vocabulary 70",
    "lm": f"{SMALL_LM} --data.source files --data.path texts --data.tokenizer.vocabulary 400",
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}
AUGMENT = (
    "--model.augment.mixup 0.5 --model.augment.cutmix 0.5 --model.augment.flip 0.5 "
    "--model.augment.erase 0.5 --model.augment.rand_augment_ops 1 --model.label_smoothing 0"
)
R_DROP = "--model.r_drop 2 --model.net.stack.dropout 0.1 --model.label_smoothing 0.2"
MASKS = (
    "--model.mask.whole_words true --model.mask.share 0.3 --model.mask.mask 0.5 "
    "--model.mask.random 0.5"
)
ACCUMULATE = "--trainer.accumulate_grad_batches 2 --trainer.limit_train_batches 6"
AVERAGE = "--model.average 2 --trainer.max_epochs 3 --trainer.limit_train_batches 1"
# Without updates only the masks differ between the epochs.
SAME_BATCH = f"--trainer.overfit_batches 1 --trainer.max_epochs 3 {NO_UPDATES}"
DOCUMENTS = "--data.packing documents --model.net.position rotary"
NO_SMOOTHING = "--model.label_smoothing 0 --model.net.position rotary"
PREFIX = "--model.net.architecture prefix --data.loading.batch_tokens 96"
LOSSES = {  # of three training steps and of the test, by task and options
    ("vit", ""): [2.6263, 2.5575, 2.3401, 2.4694],
    ("vit", "--model.net.channels 3 --model.ema 0.5"): [2.6523, 2.7946, 2.4458, 2.4511],
    ("vit", AUGMENT): [2.5188, 2.6506, 2.2447, 2.4814],
    ("bert", ""): [0.6841, 0.649, 0.7301, 0.6937],
    ("bert", R_DROP): [0.687, 0.6602, 0.721, 0.6937],
    ("mlm", ""): [4.2726, 4.2206, 4.2328, 4.2278],
    ("mlm", MASKS): [4.2647, 4.215, 4.2054, 4.2058],
    ("mlm", "--data.next_sentence true"): [4.9664, 4.8879, 4.9294, 4.9076],
    ("mlm", SAME_BATCH): [4.2726, 4.2585, 4.2703, 4.2654],
    ("lm", ""): [5.9832, 5.9823, 5.9883, 5.9785],
    ("lm", "--model.net.stack.checkpoint_activations true"): [5.9832, 5.9823, 5.9883, 5.9785],
    ("lm", DOCUMENTS): [5.9861, 5.9804, 5.9603, 5.9573],
    ("lm", "--model.z_loss 0.1"): [9.5801, 9.5776, 9.5832, 5.9831],
    ("lm", ACCUMULATE): [5.9867, 5.9899, 5.9658, 5.9733],
    ("seq2seq", ""): [3.3687, 3.1083, 2.8405, 2.7051],
    ("seq2seq", NO_SMOOTHING): [3.6347, 3.0415, 2.7187, 2.7568],
    ("seq2seq", "--model.ema 0.5"): [3.3687, 3.1083, 2.8405, 2.7105],
    ("seq2seq", AVERAGE): [3.3687, 2.8979, 2.6618, 2.7084],
    ("seq2seq", PREFIX): [3.9513, 3.3427, 3.0519, 3.0969],
}


@pytest.mark.parametrize(("task", "options"), LOSSES)
def test_losses_of_three_steps(task: str, options: str) -> None:
    write_data()
    assert run(f"fit {BASE[task]} {FEW_STEPS} {options} --run_dir r", task) == 0
    assert losses("r") == pytest.approx(LOSSES[task, options], rel=5e-4)


def write_data() -> None:
    """The data that `BASE` names."""
    write_corpus(Path("texts"))
    write_pairs(Path("pairs"))
    write_reviews(Path("hub"))


COMMANDS = {
    "bert": {"fit", "export", "predict"},
    "mlm": {"fit", "export"},
    "lm": {"fit", "export", "generate", "score"},
    "seq2seq": {"fit", "export", "translate", "attend"},
}
GENERATION = {
    "lm": "--model.samples.generation.max_new_tokens 4",
    "seq2seq": "--model.decoding.max_new_tokens 4 --model.decoding.beams 1",
}


@pytest.mark.parametrize("task", COMMANDS)
def test_suggested_commands_run(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_data()
    line = f"fit {BASE[task]} {FEW_STEPS} {GENERATION.get(task, '')} --run_dir r"
    out, _ = printed(line, task, capsys)
    suggested = re.findall(rf"python -m tasks\.{task} (.*)", out)
    assert {line.split()[0] for line in suggested} == COMMANDS[task]
    Path("FILE.txt").write_text("An object is what has a type. " * 40)
    for line in suggested:
        line = line.replace("epochs N", "epochs 2").replace("FILE", "FILE.txt")
        assert run(line.replace('"..."', '"two three"'), task) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_samples_of_a_killed_and_resumed_run(tmp_path: Path) -> None:
    write_data()
    line = f"fit {BASE['lm']} --model.samples.every 4 --model.net.stack.dropout 0.1"
    line += " --trainer.limit_train_batches 10 --trainer.max_epochs 2"
    line += " --checkpoint.every_n_train_steps 3"
    assert run(f"{line} --run_dir whole", "lm") == 0
    done = process(f"{line} --run_dir cut", KILL.format(step=13), task="lm", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint("cut")["global_step"] == 12
    assert run("fit --resume cut", "lm") == 0
    assert same(checkpoint("cut")["state_dict"], checkpoint("whole")["state_dict"])
    assert metrics("cut") == metrics("whole")
    texts = {path.name: path.read_text() for path in Path("cut/samples").iterdir()}
    assert texts == {path.name: path.read_text() for path in Path("whole/samples").iterdir()}
    assert sorted(texts) == ["best.txt", *(f"step_{step:07}.txt" for step in (4, 8, 12, 16, 20))]


TWO_PROCESSES = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options", "half", "results"),
    [
        ("lm", "--model.samples.every 5", 2, ("loss", "bits_per_byte", "acc")),
        ("seq2seq", "--data.loading.eval_batch_size 5", 8, ("loss", "acc", "bleu", "chrf")),
    ],
)
def test_two_processes_are_one_run(
    task: str, options: str, half: int, results: tuple[str, ...], tmp_path: Path
) -> None:
    write_data()
    line = f"fit {BASE[task]} {options} --trainer.limit_train_batches 6"
    two = f"tasks.{task} {line} {TWO_PROCESSES} --data.batch_size {half} --run_dir two"
    done = python(two, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(text) for text in ("Results", "next:")] == [1, 1]
    assert run(f"{line} --run_dir one", task) == 0
    one = summary("one")
    pair = summary("two")
    assert one["steps"] == pair["steps"]
    for name in results:
        assert pair[f"test/{name}"] == pytest.approx(one[f"test/{name}"], rel=1e-3), name
    files = [{path.relative_to(r) for path in Path(r).rglob("*.t*")} for r in ("one", "two")]
    assert files[0] == files[1]


@pytest.mark.parametrize("task", ["lm", "seq2seq"])
def test_pretrained_checkpoint_brings_its_tokenizer(
    task: str, request: pytest.FixtureRequest
) -> None:
    write_data()
    source = request.getfixturevalue({"lm": "lm_bytes", "seq2seq": "translator"}[task])
    data = {"lm": "--data.source files --data.path texts --data.max_length 32", "seq2seq": PAIRS}
    limits = {"lm": "", "seq2seq": "--data.max_length 24"}
    line = f"fit {data[task]} {limits[task]} {FEW_STEPS} {NO_UPDATES} {GENERATION[task]}"
    assert run(f"{line} --model.pretrained {source} --run_dir r", task) == 0
    theirs = torch.load(source, weights_only=True)
    ours = checkpoint("r")
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, atol=1e-6, rtol=0)
    key = {"lm": "tokenizer", "seq2seq": "source_tokenizer"}[task]
    assert ours["tessera"]["metadata"][key] == theirs["tessera"]["metadata"][key]
    position = theirs["tessera"]["net"]["position"]
    assert ours["tessera"]["net"]["position"] == position
