"""What jsonargparse complains of, as one sentence for the user."""

import difflib
import re

from tasks.errors import nearest_option

TRUST = "TESSERA_TRUST"  # environment variable: further packages, parted by commas, whose classes options may name
UNKNOWN = r"[Uu]nrecognized arguments?:? '?(--[\w.+-]+)|does not accept option '([\w.]+)'|[Kk]ey '([\w.]+)' is not expected"
WRONG = r'.*Parser key "([\w.]+)":(.*)(?:Got value|Given value): ?(.*)'
INNER = r"(--\w+ (?:is missing|.*?: must be .*?))(?= Not a valid| Option| Expected|$)"  # of a class's arguments
PLAIN = {  # what jsonargparse says, and the same as a sentence for the user
    r".*argument (--\S+): expected .*argument": r"\1 needs a value",
    r".*arguments are required: (\w+).*": r"--\1 is missing",
    r".*argument ([\w.]+) --> ([\w.]+):.*": r"--\2 cannot be set: it follows --\1",
    r".*Parser key \"([\w.]+)\": Unable to load config \"(.*?)\"": r"--\1 \2: no such file of options",
    r".*Neither 'tensorboard' nor 'tensorboardX' is available.*": "TensorBoard needs one more package: "
    "pip install tensorboard",
    r"Parser key \"(\w+)\": Not of type Seed: (-?\d+) .*": r"--\1 \2: must lie between 0 and 4294967295",
    r"Parser key \"(\w+)\": Not of type Seed: .*": r"--\1 must be a whole number from 0 to 4294967295",
    r"[Uu]nrecognized arguments: ?(.*)": r"unexpected '\1': options begin with --",
}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true/false", "str": "text", "NoneType": "null",
         "tuple": "a list", "list": "a list", "Iterable": "a list", "dot import path": "a class"}  # fmt: skip


def readable(message: str, options: list[str]) -> str:
    """One sentence from jsonargparse's message, with the nearest of `options` for an unknown one."""
    message = re.sub(r"\s*\n\s*(- )?", " ", message.strip()).removeprefix('Parser key "config": ')
    if found := re.search(r"Importing '(([\w-]+)[\w.-]*)' is not allowed", message):
        return f"{found[1]} is refused, since naming it would run its code: set {TRUST}={found[2]} if you trust it"
    if found := re.search(UNKNOWN, message):
        return nearest_option("--" + next(filter(None, found.groups())).removeprefix("--"), options)
    if found := re.fullmatch(WRONG, message):
        return wrong_value(*found.groups())
    for pattern, sentence in PLAIN.items():
        if re.fullmatch(pattern, message):
            return re.sub(pattern, sentence, message)
    return message


def wrong_value(key: str, expected: str, value: str) -> str:
    """A sentence that refuses the value of an option and says which there are."""
    if nested := re.fullmatch(r"NestedArg\(key='(.*)', val='?(.*?)'?\)", value):
        key, value = f"{key}.{nested[1]}", nested[2]
    value = value if 0 < len(value) <= 200 else f"{value[:200]}..." if value else "''"
    if classes := re.search(
        r"Subtypes: \[.*?<class '[a-z_.]+\.([A-Z]\w+)'>.*?\] Errors: (.*?) Given value", expected
    ):
        if inner := re.search(INNER, classes[2]):
            return f"--{key}: {inner[1]}"
        if re.search("subclass of|dot import path|is not accepted", classes[2]):
            return f"--{key} {value}: must be {'an argument' if nested else 'the name'} of a {classes[1]}"
    kinds = re.findall(
        r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|(dot import path)|typing\.Literal\[(.*?)\])",
        expected,
    )
    choices = [choice for *_, literal in kinds for choice in re.findall(r"[\w.-]+", literal)]
    words = list(dict.fromkeys([KINDS.get(a or b, a) for a, b, _ in kinds if a or b] + choices))
    known = " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])) or "of another kind"
    close = difflib.get_close_matches(value, choices, 1)
    reason = re.search(r"given class_path '\S+': (.*?)(?= Expected| Problem|$)", expected)
    hint = f": did you mean {close[0]}?" if close else f" ({reason[1].strip()})" if reason else ""
    return f"--{key} {value}: must be {known}{hint}"
