"""Options with values that make no sense: one sentence that names the option, exit code 2, nothing left behind."""

from pathlib import Path

import pytest

from tests.tasks.command import SHORT
from tests.tasks.test_bad_input import USER, assert_refused

HUGE = "1" + "0" * 30
NUMBERS = {
    "val_check_interval": ("0", "0.0", "-1", "1e30", "nan"),
    "overfit_batches": ("1e30", "nan", "inf", "-1", HUGE),
    "limit_train_batches": ("1e30", "nan", "-3", "-0.5", "1.5", HUGE),
    "limit_val_batches": ("1e30", "nan", "-1", HUGE),
    "limit_test_batches": ("1e30", "nan", "-1", HUGE),
    "log_every_n_steps": ("-1", HUGE),
    "max_time": (
        "abc",
        "5",
        "00:00:00:00",
        "'{foo: 3}'",
        "99999999999999:00:00:00",
        "'{days: 1e300}'",
    ),
    "accumulate_grad_batches": (HUGE, "0", "-1"),
    "devices": ("0", "-1", "-5", "abc", "[]", "[0,0]", "1000000000"),
    "num_nodes": ("0", "-1", HUGE),
    "num_sanity_val_steps": ("-2", HUGE),
    "gradient_clip_val": ("-1", "nan", "1e300"),
    "check_val_every_n_epoch": ("0", "-1"),
    "max_epochs": ("-2", "9" * 5000, "null,"),
    "min_epochs": ("-1", HUGE),
    "min_steps": ("-1", HUGE),
    "fast_dev_run": ("-1", "1e30"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in NUMBERS.items() for value in values]
)
def test_numbers_of_the_trainer(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(f"fit --run_dir r --trainer.{name}={value}", USER, name, capsys)


CASES = {
    f"--data.batch_size {HUGE}": "--data.batch_size",
    "--seed_everything abc": "--seed_everything",
    "--seed_everything true": "--seed_everything",
    "--seed_everything 1.5": "--seed_everything",
    "--seed_everything null": "--seed_everything",
    f"--seed_everything {HUGE}": "--seed_everything",
    "--trainer.callbacks Nope": ("--trainer.callbacks Nope", "Callback"),
    "--trainer.callbacks+=Nope": ("--trainer.callbacks Nope", "Callback"),
    "--trainer.callbacks+=pathlib.Path": "pathlib.Path",
    "--trainer.callbacks+=torch.nn.Linear": ("--trainer.callbacks torch.nn.Linear", "Callback"),
    "--trainer.callbacks 5": ("--trainer.callbacks 5", "Callback"),
    "--trainer.callbacks '[5]'": ("--trainer.callbacks [5]", "Callback"),
    "--trainer.callbacks '[LearningRateMonitor, Nope]'": (
        "--trainer.callbacks",
        "Nope",
        "Callback",
    ),
    "--trainer.callbacks+=EarlyStopping": ("--trainer.callbacks", "--monitor is missing"),
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss --trainer.callbacks.nope 3": (
        "--trainer.callbacks.nope 3"
    ),
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss --trainer.callbacks.patience x": (
        "--trainer.callbacks.patience",
        "must be a whole number",
    ),
    "--trainer.callbacks '[{class_path: LearningRateMonitor, init_args: {logging_interval: never}}]'": (
        "--trainer.callbacks",
        "step or epoch",
    ),
    "--trainer.logger Nope": ("--trainer.logger Nope", "Logger"),
    "--model.net.stack.heads null": "--model.net.stack.heads",
    "--data.batch_size null": "--data.batch_size",
    "--run_dir r ''": "unexpected ''",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("line", CASES, ids=lambda line: line[:70])
def test_other_values(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(f"fit {line}", USER, CASES[line], capsys)


OPTIONS = (
    *(
        "run_dir",
        "resume",
        "preset",
        "config",
        "model.optimizer.lr",
        "model.pretrained",
        "data.path",
        "data.source",
    ),
    *(
        "data.batch_size",
        "model",
        "model.net",
        "trainer",
        "trainer.max_epochs",
        "trainer.callbacks",
        "trainer.logger",
    ),
    *("trainer.strategy", "trainer.devices", "checkpoint.monitor", "compile", "data.skip_bad"),
)


@pytest.mark.parametrize("option", OPTIONS)
def test_empty_values(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(f"fit {SHORT} --{option}=", USER, f"--{option} needs a value", capsys)
    assert_refused(f"fit --{option} '' {SHORT}", USER, f"--{option} needs a value", capsys)


@pytest.mark.parametrize(
    "option", ("ckpt_path", "prompt_file", "device", "quantize", "num_samples")
)
def test_empty_values_of_functions(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (f"--{option}=", f"--{option} ''"):
        assert_refused(
            f"generate --ckpt_path x {line}", USER, f"--{option} needs a value", capsys, "lm"
        )


@pytest.mark.parametrize(
    "option", ("num_samples null", f"num_samples {'9' * 5000}", "seed null", "temperature nan")
)
def test_values_of_functions(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(f"generate --ckpt_path x --{option}", USER, option.split()[0], capsys, "lm")


def test_a_path_that_an_option_names(best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    line = f"export --ckpt_path {best} --format safetensors --output"
    for path in ("file/x.safetensors", f"{'x' * 300}.safetensors"):
        assert_refused(f"{line} {path}", USER, "--output", capsys)
