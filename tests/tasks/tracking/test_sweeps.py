"""Sweeps in configs/ run with the command lines that W&B makes of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.command import ROOT, Patch, run
from tests.helpers.wandb_files import config_of, end_run, history, records, run_ids


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
    "mae": "",
    "bert": "--data.batch_size 4",
    "mlm": "--data.batch_size 4",
    "lm": "--model.samples.every null",
    "seq2seq": "--data.loading.eval_batch_size 4",
}


@pytest.mark.slow
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
