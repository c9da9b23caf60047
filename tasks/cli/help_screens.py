"""`fit --help` and the like: the main options with the values that hold, and all on demand.

fit --help             the main options, grouped
fit --help all         every option
fit --help model.net   every option whose name begins so
fit --help run         options without a section
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from tasks.errors import UsageError, unknown_name
from tasks.options import flat

WIDTH = 100  # of the screen, if it is no terminal
GROUPS = {  # a title, and what the names of its options begin with
    "data": "data.",
    "optimizer": "model.optimizer.",
    "model": "model.",
    "training": "trainer.",
    "checkpoints": "checkpoint.",
    "run": "",
}
FIT_ORDER = {title: title for title in ("data", "model", "optimizer", "training", "run")}
# Of commands that use a checkpoint; groups and their headings.
LATER_ORDER = {"run": "run", "data": "data", "model": "model", "training": "device"}
EVALUATION = (
    *("data.source", "data.path", "data.languages", "data.skip_bad", "data.dataset."),
    *("data.loading.", "model.decoding.", "model.mask."),
)
DEVICE = ("trainer.accelerator", "trainer.devices", "trainer.precision", "trainer.callbacks")
EFFECTIVE = {  # what the names of options begin with that have an effect in such a command
    "validate": (*EVALUATION, *DEVICE, "trainer.limit_val_batches"),
    "test": (*EVALUATION, *DEVICE, "trainer.limit_test_batches"),
    "predict": (
        *("data.skip_bad", "data.dataset.text_column", "data.dataset.image_column"),
        *("data.loading.", *DEVICE),
    ),
}
TRAINER_OPTIONS = {  # of Lightning's, those that most runs use; its own texts are long
    "max_epochs": "Epochs of training",
    "max_steps": "Optimizer steps of training; -1: no limit",
    "max_time": "Time of training, as DD:HH:MM:SS",
    "accelerator": "Where to compute: cpu, gpu, mps or auto",
    "devices": "Number of GPUs or processes, or a list of GPUs",
    "precision": "Such as 32-true, bf16-mixed, 16-mixed or bf16-true",
    "accumulate_grad_batches": "Batches for each optimizer step",
    "val_check_interval": "When to validate: a fraction of an epoch, or batches",
    "limit_train_batches": "Training batches of an epoch: a fraction or a number",
    "limit_val_batches": "Validation batches: a fraction of all, or a number",
    "limit_test_batches": "Test batches: a fraction or a number, 0: no test",
    "logger": "Loggers besides metrics.csv; see configs/logger/",
    "callbacks": "Callbacks of Lightning or your own",
}
NO_CHECKPOINT = (
    "The options of model and data come from the checkpoint: add --ckpt_path RUN to see them. "
    "Without it, these are the defaults of `fit`."
)
SHOWN_VALUES = 3  # of a section that has a line for all its options


def take_help(arguments: list[str]) -> tuple[str | None, list[str]]:
    """What `--help` asks for ("" without a topic; None: no help), and the other arguments.

    >>> take_help(["--preset=tiny", "--help", "model.net"])
    ('model.net', ['--preset=tiny'])
    """
    for flag in ("--help", "-h"):
        if flag in arguments:
            start = arguments.index(flag)
            topic = arguments[start + 1 : start + 2]
            if topic and not topic[0].startswith("-"):
                return topic[0], arguments[:start] + arguments[start + 2 :]
            return "", arguments[:start] + arguments[start + 1 :]
    return None, arguments


def help_text(parser: ArgumentParser, command: str, values: Any, topic: str) -> str:
    """The help of a command; `values` are its options as they hold, `topic` as of `take_help`."""
    if topic == "":
        return short_help(parser, command, flat(values.as_dict()))
    names = [name_of(action) for action in options_of(parser)]
    sections = {name.partition(".")[0] for name in names if "." in name}
    prefix = GROUPS.get(topic, topic).rstrip(".")
    known = [
        action
        for action in parser._actions
        if topic == "all"
        or begins(action, prefix)
        or (topic == "run" and not any(begins(action, section) for section in sections))
    ]
    known = [action for action in known if topic == "all" or is_option(action)]
    if not known:
        topics = ["all", *sorted({*sections, "optimizer", "run"})]
        raise UsageError(unknown_name(topic, topics, "topic of --help"))
    for action in parser._actions:
        if action not in known:
            action.help = argparse.SUPPRESS
    held = flat(values.as_dict())
    parser.set_defaults({name: held[name] for name in names if name in held})
    return re.sub(r"\bdefault:(\s)", r"value:\1", parser.format_help())


class HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's, without types that repeat the choices; values are as in config files."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        if str(action.metavar).startswith("{"):
            text = text.replace("type: %(type)s, ", "")
        if isinstance(action.default, bool | tuple):
            text = text.replace("%(default)s", shown(action.default))
        return text


def short_help(parser: ArgumentParser, command: str, values: dict[str, Any]) -> str:
    """The main options in groups, a line each: name, value and the first sentence of its help."""
    values = values | {"compile": values.get("model.compile")}  # its short name
    order = LATER_ORDER if command in EFFECTIVE else FIT_ORDER
    lines: dict[str, list[str]] = {title: [] for title in order}
    sections: dict[str, list[str]] = {}  # names of the options of each nested section
    for action in options_of(parser):
        name = name_of(action)
        title = group_of(name)
        rest = name.removeprefix(GROUPS[title])
        if not is_main(name, command):
            continue
        if "." in rest:
            section = name.rpartition(".")[0]
            if section not in sections:
                lines[title].append(f"section {section}")
            sections.setdefault(section, []).append(name)
        elif name in values and name != "config":
            help_of = TRAINER_OPTIONS.get(rest) if title == "training" else action.help
            lines[title].append(option_line(name, values[name], help_of or ""))
    lines["run"].append(fitted("  --config FILE", "Options in YAML; may be given several times"))
    text = [f"usage: {parser.usage}", "", *wrapped(parser.description or ""), ""]
    for title, found in lines.items():
        if not found:
            continue
        text.append(f"{order[title]}:")
        for line in found:
            section = line.removeprefix("section ")
            text.append(
                section_line(section, sections[section], values) if section in sections else line
            )
        text.append("")
    return "\n".join([*text, *MORE])


MORE = (
    "more:",
    "  --help all          every option, those of Lightning's Trainer too",
    "  --help model.net    every option whose name begins so: what it does, its type, its choices",
    "  --print_config      all options with their values, as a config file",
)


def options_of(parser: ArgumentParser) -> Iterator[Any]:
    """The options of a parser that hold one value."""
    # argparse has no public list of a parser's options.
    for action in parser._actions:
        names = action.option_strings
        if names and names[0].startswith("--") and not names[0].endswith(".help"):
            yield action


def name_of(action: Any) -> str:
    return action.option_strings[0].removeprefix("--")


def group_of(name: str) -> str:
    """The title under which an option is listed."""
    return next(title for title, prefix in GROUPS.items() if name.startswith(prefix))


def is_main(name: str, command: str) -> bool:
    """Whether the short help of a command lists an option."""
    title = group_of(name)
    if title == "run":
        return True
    if name == "model.compile":  # --compile is listed
        return False
    if command in EFFECTIVE:
        return name.startswith(EFFECTIVE[command])
    is_rare = title == "training" and name.removeprefix("trainer.") not in TRAINER_OPTIONS
    return title != "checkpoints" and not is_rare


def is_option(action: Any) -> bool:
    """Whether this is an option, not a link between two."""
    return "".join(action.option_strings).startswith("-")


def begins(action: Any, topic: str) -> bool:
    """Whether a topic is the name of an option, or of a section that it is in."""
    names = [name.removeprefix("--") for name in action.option_strings]
    return any(name == topic or name.startswith(f"{topic}.") for name in names)


def option_line(name: str, value: Any, text: str) -> str:
    """`--name value  What it does`, cut to the width of the screen."""
    return fitted(f"  --{name} {shown(value)}", first_sentence(text))


def section_line(section: str, names: list[str], values: dict[str, Any]) -> str:
    """A line for all options of a nested section, with the first few values."""
    pairs = [f"{name.rpartition('.')[2]} {shown(values.get(name))}" for name in names]
    more = len(pairs) - SHOWN_VALUES
    text = ", ".join(pairs[:SHOWN_VALUES]) + (f", and {more} more" if more > 0 else "")
    return fitted(f"  --{section}.*", text)


def shown(value: Any) -> str:
    """A value as a config file has it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(list(value) if isinstance(value, tuple) else value)


def first_sentence(text: str) -> str:
    """The first sentence or clause of a help text, on one line, without parentheses."""
    line = re.sub(r" \([^)]*\)", "", " ".join(text.split()))
    for end in (". ", "; "):
        line = line.partition(end)[0]
    return line.rstrip(".")


def fitted(left: str, right: str) -> str:
    """Two columns, cut to the width of the screen between words."""
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, 120)
    start = f"{left}\n{'':<44}" if len(left) > 42 else f"{left:<44}"
    return start + textwrap.shorten(right, max(width - 44, 20), placeholder=" ...")


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH)
