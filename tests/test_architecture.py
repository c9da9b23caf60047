"""The rules of the layout: who may import whom, one call of SDPA, and sizes of files."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "modules": {"datamodules", "tasks", "tests"},
    "datamodules": {"modules", "tasks", "tests"},
    "tasks": {"tests"},
}
PATHS = sorted(path for package in FORBIDDEN for path in (ROOT / package).rglob("*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PATHS}


def imported(name: str) -> set[str]:
    """What a file imports, inside functions too: `a` and `a.b` for `from a import b`."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def test_packages_import_only_those_below() -> None:
    for name in TREES:
        package = name.partition("/")[0]
        packages = {found.partition(".")[0] for found in imported(name)}
        assert not packages & FORBIDDEN[package], name
        if package == "modules":
            assert packages <= {"torch", "modules"} | sys.stdlib_module_names, name


def test_files_stay_small() -> None:
    lengths = {
        path: len(path.read_text().splitlines())
        for path in [*PATHS, *(ROOT / "tests").rglob("*.py")]
    }
    assert not [path for path, length in lengths.items() if length > 400]


def test_functions_stay_small() -> None:
    nodes = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]
    for name, node in nodes:
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, (name, node.name)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments = [one for one in arguments if one.arg not in ("self", "cls")]
            most = {"forward": 5, "__init__": 9}.get(node.name, 8)
            assert len(arguments) <= most, (name, node.name)


def test_there_are_no_import_circles() -> None:
    graph = {}
    for name in TREES:
        paths = [found.replace(".", "/") for found in imported(name)]
        files = {file for path in paths for file in (f"{path}.py", f"{path}/__init__.py")}
        graph[name] = files & set(TREES)
    assert sum(map(len, graph.values())) > 300
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "folder", ["tasks", "modules/models", "modules/generation", "modules/kernels"]
)
def test_folders_stay_small(folder: str) -> None:
    assert len(list((ROOT / folder).glob("*.py"))) <= 10


def test_one_place_computes_attention() -> None:
    calls = [
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "scaled_dot_product_attention" in ast.unparse(node.func)
    ]
    assert calls == ["modules/attention.py"]


@pytest.mark.slow
def test_the_block_library_needs_torch_only() -> None:
    names = [name.removesuffix(".py").replace("/", ".") for name in TREES if name[0] == "m"]
    code = f"import {', '.join(names)}, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torchvision", "timm", "pytorch_lightning", "transformers", "datasets", "wandb"}
    assert not (heavy | {"matplotlib", "sklearn"}) & set(done.stdout.split())
