"""No line of the sources could run what it reads."""

import ast
from collections.abc import Iterator

from tests.test_architecture import TREES

CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "np.load", "numpy.load"),
    *("torch.jit.load", "torch.hub.load", "shutil.unpack_archive"),
}
MODULES = {
    *("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "tarfile", "zipfile"),
    *("pandas", "transformers"),
}
READING = "tasks/checkpoints/reading.py"
# The name of an error, and checksums.
EXCEPT = {(READING, "pickle"), ("tasks/vit/other_classifiers.py", "pickle"), (READING, "zipfile")}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a file could run, or import, what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from MODULES & {(node.module or "").partition(".")[0]}
        if isinstance(node, ast.Import):
            yield from MODULES & {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pickle."):
            yield from {ast.unparse(node)} - {"pickle.UnpicklingError"}
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in CALLS or "trust_remote_code" in given or given.get("shell", "False") != "False":
            yield name
        trainer_call = name.rpartition(".")[2] in ("fit", "test", "validate")
        loads = name == "torch.load" or (trainer_call and "ckpt_path" in given)
        if loads and given.get("weights_only") != "True":
            yield name


def test_no_line_could() -> None:
    assert {(name, what) for name, tree in TREES.items() for what in unsafe(tree)} <= EXCEPT


def test_line_that_could_is_found() -> None:
    for line in ("torch.load(f)", "trainer.fit(m, ckpt_path=p)", "from tarfile import open"):
        assert list(unsafe(ast.parse(line)))
    good = ast.parse("torch.load(f, weights_only=True); net.eval(); re.compile(p)")
    assert not list(unsafe(good))
