"""The rules of the layout: who may import whom, one call into SDPA, and sizes that a reader can hold."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("modules", "datamodules", "tasks")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]
FORBIDDEN = {
    "modules": ("datamodules", "tasks", "tests"),
    "datamodules": ("modules", "tasks", "tests"),
    "tasks": ("tests",),
}


def imported(tree: ast.AST) -> set[str]:
    """Top names of all modules that a file imports, inside functions too."""
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_rooms_keep_their_distance(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    names = imported(ast.parse(path.read_text()))
    assert not names & set(FORBIDDEN[room])
    if room == "modules":
        assert names <= {"torch", "modules"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments = [a for a in arguments if a.arg not in ("self", "cls")]
            assert all(a.annotation for a in arguments), (
                f"{node.name} has an argument without a type"
            )
            limit = 5 if node.name == "forward" else 8
            assert len(arguments) <= limit, f"{node.name} takes {len(arguments)} arguments"


def ours(path: Path) -> set[str]:
    """Files of ours that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names] + [node.module or ""]
        files = {f"{name.replace('.', '/')}.py" for name in names}
        found |= files & set(NAMES)
    return found


def test_no_import_circles() -> None:
    graph = {name: ours(path) for name, path in zip(NAMES, SOURCES, strict=True)}
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
        for name, path in zip(NAMES, SOURCES, strict=True)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and "scaled_dot_product_attention" in ast.unparse(node.func)
    ]
    assert calls == ["modules/attention.py"]


def test_the_block_library_needs_torch_only() -> None:
    heavy = "'torchvision', 'timm', 'pytorch_lightning', 'transformers', 'datasets', 'wandb', 'matplotlib', 'sklearn'"
    ours = "modules.models.vit, modules.parameter_groups, modules.generation.generate, modules.pretrained.vit"
    ours += ", modules.pretrained.bert, modules.pretrained.decoder"
    code = f"import {ours}, sys; print({{{heavy}}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
