"""A laboratory file: what is varied, with which seeds and budget, and what is measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from tasks.cli.app import TASKS
from tasks.cli.config_files import in_yaml, read_config
from tasks.errors import UsageError, unknown_name
from tasks.options import flat

BUDGET_UNITS = ("steps", "tokens", "flops", "minutes")
PICTURE_KEYS = {  # of each kind
    "bars": ("kind", "x"),
    "line": ("kind", "x", "scale"),
    "curves": ("kind", "x", "metric"),
    "layers": ("kind", "metric", "at"),
}
CURVES_X = ("steps", "minutes")
SCALES = ("linear", "log")
LAYERS_AT = ("first", "last")
FILE_KEYS = (
    *("title", "claim", "task", "options", "before", "axes", "seeds", "budget", "metric"),
    *("evaluations", "compare", "pictures", "scaling_law"),
)
REQUIRED_KEYS = ("title", "task", "seeds", "budget", "metric")
# Bytes of the names of settings, and of evaluations and pictures. File systems allow 255 for both,
# a seed and a suffix.
MAX_NAME, MAX_NESTED = 150, 50
RESERVED = ("run_dir", "resume", "seed_everything", "debug")  # options that the laboratory gives
BUDGET_OPTIONS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")


@dataclass(frozen=True)
class Setting:
    """One point of the grid.

    Args:
        values: Name of its value on each axis.
        options: Of the task's command line.
        budget: One of `BUDGET_UNITS` and the amount; empty if the options say when to stop.
    """

    values: Mapping[str, Any]
    options: Mapping[str, Any]
    budget: Mapping[str, float]

    @property
    def name(self) -> str:
        """Begins the names of its run folders, such as "order=pre,depth=2"."""
        names = option_names(self.values)
        pairs = zip(names, self.values.values(), strict=True)
        text = ",".join(f"{name}={value}" for name, value in pairs) or "base"
        return as_file_name(text)


@dataclass(frozen=True)
class Lab:
    """A checked laboratory file; the files in `configs/lab/` show the format.

    Args:
        path: The file.
        title: One line.
        claim: What the lecture says.
        task: As in `python -m tasks.TASK`.
        settings: All points of the grid.
        axes: Names of the values of each axis.
        seeds: Each setting has one run for each.
        metric: A key of `summary.json`, or a column of `metrics.csv`, whose last value counts.
        goal: "maximize" or "minimize".
        before: A run before the grid, whose folder `{before}` stands for in options.
        before_task: Its task.
        evaluations: Options of tests after training, by name.
        compare: Axes to compare along, with the value that the others are compared with.
        pictures: Options of each picture, by name.
        scaling_law: Whether a scaling law is fitted to the runs.
        overrides: Options of the command that replace parts of the file.
    """

    path: str
    title: str
    claim: str
    task: str
    settings: list[Setting]
    axes: Mapping[str, list[Any]]
    seeds: list[int]
    metric: str
    goal: str
    before: Setting | None = None
    before_task: str = ""
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    compare: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scaling_law: bool = False
    overrides: str = ""


def as_file_name(text: str) -> str:
    """A text with _ in place of what could mean something in a path or a shell.

    >>> as_file_name("size=1 x 96")
    'size=1_x_96'
    """
    return "".join(c if c.isalnum() or c in "=,.+-_" else "_" for c in text)


def option_names(axes: Iterable[str]) -> list[str]:
    """The last words of options' full names, or these if the words are not unique.

    >>> option_names(["model.net.stack.order", "model.net.stack.depth"])
    ['order', 'depth']
    >>> option_names(["model.net.encoder.depth", "model.net.decoder.depth"])
    ['model.net.encoder.depth', 'model.net.decoder.depth']
    """
    full = list(axes)
    words = [name.rpartition(".")[2] for name in full]
    return words if len(set(words)) == len(words) else full


def option_words(name: str, value: Any) -> list[str]:
    """An option as two words of a command line; a list of configs as several options."""
    if name == "config" and isinstance(value, list):
        return [word for one in value for word in option_words(name, one)]
    text = value if isinstance(value, str) else in_yaml(value)
    return [f"--{name}", text]


def require(condition: object, where: str, message: str) -> None:
    """Raises `UsageError`, which says where in the file, unless the condition holds."""
    if not condition:
        raise UsageError(f"{where}: {message}")


def read_lab(path: str, steps: int | None = None, seeds: list[int] | None = None) -> Lab:
    """Reads and checks a file; the names of options are checked by `plan.make_plan`.

    Args:
        path: Of a YAML file.
        steps: Replaces the budget of all runs.
        seeds: Replace those of the file.

    Raises `UsageError`, which says where in the file something is wrong.
    """
    content = read_content(path)
    options = checked_options(content.get("options", {}), f"{path}: options")
    axes = {
        name: axis_values(name, values, f"{path}: axes.{name}")
        for name, values in mapping(content.get("axes", {}), f"{path}: axes").items()
    }
    budget = mapping(content["budget"], f"{path}: budget")
    settings = [
        make_setting(dict(zip(axes, names, strict=True)), axes, options, budget, path)
        for names in product(*axes.values())
    ]
    names = [setting.name for setting in settings]
    for name in names:
        require(names.count(name) == 1, f"{path}: axes", f"two settings would be named {name}")
        too_long = f"{name} is too long for a folder's name: name the values of the axis"
        require(len(name.encode()) <= MAX_NAME, f"{path}: axes", too_long)
    before, before_task = read_before(content.get("before"), f"{path}: before")
    if steps is not None:
        settings = [replace(setting, budget={"steps": steps}) for setting in settings]
        if before:
            given = flat(dict(before.options)).items()
            kept = {name: value for name, value in given if name not in BUDGET_OPTIONS}
            before = replace(before, options=kept, budget={"steps": steps})
    metric, goal = checked_metric(content["metric"], f"{path}: metric")
    evaluations = nested(content.get("evaluations", {}), f"{path}: evaluations")
    taken = "it is the axis of the evaluations: use another name"
    require(not (evaluations and "evaluation" in axes), f"{path}: axes.evaluation", taken)
    known = [*axes, *(["evaluation"] if evaluations else [])]
    has_law = checked_law(content.get("scaling_law", False), goal, f"{path}: scaling_law")
    overrides = [f"--steps {steps}"] if steps is not None else []
    if seeds is not None and seeds != content.get("seeds"):
        overrides.append(f"--seeds {','.join(map(str, seeds))}")
    return Lab(
        path=path,
        title=str(content["title"]),
        claim=" ".join(str(content.get("claim", "")).split()),
        task=checked_task(content["task"], f"{path}: task"),
        settings=settings,
        axes={name: list(values) for name, values in axes.items()},
        seeds=checked_seeds(content["seeds"] if seeds is None else seeds, f"{path}: seeds"),
        metric=metric,
        goal=goal,
        before=before,
        before_task=before_task,
        evaluations=evaluations,
        compare=checked_compare(content.get("compare", {}), axes, f"{path}: compare"),
        pictures=checked_pictures(content.get("pictures", {}), known, f"{path}: pictures", has_law),
        scaling_law=has_law,
        overrides=" ".join(overrides),
    )


def read_content(path: str) -> dict[str, Any]:
    """The content of a file, whose keys are checked."""
    content = read_config(path)
    if not content.keys() & set(REQUIRED_KEYS):
        raise UsageError(f"{path} is no laboratory: it has none of {', '.join(REQUIRED_KEYS)}")
    for key in content:
        require(key in FILE_KEYS, path, unknown_name(str(key), FILE_KEYS, "key"))
    for key in REQUIRED_KEYS:
        require(key in content, path, f"{key} is missing")
    return content


def mapping(value: Any, where: str) -> dict[str, Any]:
    require(isinstance(value, Mapping), where, f"give options by name, not {value!r}")
    return {str(key): item for key, item in value.items()}


def nested(value: Any, where: str) -> dict[str, dict[str, Any]]:
    """Options by name, where each name is to be that of a file."""
    found = {name: mapping(item, f"{where}.{name}") for name, item in mapping(value, where).items()}
    for name in found:
        require(name, where, "a name is empty")
        is_short = len(name.encode()) <= MAX_NESTED
        require(is_short, where, f"{name} is too long for a file's name")
        usable = as_file_name(name)
        require(name == usable, where, f"'{name}' cannot be a file's name: call it {usable}")
    return found


def checked_options(value: Any, where: str, ends_by_itself: bool = False) -> dict[str, Any]:
    """Options by name, without those that the laboratory gives.

    `ends_by_itself` allows options that end the training.
    """
    options = mapping(value, where)
    refused = RESERVED if ends_by_itself else (*RESERVED, *BUDGET_OPTIONS)
    for given in flat(options):
        for name in refused:
            source = "the budget gives it" if name in BUDGET_OPTIONS else "the laboratory gives it"
            is_set = given == name or given.startswith(f"{name}.")
            require(not is_set, where, f"{name} cannot be set: {source}")
    return options


def checked_task(task: Any, where: str) -> str:
    require(task in TASKS, where, unknown_name(str(task), TASKS, "task"))
    return str(task)


def checked_seeds(seeds: Any, where: str) -> list[int]:
    require(isinstance(seeds, list) and seeds, where, "give a list, as in [0, 1, 2]")
    for seed in seeds:
        is_seed = type(seed) is int and 0 <= seed < 2**32
        require(is_seed, where, f"{seed} is not a whole number from 0 to 4294967295")
    require(len(set(seeds)) == len(seeds), where, "a seed is given twice")
    return list(seeds)


def axis_values(name: str, values: Any, where: str) -> dict[Any, dict[str, Any]]:
    """Options of each value of an axis: a list of values of one option, or named options."""
    require(isinstance(values, list | Mapping), where, "give a list, or options by name")
    require(values, where, "the axis is empty: give at least one value")
    if isinstance(values, list):
        keys = [*map(value_name, values)]
        require(len(set(map(str, keys))) == len(keys), where, "a value is given twice")
        equal = "two values are equal, as 1, 1.0 and true are: leave one out"
        require(len(set(keys)) == len(keys), where, equal)
        values = {key: {name: value} for key, value in zip(keys, values, strict=True)}
    return {key: checked_options(options, f"{where}.{key}") for key, options in values.items()}


def value_name(value: Any) -> Any:
    """The name of a value in the list of an axis: itself, or as YAML if it is none or several."""
    return in_yaml(value) if isinstance(value, list | dict) or value is None else value


def make_setting(
    values: dict[str, Any],
    axes: Mapping[str, Mapping[Any, Mapping[str, Any]]],
    options: Mapping[str, Any],
    budget: Mapping[str, Any],
    path: str,
) -> Setting:
    """The setting with these values; their options may name a budget, as `budget.steps`."""
    merged = dict(options)
    own_budget = {}
    set_by: dict[str, str] = {}
    for axis, value in values.items():
        for name, item in axes[axis][value].items():
            for option in flat({name: item}):
                for given, other in set_by.items():
                    is_same = f"{option}.".startswith(f"{given}.") or given.startswith(f"{option}.")
                    message = f"{other} and {axis} both set {option}"
                    require(other == axis or not is_same, f"{path}: axes", message)
                set_by[option] = axis
            if name.startswith("budget."):
                own_budget[name.removeprefix("budget.")] = item
            else:
                merged[name] = item
    return Setting(values, merged, checked_budget(own_budget or budget, f"{path}: budget"))


def checked_metric(value: Any, where: str) -> tuple[str, str]:
    """The name of the metric, and whether to maximize or minimize it."""
    metric = mapping(value, where)
    known = ("name", "goal")
    for key in metric:
        require(key in known, where, unknown_name(key, known, "key"))
    require(isinstance(metric.get("name"), str), where, "name is missing")
    is_goal = metric.get("goal") in ("maximize", "minimize")
    require(is_goal, f"{where}.goal", "give maximize or minimize")
    return metric["name"], metric["goal"]


def checked_budget(budget: Mapping[str, Any], where: str) -> dict[str, float]:
    require(len(budget) == 1, where, f"give one of {', '.join(BUDGET_UNITS)}")
    ((unit, amount),) = budget.items()
    require(unit in BUDGET_UNITS, where, unknown_name(unit, BUDGET_UNITS, "budget"))
    try:
        amount = float(amount)  # YAML reads 1e6 as a text
    except (TypeError, ValueError):
        raise UsageError(f"{where}.{unit}: {amount!r} is not a number") from None
    require(0 < amount < float("inf"), f"{where}.{unit}", f"{amount:g} is not above 0")
    return {unit: amount}


def read_before(value: Any, where: str) -> tuple[Setting | None, str]:
    """The run before the grid and its task; it may have a budget or end by its options."""
    if value is None:
        return None, ""
    content = mapping(value, where)
    known = ("task", "options", "budget")
    for key in content:
        require(key in known, where, unknown_name(key, known, "key"))
    task = checked_task(content.get("task"), f"{where}.task")
    has_budget = "budget" in content
    options = checked_options(content.get("options", {}), f"{where}.options", not has_budget)
    budget = {}
    if has_budget:
        budget = checked_budget(mapping(content["budget"], f"{where}.budget"), f"{where}.budget")
    return Setting({}, options, budget), task


def checked_compare(value: Any, axes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Axes to compare along, each with the value that the others are compared with."""
    found = {}
    for axis, base in mapping(value, where).items():
        require(axis in axes, where, unknown_name(axis, axes, "axis"))
        by_text = {str(name): name for name in axes[axis]}
        text = str(base) if str(base) in by_text else str(value_name(base))
        require(text in by_text, f"{where}.{axis}", unknown_name(text, by_text, "value"))
        found[axis] = by_text[text]
    return found


def checked_pictures(
    value: Any, axes: Iterable[str], where: str, has_law: bool
) -> dict[str, dict[str, Any]]:
    """Options of pictures by name; bars over the first axis if none are given.

    Args:
        value: Of the file.
        axes: Names of all axes, with "evaluation" if there are evaluations.
        where: In the file.
        has_law: Whether there is a picture of the scaling law.
    """
    known = [*axes]
    found = nested(value, where)
    for name, options in found.items():
        here = f"{where}.{name}"
        is_taken = has_law and (name == "scaling" or name.startswith("scaling_"))
        require(not is_taken, here, "this is the name of the scaling law's picture: use another")
        kind = str(options.get("kind"))
        require(kind in PICTURE_KEYS, here, unknown_name(kind, PICTURE_KEYS, "kind"))
        has_axis = known or kind not in ("bars", "line")
        require(has_axis, here, "there is no axis: add one, or use kind curves or layers")
        keys = PICTURE_KEYS[kind]
        for key in options:
            require(key in keys, here, unknown_name(key, keys, f"key of kind {kind}:"))
        choices = {"x": CURVES_X if kind == "curves" else known, "scale": SCALES, "at": LAYERS_AT}
        for key, names in choices.items():
            if key in options:
                text = str(options[key])
                require(text in names, f"{here}.{key}", unknown_name(text, names, "value"))
        metric = options.get("metric", "")
        require(isinstance(metric, str), f"{here}.metric", f"give a name, not {metric!r}")
    if not found and known:
        return {"bars": {"kind": "bars", "x": known[0]}}
    return found


def checked_law(value: Any, goal: str, where: str) -> bool:
    """Whether a scaling law is fitted. Raises `UsageError` unless the goal is to minimize."""
    require(isinstance(value, bool), where, f"give true or false, not {value!r}")
    is_loss = goal == "minimize"
    require(is_loss or not value, where, "it is fitted to a loss: set metric.goal to minimize")
    return bool(value)


def default_folder(path: str) -> Path:
    """Where the runs of a file are kept, if `--output` names no other folder."""
    return Path("runs", "lab", Path(path).stem)
