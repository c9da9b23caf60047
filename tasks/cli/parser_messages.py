"""jsonargparse's messages as one sentence, with the nearest option or choice.

Without this, a user who gives `--model.net.stack.order prr` sees several lines with Python's types:

    usage: python -m tasks.vit fit [options]
    tip: For details of accepted options run: python -m tasks.vit --help
    error: Parser key "model.net.stack.order":
      Expected a typing.Literal['pre', 'post', 'parallel']. Got value: prr

instead of `--model.net.stack.order prr: must be pre, post or parallel: did you mean pre?`

Its errors hold a text only, so these patterns follow its wording; what matches none stays as it is.
"""

import difflib
import re
from collections.abc import Callable, Collection

import yaml

from tasks.cli.app import TRUST
from tasks.cli.config_files import load_yaml, yaml_problem
from tasks.errors import unknown_option

UNKNOWN_OPTION = (
    r"[Uu]nrecognized arguments?:? '?(--[\w.+-]+)|does not accept option '([\w.]+)'"
    r"|[Kk]ey '([\w.]+)' is not expected"
)
WRONG_VALUE = r'.*Parser key "([\w.]+)":(.*)(?:Got value|Given value): ?(.*)'
EXPECTED_TYPE = (
    r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|(dot import path)|typing\.Literal\[(.*?)\])"
)
CLASS_WITHOUT = r"class_path='[\w.]*?(\w+)', init_args=Namespace\([^()]*\b{}=None"
# Instead of Lightning's, among which are older names and those of other hardware.
USUAL_CHOICES = {
    "trainer.precision": ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]
}
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true/false",
    "str": "text",
    "NoneType": "null",
    "dict": "options by name, in quotes and with a space after each colon, as in '{name: value}'",
    "tuple": "a list",
    "list": "a list",
    "Iterable": "a list",
    "dot import path": "a class",
}
SENTENCES = {  # jsonargparse's message, and ours
    r".*argument (--\S+): expected .*argument": r"\1 needs a value",
    r".*arguments are required: (\w+).*": r"--\1 is missing",
    r".*argument ([\w.]+) --> ([\w.]+):.*": r"--\2 cannot be set: it follows --\1",
    r".*Parser key \"([\w.]+)\": Unable to load config \"(.*?)\"": r"--\1 \2: no such file of "
    r"options",
    r"Parser key \"(\w+)\": Not of type Seed: .*": r"--\1 must be a whole number from 0 to "
    r"4294967295",
    r"[Uu]nrecognized arguments: ?(.*)": r"unexpected '\1': options begin with --",
}


def one_sentence(
    message: str, options: list[str], elsewhere: Callable[[str], str] = lambda name: ""
) -> str:
    """jsonargparse's message as one sentence, with the nearest of `options` for an unknown one.

    `elsewhere` as of `unknown_option`.
    """
    message = re.sub(r"\s*\n\s*(- )?", " ", message.strip()).removeprefix('Parser key "config": ')
    if found := re.search(r"Importing '(([\w-]+)[\w.-]*)' is not allowed", message):
        return (
            f"{found[1]} is refused, since naming it would run its code: set {TRUST}={found[2]} if "
            "you trust it"
        )
    if found := re.search(UNKNOWN_OPTION, message):
        name = next(filter(None, found.groups())).removeprefix("--")
        return unknown_option(f"--{name}", options, elsewhere)
    message = as_typed(message, options)
    if found := re.fullmatch(WRONG_VALUE, message):
        return wrong_value(*found.groups())
    for pattern, sentence in SENTENCES.items():
        if re.fullmatch(pattern, message):
            return re.sub(pattern, sentence, message)
    return message


def as_typed(message: str, options: Collection[str]) -> str:
    """A message that names options of `fit`, with the names that they have in this command.

    >>> as_typed("--data.tokenizer.kind is x.", ["--tokenizer.kind"])
    '--tokenizer.kind is x.'
    """

    def typed(found: re.Match[str]) -> str:
        short = f"--{found[1]}"
        return short if found[0] not in options and short in options else found[0]

    return re.sub(r"--data\.([\w.]*\w)", typed, message)


def full_names(message: str, section: str, options: Collection[str]) -> str:
    """A message of a class about its arguments, which are options of a section, by full names.

    >>> full_names("lr is 0, but must be above 0.", "model.optimizer", ["model.optimizer.lr"])
    '--model.optimizer.lr is 0, but must be above 0.'
    >>> full_names('A ViT needs stack.causal off.', "model.net", ["model.net.stack.causal"])
    'A ViT needs --model.net.stack.causal off.'
    """

    def full(found: re.Match[str]) -> str:
        name = f"{section}.{found[0]}".removeprefix(".")
        is_entry = "." in found[0] and name.rpartition(".")[0] in options  # of a dict
        return f"--{name}" if name in options or is_entry else found[0]

    dotted = r"[a-z]\w*(?:\.\w+)+"
    word = r"[a-z]\w*(?= is | must | -?\d|=|: | \")"
    return re.sub(rf"(?<![\w.\"'-])(?:{dotted}|{word})", full, message)


def wrong_value(key: str, reason: str, value: str) -> str:
    """The message about an option's value, with what it must be."""
    if nested := re.fullmatch(r"NestedArg\(key='(.*)', val='?(.*?)'?\)", value):
        key = f"{key}.{nested[1]}"
        value = nested[2]
    argument = re.search(r"--(\w+) is missing", reason)
    if argument and (found := re.search(CLASS_WITHOUT.format(argument[1]), value)):
        return f"--{key} {found[1]} needs --{key}.{argument[1]}"
    invalid = yaml_hint(value)
    value = value[:200] or "''"
    types = re.findall(EXPECTED_TYPE, reason)
    choices = [choice for *_, literal in types for choice in re.findall(r"[\w.-]+", literal)]
    names = [TYPE_NAMES.get(a or b, a) for a, b, _ in types if a or b]
    if key in USUAL_CHOICES:
        choices = USUAL_CHOICES[key]
        names = []
    names = list(dict.fromkeys(names + choices))
    expected = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    close = difflib.get_close_matches(value, choices, 1)
    hint = f": did you mean {close[0]}?" if close else invalid
    base_class = re.search(r"Subtypes: \[.*?<class '[a-z_.]+\.([A-Z]\w+)'>", reason)
    if base_class:
        # An argument of the class that was named, or a name that is not such a class.
        inner = re.search(
            r"(--\w+ (?:is missing|.*?: must be .*?))(?= Not a valid| Option| Expected|$)", reason
        )
        what = "an argument" if nested else "the name"
        expected = f"{what} of a {base_class[1]}"
        hint = f" ({inner[1]})" if inner else ""
    return f"--{key} {value}: must be {expected or 'another value'}{hint}"


def yaml_hint(value: str) -> str:
    """Why a list or mapping is not valid YAML; nothing if it is.

    >>> yaml_hint("[1, 010]")
    ' (line 1: 010 would be the number 8: quote it)'
    """
    if value.startswith(("[", "{")):
        try:
            load_yaml(value)
        except yaml.YAMLError as error:
            return f" ({yaml_problem(error)})"
        except RecursionError:
            return ""
    return ""
