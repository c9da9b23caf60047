"""The packages of `pip install tessera` suffice for training; a missing extra is named."""

import re
from pathlib import Path

import pytest

from datamodules.utils.errors import UsageError
from datamodules.utils.extras import extra
from tests.helpers.command import process
from tests.helpers.packages import EXTRAS, ROOT, hide, outside_core
from tests.helpers.tiny import FEW_STEPS, NET, write_images, write_reviews

ONNX = "export --format onnx --output a.onnx --ckpt_path"
HUB = f"fit --preset tiny {NET} --data.source hub --data.dataset.name nobody/nothing --run_dir r"
TENSORBOARD = f"fit {FEW_STEPS} --config configs/logger/tensorboard.yaml --run_dir r"


def test_extras_are_those_that_the_code_names() -> None:
    texts = [
        path.read_text()
        for folder in ("datamodules", "tasks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = set(re.findall(r'with extra\("(\w+)"\)', "".join(texts)))
    assert named == EXTRAS.keys() - {"all", "dev", "ray"}  # users import Ray themselves
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"\w+", everything)) == {"tessera", "ray", *named}
    assert "tessera[all]" in EXTRAS["dev"]


def test_only_missing_packages_are_turned_into_the_sentence() -> None:
    sentence = r'^nowhere is not installed: pip install "tessera\[hub\]"$'
    with pytest.raises(UsageError, match=sentence), extra("hub"):
        import nowhere  # noqa: F401
    with pytest.raises(ImportError, match="nothing_here"), extra("hub"):
        from json import nothing_here  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, task, package, name",
    [
        (f"{ONNX} BEST", "vit", "onnx", "export"),
        (f"{ONNX} BEST", "vit", "onnxscript", "export"),
        (HUB, "bert", "datasets", "hub"),
        (TENSORBOARD, "vit", "tensorboard", "tensorboard"),
    ],
)
def test_a_missing_extra_is_named(
    line: str, task: str, package: str, name: str, best: Path, tmp_path: Path
) -> None:
    done = process(line.replace("BEST", str(best)), hide({package}), task=task, cwd=tmp_path)
    wanted = f'error: {package} is not installed: pip install "tessera[{name}]"\n'
    assert (done.returncode, done.stderr) == (2, wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("task", ["vit", "bert", "mlm", "lm", "seq2seq"])
def test_default_runs_need_no_extra(task: str, tmp_path: Path) -> None:
    hidden = outside_core()
    assert {"datasets", "onnx", "tensorboard", "sklearn", "scipy", "pandas", "pytest"} <= hidden
    assert not {"torch", "timm", "wandb", "torchvision", "matplotlib", "pyarrow"} & hidden
    done = process(f"fit {FEW_STEPS} --run_dir r", hide(hidden), task=task, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r/summary.json").exists() and (tmp_path / "r/curves.png").exists()


@pytest.mark.slow
def test_local_files_need_no_extra(tmp_path: Path) -> None:
    """Images in folders, Parquet files of the hub's schema, and the Python API."""
    write_images(tmp_path / "images", side=32)
    write_reviews(tmp_path / "hub")
    missing = hide(outside_core())
    images = f"fit --preset tiny {NET} --data.source folder --data.path images --run_dir vit"
    images += f" --model.net.image_size 32 --model.net.patch_size 8 --data.batch_size 2 {FEW_STEPS}"
    texts = f"fit --preset tiny {NET} --data.source hub --data.path hub --data.batch_size 2"
    texts += f" --data.tokenizer.vocabulary 300 {FEW_STEPS} --run_dir bert"
    for line, task in ((images, "vit"), (texts, "bert")):
        done = process(line, missing, task=task, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    code = "import tessera; print(tessera.load('vit').predict('images/train/cat/0.png').label)"
    done = process("--version", f"{missing}\n{code}", cwd=tmp_path)
    assert done.stdout.split()[0] in ("cat", "dog"), done.stderr
