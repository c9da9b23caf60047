"""`fit --help` and the like: the main options with the values that hold, and all on demand.

fit --help             the main options, grouped
fit --help all         every option
fit --help model.net   every option of this section
fit --help run         options without a section
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from tasks.cli.app import App, load
from tasks.errors import TRUST, UsageError, unknown_name
from tasks.options import flat

COLUMN = 44  # where what an option does begins
WIDTH = 100  # of the screen, if it is not a terminal
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
    *("data.loading.", "model.decoding.", "model.mask.", "model.tta"),
)
DEVICE = ("trainer.accelerator", "trainer.devices", "trainer.precision", "trainer.callbacks")
EFFECTIVE = {  # what the names of options begin with that have an effect in such a command
    "validate": (*EVALUATION, *DEVICE, "trainer.limit_val_batches"),
    "test": (*EVALUATION, *DEVICE, "trainer.limit_test_batches"),
    "predict": (
        *("data.skip_bad", "data.dataset.text_column", "data.dataset.image_column"),
        *("data.loading.", "model.tta", *DEVICE),
    ),
}
TRAINER_OPTIONS = {  # of Lightning's, those that most runs use; its own texts are long
    "max_epochs": "Epochs of training",
    "max_steps": "Optimizer steps of training, or -1 for no limit",
    "max_time": "Time of training, as DD:HH:MM:SS",
    "accelerator": "Where to compute: cpu, gpu, mps or auto",
    "devices": "Number of GPUs or processes, or a list of GPUs",
    "precision": "Such as 32-true, bf16-mixed, 16-mixed or bf16-true",
    "accumulate_grad_batches": "Batches for each optimizer step",
    "val_check_interval": "Validate every 20 batches, or 0.5 or 1.0 of an epoch",
    "limit_train_batches": "Training batches of an epoch: a fraction or a number",
    "limit_val_batches": "Validation batches: a fraction of all, or a number",
    "limit_test_batches": "Test batches: a fraction or a number, 0: no test",
    "logger": "Loggers besides metrics.csv; see configs/logger/",
    "callbacks": "Classes of callbacks to add, such as EarlyStopping",
}
NO_CHECKPOINT = (
    "The options of model and data come from the checkpoint: add --ckpt_path RUN to see them. "
    "Without it, these are the defaults of `fit`."
)
OWN_LINE = re.compile(r"model\.net\.(position|[a-z]+\.(width|depth|heads))")  # not in a section's
OWN_BLOCKS = (
    f"Blocks of your own have names, too: add the class to its dictionary, and set {TRUST} to your "
    "module (modules/README.md)."
)
SHOWN_VALUES = 3  # of a section that has a line for all its options


def take_help(arguments: list[str]) -> tuple[str | None, list[str]]:
    """What `--help` asks for ("" without a topic; None: no help), and the other arguments.

    >>> take_help(["--preset=tiny", "--help", "model.net"])
    ('model.net', ['--preset=tiny'])
    >>> take_help(["--help=all"])
    ('all', [])
    """
    for place, argument in enumerate(arguments):
        name, has_value, topic = argument.partition("=")
        if name == "--help" and has_value:
            return topic, arguments[:place] + arguments[place + 1 :]
    for flag in ("--help", "-h"):
        if flag in arguments:
            start = arguments.index(flag)
            rest = arguments[start + 1 :]
            if rest and not rest[0].startswith("-"):
                return rest[0], arguments[:start] + rest[1:]
            return "", arguments[:start] + rest
    return None, arguments


def help_text(parser: ArgumentParser, app: App, command: str, values: Any, topic: str) -> str:
    """The help of a command; `values` are its options as they hold, `topic` as in `take_help`."""
    if topic == "":
        return short_help(parser, command, flat(values.as_dict()))
    names = [name_of(action) for action in options_of(parser)]
    if topic == "preset" and topic in names:
        about = load(app.about_presets) if app.about_presets else {}
        return f"usage: {parser.usage}\n\n{presets_text(load(str(app.presets)), about)}"
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
    topics = {*sections, "optimizer", "run", *{"preset"}.intersection(names)}
    show_only(parser, known, topic, ["all", *sorted(topics)])
    held = flat(values.as_dict())
    parser.set_defaults({name: held[name] for name in names if name in held})
    own = f"\n{OWN_BLOCKS}\n" * any(takes_own_block(action) for action in known)
    return re.sub(r"\bdefault:(\s)", r"value:\1", parser.format_help()) + own


def takes_own_block(action: Any) -> bool:
    """Whether an option names a block of the network, which may be one of the user's own."""
    name = name_of(action)
    hint = getattr(action, "_typehint", None)
    is_listed = str in get_args(hint) and choices_of(hint) != []
    return name.startswith("model.net.") and (is_listed or name.endswith(".position"))


def show_only(parser: ArgumentParser, known: list[Any], topic: str, topics: list[str]) -> None:
    """Hides all other options from the help of a parser, and names the choices of the `known`.

    Raises `UsageError` if none is known; it names the nearest section, or else `topics`.
    """
    if not known:
        names = [name_of(action) for action in options_of(parser)]
        sections = {name.rpartition(".")[0] for name in names} - {""}
        near = inner_sections(names, topic)
        if "." in topic:
            near = get_close_matches(topic, {*sections, *names}, 1)
        message = unknown_name(topic, topics, "topic of --help")
        if near:
            message = f"unknown topic of --help '{topic}': did you mean {' or '.join(near)}?"
        raise UsageError(message)
    for action in parser._actions:
        if action not in known:
            action.help = argparse.SUPPRESS
        elif choices := all_choices(getattr(action, "_typehint", None)):
            action.metavar = f"{{{','.join(choices)}}}"


def inner_sections(names: list[str], last: str) -> list[str]:
    """Options and sections whose names end with this word, sections for all of their options.

    >>> inner_sections(["model.mask.random", "model.lr"], "mask")
    ['model.mask']
    """
    found = [re.match(rf"(?:\w+\.)*?{re.escape(last)}(?=\.|$)", name) for name in names]
    return list(dict.fromkeys(match[0] for match in found if match))


class HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's, without types that repeat the choices; values are as in config files."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        split = super()._split_lines
        return [line for part in text.splitlines() for line in split(part, width)]

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        if str(action.metavar).startswith("{"):
            text = text.replace("type: %(type)s, ", "")
        if isinstance(action.default, bool | tuple):
            text = text.replace("%(default)s", format_value(action.default))
        return text


def preset_help(presets: Mapping[str, Any]) -> str:
    """The help of the option `--preset`, with all names."""
    return f"Size of the network, see --help preset; {', '.join(presets)}."


def presets_text(presets: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """`--help preset`: what each preset is, in a line, and then the options that it sets.

    They differ from the defaults of the network, or, if that is another one, of the task's first.
    """
    column = max(map(len, presets)) + 5
    lines = ["--preset NAME, of these:"]
    lines += [format_columns(f"  {name}", about.get(name, ""), column) for name in presets]
    lines += ["", "options of model.net that they set, besides the defaults:"]
    first = flat(asdict(type(next(iter(presets.values())))()))
    for name, config in presets.items():
        own = flat(asdict(type(config)()))
        options = flat(asdict(config))
        changed = {k: v for k, v in options.items() if v != own.get(k) or v != first.get(k, v)}
        text = ", ".join(f"{k} {format_value(v)}" for k, v in changed.items())
        lines.append(format_columns(f"  {name}:", text, column))
    return "\n".join(lines)


def short_help(parser: ArgumentParser, command: str, values: dict[str, Any]) -> str:
    """The main options in groups, a line each: name, value and the first sentence of its help."""
    values = values | {"compile": values.get("model.compile")}  # its short name
    order = LATER_ORDER if command in EFFECTIVE else FIT_ORDER
    lines: dict[str, list[str]] = {title: [] for title in order}
    sections: dict[str, list[str]] = {}  # names of the options of each nested section
    names = [name_of(action) for action in options_of(parser)]
    for action in options_of(parser):
        name = name_of(action)
        title = group_of(name)
        rest = name.removeprefix(GROUPS[title])
        is_section = any(other.startswith(f"{name}.") for other in names)  # its options are listed
        if is_section or not is_main(name, command):
            continue
        if "." in rest and not OWN_LINE.fullmatch(name):
            section = name.rpartition(".")[0]
            if section not in sections:
                lines[title].append(f"section {section}")
            sections.setdefault(section, []).append(name)
        elif name in values and name != "config":
            help_of = TRAINER_OPTIONS.get(rest) if title == "training" else action.help
            lines[title].append(option_line(name, values[name], help_of or ""))
    lines["run"].append(
        format_columns("  --config FILE", "Options in YAML; may be given several times")
    )
    text = [f"usage: {parser.usage}", "", *wrap(parser.description or ""), ""]
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
    "  --help model.net    every option of this section: what it does, its type, its choices",
    "  --print_config      all options with their values, as a config file",
)


def options_of(parser: argparse.ArgumentParser) -> Iterator[Any]:
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


def all_choices(hint: Any) -> list[str]:
    """The values of a type that lists them, or only those of the library if it also takes others.

    >>> all_choices(Literal["pre", "post"] | str | None), all_choices(Literal["cpu"] | dict | None)
    (['pre', 'post', 'null'], [])
    """
    parts = [part for part in get_args(hint) if part not in (str, NoneType)]
    if not parts or any(get_origin(part) is not Literal for part in parts):
        return []
    values = choices_of(hint) + ["null"] * (NoneType in get_args(hint))
    return list(dict.fromkeys(values))


def choices_of(hint: Any) -> list[str]:
    """The values that a type lists.

    >>> choices_of(Literal["pre", "post"] | None), choices_of(bool), choices_of(float)
    (['pre', 'post'], ['true', 'false'], [])
    """
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if get_origin(hint) not in (Union, UnionType):
        return []
    return [choice for part in get_args(hint) for choice in choices_of(part)]


def begins(action: Any, topic: str) -> bool:
    """Whether a topic is the name of an option, or of a section that it is in."""
    names = [name.removeprefix("--") for name in action.option_strings]
    return any(name == topic or name.startswith(f"{topic}.") for name in names)


def option_line(name: str, value: Any, text: str) -> str:
    """`--name value  What it does`, cut to the width of the screen."""
    return format_columns(f"  --{name} {format_value(value)}", first_sentence(text))


def section_line(section: str, names: list[str], values: dict[str, Any]) -> str:
    """A line for all options of a nested section, with the first few values."""
    pairs = [f"{name.rpartition('.')[2]} {format_value(values.get(name))}" for name in names]
    count = min(len(pairs), SHOWN_VALUES)
    while True:
        more = len(pairs) - count
        text = ", ".join(pairs[:count]) + (f", and {more} more" if more > 0 else "")
        line = format_columns(f"  --{section}.*", text)
        if "\n" not in line or count == 1:
            return line
        count -= 1


def format_value(value: Any) -> str:
    """A value as a config file has it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(list(value) if isinstance(value, tuple) else value)


def first_sentence(text: str) -> str:
    """The first sentence or clause of a help text, on one line, without parentheses."""
    line = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", " ".join(text.split()))  # also nested
    for end in (". ", "; "):
        line = line.partition(end)[0]
    return line if line.endswith("...") else line.removesuffix(".")


def format_columns(left: str, right: str, column: int = COLUMN) -> str:
    """Two columns, as wide as the screen; a long text goes on below its start."""
    lines = textwrap.wrap(right, max(screen_width() - column, 20)) or [""]
    below = f"\n{'':<{column}}"
    start = f"{left}{below}" if len(left) > column - 2 else f"{left:<{column}}"
    return start + below.join(lines)


def screen_width() -> int:
    return min(shutil.get_terminal_size((WIDTH, 0)).columns, 120)


def wrap(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), min(WIDTH, screen_width()))
