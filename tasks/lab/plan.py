"""The runs of a laboratory: their commands, and what they will cost."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.cli.app import program
from tasks.errors import RunError, UsageError
from tasks.lab.cost import StepCost, check_fit, check_names
from tasks.lab.spec import Lab, option_words

PLAN = "plan.json"
BEFORE = "before"  # folder of the run before the grid
BRACES = f"{{{BEFORE}}}"  # stands for its path in options


@dataclass
class Run:
    """A setting with one seed.

    Args:
        name: Of its folder.
        task: As in `python -m tasks.TASK`.
        values: Name of its value on each axis.
        seed: Of the run.
        arguments: Of the task's command line, `fit` first.
        evaluations: Arguments of the tests after training, by name.
        steps: Planned optimizer steps; None if the time or its options end it.
        step_tokens: Tokens, with padding, or patches or pixels, of a step.
        step_flops: FLOPs of a step, forward and backward.
        parameters: Of the network.
    """

    name: str
    task: str
    values: dict[str, Any]
    seed: int
    arguments: list[str]
    evaluations: dict[str, list[str]] = field(default_factory=dict)
    steps: int | None = None
    step_tokens: float = 0
    step_flops: float = 0
    parameters: int = 0

    @property
    def command(self) -> str:
        return f"{program(self.task)} {shlex.join(self.arguments)}"

    @property
    def test_commands(self) -> list[str]:
        """Of the evaluations."""
        return [f"{program(self.task)} {shlex.join(one)}" for one in self.evaluations.values()]


@dataclass
class Plan:
    """What `lab run` runs and `lab report` draws: the lab's file, its runs, the run before them."""

    lab: dict[str, Any]
    runs: list[Run]
    before: Run | None = None


def make_plan(lab: Lab, folder: Path, configs: list[str]) -> Plan:
    """All runs, each option checked and each network built once.

    Args:
        lab: What is varied.
        folder: Where the runs are kept.
        configs: Config files to add to each run.

    Raises `UsageError`, which names the setting whose options cannot be used.
    """
    more = [word for config in configs for word in ("--config", config)]
    before = plan_before(lab, folder, more)
    before_folder = None if before is None else folder / "runs" / BEFORE
    has_before = before_folder is not None and (before_folder / "summary.json").exists()
    tests = {}
    for name, options in lab.evaluations.items():
        where = f"{lab.path}: evaluations.{name}"
        tests[name] = words(options, before_folder, where)
        if has_before or not names_before(options):
            check_names(lab.task, tests[name], where)
        else:
            check_early(lab.task, options, before_folder, where)
    runs = []
    for setting in lab.settings:
        where = f"{lab.path}: {setting.name}"
        given = [*words(setting.options, before_folder, where), *more]
        checked = given
        if names_before(setting.options) and not has_before:
            checked = [*check_early(lab.task, setting.options, before_folder, where), *more]
        cost = check_fit(lab.task, [*checked, *budget_words(setting.budget)[0]], where)
        check_metric(lab, cost, where)
        check_timer(setting.budget, cost, where)
        limit, steps = budget_words(setting.budget, cost)
        for seed in lab.seeds:
            name = f"{setting.name},seed={seed}"
            target = folder / "runs" / name
            fixed = ["--seed_everything", str(seed), "--run_dir", str(target)]
            evaluations = {
                evaluation: evaluation_arguments(target, evaluation, options)
                for evaluation, options in tests.items()
            }
            run = Run(
                name=name,
                task=lab.task,
                values=dict(setting.values),
                seed=seed,
                arguments=["fit", *given, *limit, *fixed],
                evaluations=evaluations,
                steps=steps,
                step_tokens=cost.tokens,
                step_flops=cost.flops,
                parameters=cost.parameters,
            )
            runs.append(run)
    described = {key: value for key, value in asdict(lab).items() if key != "settings"}
    return Plan(described, runs, before)


def plan_before(lab: Lab, folder: Path, more: list[str]) -> Run | None:
    """The run before the grid, if there is one."""
    if lab.before is None:
        return None
    where = f"{lab.path}: before"
    given = [*words(lab.before.options, None, where), *more]
    cost = check_fit(lab.before_task, given, where)
    limit: list[str] = []
    steps = None
    if lab.before.budget:
        check_timer(lab.before.budget, cost, where)
        limit, steps = budget_words(lab.before.budget, cost)
    return Run(
        name=BEFORE,
        task=lab.before_task,
        values={},
        seed=0,
        arguments=["fit", *given, *limit, "--run_dir", str(folder / "runs" / BEFORE)],
        steps=steps,
        step_tokens=cost.tokens,
        step_flops=cost.flops,
        parameters=cost.parameters,
    )


def words(options: Mapping[str, Any], before_folder: Path | None, where: str) -> list[str]:
    """Options as words of a command line; `{before}` is the folder of the run before the grid.

    Raises `UsageError`, which says where, if there is no such run.
    """
    found = []
    named = names_before(options)
    for name, value in options.items():
        if name in named:
            if before_folder is None:
                raise UsageError(f"{where}: {name} names {BRACES}, but there is no run before it")
            value = with_folder(value, str(before_folder))
        found += option_words(name, value)
    return found


def names_before(options: Mapping[str, Any]) -> list[str]:
    """The options that need the run before the grid."""
    return [name for name, value in options.items() if with_folder(value, "") != value]


def with_folder(value: Any, folder: str) -> Any:
    """An option's value with a folder for `{before}`."""
    if isinstance(value, Mapping):
        return {name: with_folder(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [with_folder(item, folder) for item in value]
    return value.replace(BRACES, folder) if isinstance(value, str) else value


def check_early(
    task: str, options: Mapping[str, Any], before_folder: Path | None, where: str
) -> list[str]:
    """Checks the names of options of which some need the run before the grid, which is missing.

    Returns the others, as words of a command line, which can be checked as usual.
    """
    from tasks.cli.parsing import READ_BEFORE

    named = names_before(options)
    # These are options, but checking them would read the missing file.
    read = [name for name in named if f"--{name}" in READ_BEFORE]
    parsed = {name: value for name, value in options.items() if name not in read}
    check_names(task, words(parsed, before_folder, where), where, has_files=False)
    others = {name: value for name, value in options.items() if name not in named}
    return words(others, before_folder, where)


def budget_words(
    budget: Mapping[str, float], cost: StepCost | None = None
) -> tuple[list[str], int | None]:
    """The options that end a run, and its steps; None if the time ends it.

    Without the cost of a step, a budget of tokens or FLOPs gives a single one.
    """
    ((unit, amount),) = budget.items()
    if unit == "minutes":
        seconds = max(1, round(amount * 60))
        hours = f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        limit = f"{seconds // 86400:02}:{hours}"
        no_others = ["--trainer.max_steps", "-1", "--trainer.max_epochs", "-1"]
        return ["--trainer.max_time", limit, *no_others], None
    if unit != "steps":
        step_amount = math.inf if cost is None else getattr(cost, unit)
        amount /= step_amount
    steps = max(1, round(amount))
    return ["--trainer.max_steps", str(steps), "--trainer.max_epochs", "-1"], steps


def evaluation_arguments(run_folder: Path, name: str, options: list[str]) -> list[str]:
    """The arguments of a test after training; its metrics are in `test_NAME/test.json`."""
    output = str(run_folder / f"test_{name}")
    return ["test", "--ckpt_path", str(run_folder), *options, "--output", output]


def check_metric(lab: Lab, cost: StepCost, where: str) -> None:
    """Refuses a metric that no file of a run will hold."""
    validated = [name for name in cost.metrics if name.startswith("val/")]
    known = [name.replace("val/", "test/") for name in validated]
    if not lab.evaluations:  # the files of evaluations hold metrics of the test only
        known += [*validated, *cost.metrics, f"best {cost.monitor}"]
    if lab.metric not in known:
        raise UsageError(
            f"{lab.path}: metric.name: there is no {lab.metric}: choose from "
            f"{', '.join(dict.fromkeys(known))} (in {where})"
        )


def check_timer(budget: Mapping[str, float], cost: StepCost, where: str) -> None:
    """Refuses a time limit of a config file, which might end a run before its budget does."""
    if cost.has_timer and "minutes" not in budget:
        (unit,) = budget
        raise UsageError(
            f"{where}: trainer.max_time of a config file might end the run before its {unit} do: "
            "take it out, or give budget.minutes"
        )


def read_plan(folder: Path) -> Plan:
    """The plan of a folder that `lab run` made."""
    try:
        found = json.loads((folder / PLAN).read_text())
        before = Run(**found["before"]) if found["before"] else None
        return Plan(found["lab"], [Run(**run) for run in found["runs"]], before)
    except FileNotFoundError as error:
        raise UsageError(f"{folder} has no {PLAN}: give a folder that `lab run` wrote") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / PLAN} cannot be read ({error}): run the lab again") from error


def all_runs(plan: Plan) -> list[Run]:
    """With the run before the grid, which is the first."""
    return plan.runs if plan.before is None else [plan.before, *plan.runs]
