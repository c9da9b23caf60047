"""Mutation testing: how many small faults in the sources do the tests catch?

    python tests/mutants.py [--source FOLDER] [--count 80] [--seed 0] [--out FILE] [--lines FILE]

1. Draw a sample of mutants, at most one per function. It depends on the seed and the sources only.
2. Record with coverage which test file executes which lines.
3. For each mutant, run the test files that execute its statement, first those that execute most of
   its file in the least time. The mutant is caught if a test fails or does not end in time. It is
   missed if no test executes it, or if all pass that take no more than `--seconds` together.

The tests run in a temporary copy of the checkout. Both files hold JSON lines, written as soon as a
result is known, so the same command continues after an interruption. Results of other sources are
ignored, and a changed test file is recorded again. To test a mutant again, delete its line.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("modules", "datamodules", "tasks")
OPPOSITES: dict[type, Any] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
}
UNCHANGED = (ast.JoinedStr, ast.Raise, ast.Assert)  # texts and errors
SECONDS = 1800  # of a test file, with coverage
COVERAGE = """[run]
source = {sources}
data_file = {folder}/.coverage
concurrency = multiprocessing, thread
patch = subprocess, _exit
"""


class Mutant(NamedTuple):
    """One changed file."""

    key: str  # file, line and function, and what is changed into what
    path: str  # of the file, relative to the checkout
    lines: range  # of the changed statement; of a compound one, those before its body
    text: str  # of the changed file


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        """The node with the replacement in it."""
        return self.new if node is self.old else self.generic_visit(node)


def changed(node: ast.AST) -> ast.AST | None:
    """A faulty version of a node, if there is one for its kind."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            return ast.Compare(left, [OPPOSITES[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPPOSITES:
            texts = [getattr(side, "value", 0) for side in (left, right)]
            if not any(isinstance(text, str) for text in texts):
                return ast.BinOp(left, OPPOSITES[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(OPPOSITES[type(op)](), values)
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(number) | float(number)):
            return ast.Constant(number + 1)
        case ast.If(test=test, body=body, orelse=orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign():
            return ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return ast.Return(ast.Constant(None))
    return None


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions inside a node, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}.{getattr(child, 'name', '')}".strip(".")
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from functions(child, name)


def parts(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """A node and those below, each with its statement; not those of inner functions."""
    if isinstance(node, UNCHANGED + (ast.FunctionDef, ast.ClassDef)):
        return
    if isinstance(node, ast.stmt):
        statement = node
    yield node, statement
    for child in ast.iter_child_nodes(node):
        is_strict = isinstance(child, ast.keyword) and child.arg == "strict"  # of `zip`
        if child is not getattr(node, "annotation", None) and not is_strict:
            yield from parts(child, statement)


def sample(checkout: Path, count: int, seed: int) -> list[Mutant]:
    """Mutants of `count` functions; functions with the same name and text get the same changes."""
    sampled = []
    for file in sorted(file for name in PACKAGES for file in (checkout / name).rglob("*.py")):
        path = file.relative_to(checkout).as_posix()
        tree = ast.parse(file.read_text())
        for name, function in functions(tree):
            found = [pair for top in function.body for pair in parts(top, top) if changed(pair[0])]
            if found:
                rng = random.Random(f"{seed} {path} {name}")
                order = rng.random()
                kind = rng.choice(sorted({type(node).__name__ for node, _ in found}))
                of_kind = [pair for pair in found if type(pair[0]).__name__ == kind]
                node, statement = rng.choice(of_kind)
                sampled.append((order, f"{path}:{statement.lineno} {name}", tree, node, statement))
    mutants = []
    for _, name, tree, node, statement in sorted(sampled, key=lambda entry: entry[:2])[:count]:
        new = changed(node)
        assert new
        before, after = (ast.unparse(one).partition("\n")[0] for one in (node, new))
        text = ast.unparse(Replace(node, new).visit(tree))
        Replace(new, node).visit(tree)  # the next mutant of the file has this one change only
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if body else statement.end_lineno or 0
        lines = range(statement.lineno, max(statement.lineno, last) + 1)
        path = name.partition(":")[0]
        mutants.append(Mutant(f"{name}: {before} -> {after}", path, lines, text))
    return mutants


def failures(checkout: Path, arguments: list[str], seconds: float) -> list[str]:
    """The tests that fail if Python runs with these arguments, pytest's at the end."""
    command = [sys.executable, *arguments, "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    folders = {"PYTHONPATH": str(checkout), "TMPDIR": str(checkout.with_name("tmp"))}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env=os.environ | folders,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return [f"no end after {seconds:.0f} s"]
        finally:
            with suppress(ProcessLookupError):  # processes that the tests left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.M)
    if code in (0, 5):  # 5: the marks leave out all tests
        return []
    return failed or [f"pytest ends with {code}"]


def record(checkout: Path, file: str, marks: str) -> dict[str, Any]:
    """Tests of a file that fail, its seconds, and its executed lines by source."""
    import coverage

    pytest = ["-m", "pytest", "-m", marks, file]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "coveragerc")
        sources = ", ".join(str(checkout / name) for name in PACKAGES)
        config.write_text(COVERAGE.format(sources=sources, folder=folder))
        launcher = ["-m", "coverage", "run", f"--rcfile={config}"]
        start = time.perf_counter()
        failed = failures(checkout, [*launcher, *pytest], SECONDS)
        seconds = time.perf_counter() - start
        measured = coverage.Coverage(config_file=str(config))
        measured.combine([folder])
        data = measured.get_data()
        lines = {
            Path(name).relative_to(checkout).as_posix(): sorted(data.lines(name) or [])
            for name in data.measured_files()
        }
    if failed:  # perhaps only because coverage is slow
        failed = failures(checkout, pytest, SECONDS)
    return {"failed": failed, "seconds": round(seconds, 1), "lines": lines}


def judge(
    checkout: Path, mutant: Mutant, records: dict[str, Any], marks: str, most: float
) -> dict[str, Any]:
    """The test that catches a mutant, if one does within seconds, and the number of test files."""
    executing = {}
    for file, entry in records.items():
        is_sound = all("::" in test for test in entry["failed"])  # single tests can be left out
        lines = entry["lines"].get(mutant.path, [])
        if is_sound and not set(mutant.lines).isdisjoint(lines):
            executing[file] = entry["seconds"] / len(lines)
    left = []
    total = 0.0
    for file in sorted(executing, key=executing.__getitem__):
        total += records[file]["seconds"]
        if total <= most or not left:
            left.append(file)
    verdict: dict[str, Any] = {"caught": None, "files": len(executing), "run": len(left)}
    target = checkout / mutant.path
    original = target.read_text()
    write_source(target, mutant.text)
    at_once = 1
    while left and not verdict["caught"]:
        some = left[:at_once]
        left = left[at_once:]
        at_once *= 2  # few processes, and nothing slow in the first
        arguments = ["-m", "pytest", "-x", "-m", marks, *some]
        arguments += [f"--deselect={test}" for file in some for test in records[file]["failed"]]
        seconds = 120 + 5 * sum(records[file]["seconds"] for file in some)
        verdict["caught"] = next(iter(failures(checkout, arguments, seconds)), None)
    write_source(target, original)
    return verdict


def write_source(file: Path, text: str) -> None:
    """Writes a source; its bytecode may be of a version of the same second and size."""
    file.write_text(text)
    Path(cache_from_source(file)).unlink(missing_ok=True)


def resume(path: str, work: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Results by key: those in the file, and the others made now and appended to it."""
    with open(path, "a+") as file:
        file.seek(0)
        known = {entry.pop("key"): entry for entry in map(json.loads, file)}
        for number, (key, make) in enumerate(work.items(), 1):
            if key not in known:
                known[key] = make()
                print(json.dumps({"key": key, **known[key]}), file=file, flush=True)
                said = {name: value for name, value in known[key].items() if name != "lines"}
                print(f"{number}/{len(work)} {key} {said}", flush=True)
    return {key: known[key] for key in work}


def digest(files: list[Path]) -> str:
    """Short hash of the texts of files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def main() -> None:
    """Parses the command line, and prints the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="a checkout")
    parser.add_argument("--count", type=int, default=80, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--out", default="mutants.jsonl", help="file of the verdicts")
    parser.add_argument("--lines", default="mutants-lines.jsonl", help="file of executed lines")
    parser.add_argument("--tests", nargs="*", help="these test files only, relative to the source")
    parser.add_argument("-m", dest="marks", default="not slow", help="which tests, as pytest's -m")
    parser.add_argument("--list", action="store_true", help="print the sample and test nothing")
    parser.add_argument("--seconds", type=float, default=1e9, help="of tests for each mutant")
    options = parser.parse_args()
    source = options.source.resolve()
    mutants = sample(source, options.count, options.seed)
    if options.list:
        print(*(mutant.key for mutant in mutants), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        checkout = Path(folder, "checkout")
        left_out = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "runs", "wandb")
        shutil.copytree(source, checkout, ignore=left_out)
        checkout.with_name("tmp").mkdir()
        sources = [file for name in PACKAGES for file in sorted((checkout / name).rglob("*.py"))]
        found = sorted(map(str, checkout.glob("tests/**/test_*.py")))
        files = options.tests or [str(Path(file).relative_to(checkout)) for file in found]
        keys = {file: f"{digest([*sources, checkout / file])} {file}" for file in files}
        recorded = resume(
            options.lines,
            {key: partial(record, checkout, file, options.marks) for file, key in keys.items()},
        )
        records = {file: recorded[key] for file, key in keys.items()}
        for file, entry in records.items():
            for test in entry["failed"]:
                print(f"left out, as it fails without a mutant: {test} ({file})")
        version = digest(sources)
        work = {
            f"{version} {mutant.key}": partial(
                judge, checkout, mutant, records, options.marks, options.seconds
            )
            for mutant in mutants
        }
        verdicts = resume(options.out, work)
    missed = [key for key, verdict in verdicts.items() if not verdict["caught"]]
    print(*(f"missed: {key}" for key in missed), sep="\n")
    print(f"caught {len(verdicts) - len(missed)} of {len(verdicts)}")


if __name__ == "__main__":
    main()
