"""What is done and what is next for a run of a laboratory, told from its files."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from datamodules.utils.files import write_text
from tasks.errors import UsageError
from tasks.lab.plan import PLAN, Plan, Run, all_runs, read_plan


def run_folder(folder: Path, run: Run) -> Path:
    return folder / "runs" / run.name


def log_file(folder: Path, run: Run) -> Path:
    return folder / "logs" / f"{run.name}.txt"


def failure_file(folder: Path, run: Run, evaluation: str = "") -> Path:
    """Holds the error of a training, or of an evaluation after it, that failed."""
    name = f"{run.name},{evaluation}" if evaluation else run.name
    return folder / "logs" / f"{name}.failed"


def refusal_file(folder: Path, run: Run, evaluation: str) -> Path:
    """Holds why the network of a run refuses an evaluation, which is no failure."""
    return folder / "logs" / f"{run.name},{evaluation}.refused"


def command_file(folder: Path, run: Run, evaluation: str = "") -> Path:
    """Holds task and arguments of a training, or of an evaluation after it, that was started."""
    name = f"{run.name},{evaluation}" if evaluation else run.name
    return folder / "logs" / f"{name}.command"


def save_command(folder: Path, run: Run, evaluation: str) -> None:
    """Keeps task and arguments of what is started, and the hashes of its config files."""
    words = movable(run, evaluation)
    line = shlex.join([*words, *config_hashes(words)])
    write_text(command_file(folder, run, evaluation), f"{line}\n")


def movable(run: Run, evaluation: str = "") -> list[str]:
    """Task and arguments of a training, or of an evaluation after it, without the lab's folder.

    The folder may be moved, or named in another way.
    """
    arguments = run.evaluations[evaluation] if evaluation else run.arguments
    return [run.task, *without_folder(run, arguments)]


def without_folder(run: Run, words: Sequence[str]) -> list[str]:
    """Words of a command line, in which the lab's folder is called "."."""
    planned = Path(*run.arguments[-1:]).parent.parent  # they end with the training's own folder
    name = rf"^{re.escape(str(planned))}$|(?<![\w./-]){re.escape(str(planned))}(?=/)"
    return [re.sub(name, ".", word) for word in words]


def config_hashes(words: Sequence[str]) -> list[str]:
    """Of the contents of the config files among arguments."""
    files = [Path(value) for name, value in pairwise(words) if name == "--config"]
    return [sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]


def is_same(folder: Path, run: Run, evaluation: str = "") -> bool:
    """Whether what is there was started with the task, arguments and configs of the plan.

    True for folders of earlier versions, which say nothing of the task, of configs or at all.
    """
    path = command_file(folder, run, evaluation)
    planned = movable(run, evaluation)
    same = ([*planned, *config_hashes(planned)], planned, planned[1:])
    return not path.exists() or without_folder(run, shlex.split(path.read_text())) in same


def is_trained(folder: Path, run: Run) -> bool:
    return (run_folder(folder, run) / "summary.json").exists()


def is_evaluated(folder: Path, run: Run, evaluation: str) -> bool:
    """Whether an evaluation is done, or refused by the network, with the plan's arguments."""
    result = run_folder(folder, run) / f"test_{evaluation}" / "test.json"
    is_done = result.exists() or refusal_file(folder, run, evaluation).exists()
    return is_done and is_same(folder, run, evaluation)


def is_finished(folder: Path, run: Run) -> bool:
    """Whether a run is trained, and each of its evaluations is done."""
    evaluated = all(is_evaluated(folder, run, name) for name in run.evaluations)
    return is_trained(folder, run) and evaluated


def error_of(folder: Path, run: Run) -> str:
    """The first error of the training and its evaluations; empty if nothing failed."""
    for evaluation in ("", *run.evaluations):
        path = failure_file(folder, run, evaluation)
        if path.exists():
            return path.read_text().strip()
    return ""


def refusals_of(folder: Path, run: Run) -> dict[str, str]:
    """Why the network refuses evaluations, by their names."""
    files = {name: refusal_file(folder, run, name) for name in run.evaluations}
    return {
        name: path.read_text().strip()
        for name, path in files.items()
        if path.exists() and is_same(folder, run, name)
    }


def forget_failures(folder: Path, run: Run) -> None:
    """Lets what failed be tried again, and what a network refused that is not there any more."""
    for evaluation in ("", *run.evaluations):
        failure_file(folder, run, evaluation).unlink(missing_ok=True)
        if not is_trained(folder, run):
            refusal_file(folder, run, evaluation).unlink(missing_ok=True)


def next_command(folder: Path, run: Run) -> tuple[str, list[str]] | None:
    """What to do next for a run: (evaluation, or "" for the training, and arguments).

    None if all is done or has failed; `forget_failures` lets it be tried again.
    """
    if not is_trained(folder, run):
        if failure_file(folder, run).exists():
            return None
        target = run_folder(folder, run)
        is_saved = (target / "config.yaml").exists() and any(target.glob("checkpoints/*.ckpt"))
        if is_saved and is_same(folder, run):
            return "", ["fit", "--resume", str(target)]
        return "", run.arguments
    for evaluation, arguments in run.evaluations.items():
        failed = failure_file(folder, run, evaluation).exists()
        if not failed and not is_evaluated(folder, run, evaluation):
            return evaluation, arguments
    return None


def save_plan(plan: Plan, folder: Path) -> None:
    """Writes `plan.json`; refuses a folder whose finished runs have other commands."""
    earlier = {}
    if (folder / PLAN).exists():
        earlier = {run.name: run for run in all_runs(read_plan(folder))}
    for run in all_runs(plan):
        before = earlier.get(run.name)
        same = before is None or movable(before) == movable(run)
        if is_trained(folder, run) and not (same and is_same(folder, run)):
            raise UsageError(
                f"{folder} holds {run.name}, which was run with other options: give --output "
                "another folder"
            )
    write_text(folder / PLAN, json.dumps(asdict(plan), indent=1) + "\n")
