"""The packages of `pip install tessera` suffice for training; a missing extra is named."""

import re
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from datamodules.utils.errors import UsageError
from datamodules.utils.extras import requires_extra
from tests.datamodules.tokenizers.test_sentencepiece import ENGLISH, train
from tests.helpers.command import process
from tests.helpers.packages import EXTRAS, PROJECT, ROOT, hide, normal, outside_core
from tests.helpers.tiny import FEW_STEPS, NET, write_images, write_reviews

ONNX = "export --format onnx --output a.onnx --ckpt_path"
HUB = f"fit --preset tiny {NET} --data.source hub --data.dataset.name nobody/nothing --run_dir r"
SENTENCEPIECE = "fit --data.tokenizer.file only.spm --run_dir r"
WANDB = f"fit {FEW_STEPS} --config configs/logger/wandb.yaml --run_dir r"
TENSORBOARD = f"fit {FEW_STEPS} --config configs/logger/tensorboard.yaml --run_dir r"


def test_extras_are_those_that_the_code_names() -> None:
    texts = [
        path.read_text()
        for folder in ("datamodules", "tasks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = set(re.findall(r'with requires_extra\("(\w+)"\)', "".join(texts)))
    assert named == EXTRAS.keys() - {"all", "dev", "ray"}  # users import Ray themselves
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"\w+", everything)) == {"tessera", "ray", *named}
    assert "tessera[all]" in EXTRAS["dev"]


def test_only_missing_packages_are_turned_into_the_sentence() -> None:
    sentence = r'^nowhere is not installed: pip install "tessera\[hub\]"$'
    with pytest.raises(UsageError, match=sentence), requires_extra("hub"):
        import nowhere  # noqa: F401
    with pytest.raises(ImportError, match="nothing_here"), requires_extra("hub"):
        from json import nothing_here  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.slow
@pytest.mark.exhaustive_except("onnxscript", "datasets")
@pytest.mark.parametrize(
    "line, task, package, name",
    [
        (f"{ONNX} BEST", "vit", "onnx", "export"),
        (f"{ONNX} BEST", "vit", "onnxscript", "export"),
        (HUB, "bert", "datasets", "hub"),
        (SENTENCEPIECE, "bert", "sentencepiece", "sentencepiece"),
        (TENSORBOARD, "vit", "tensorboard", "tensorboard"),
    ],
)
def test_a_missing_extra_is_named(
    line: str, task: str, package: str, name: str, best: Path, tmp_path: Path
) -> None:
    if package == "sentencepiece":
        line = line.replace("only.spm", str(train(tmp_path.parent, "only", ENGLISH)))
    done = process(line.replace("BEST", str(best)), hide({package}), task=task, cwd=tmp_path)
    wanted = f'error: {package} is not installed: pip install "tessera[{name}]"\n'
    assert (done.returncode, done.stderr) == (2, wanted)
    assert list(tmp_path.iterdir()) == []


def test_completion_names_its_extra() -> None:
    code = "import sys; sys.argv[1:] = ['completion', 'bash']; from tasks.tessera import command"
    code = f"{hide({'shtab'})}\n{code}\nsys.exit(command.main())"
    done = process("--version", code)
    wanted = 'error: shtab is not installed: pip install "tessera[completion]"\n'
    assert (done.returncode, done.stderr) == (2, wanted)


@pytest.mark.parametrize(
    "line, package, requirement",
    [
        ("fit", "torch", "torch>="),
        ("fit", "yaml", "pyyaml>="),
        pytest.param(WANDB, "wandb", "wandb>=", marks=pytest.mark.slow),
    ],
)
def test_a_missing_core_package_is_named(
    line: str, package: str, requirement: str, tmp_path: Path
) -> None:
    done = process(line, hide({package}), cwd=tmp_path)
    (wanted,) = [text for text in PROJECT["dependencies"] if text.startswith(requirement)]
    sentence = f'error: {package} is not installed: pip install "{wanted}"\n'
    assert (done.returncode, done.stderr) == (2, sentence)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_default_runs_need_no_extra_and_most_of_the_core(tmp_path: Path) -> None:
    hidden = outside_core()
    assert {"datasets", "onnx", "tensorboard", "sklearn", "scipy", "pandas", "pytest"} <= hidden
    assert {"sentencepiece", "shtab"} <= hidden
    assert not {"torch", "timm", "wandb", "torchvision", "matplotlib", "pyarrow"} & hidden
    imported: set[str] = set()
    for task in ("vit", "mae", "bert", "mlm", "lm", "igpt", "seq2seq"):
        line = f"fit {FEW_STEPS} --run_dir {task}"
        done = process(line, hide(hidden), task=task, cwd=tmp_path)
        # A line unless an earlier test has left that tokenizer in the cache.
        said = done.stderr.removeprefix("training the tokenizer (24,000)\n")
        assert (done.returncode, said) == (0, "")
        assert (tmp_path / task / "summary.json").exists()
        assert (tmp_path / task / "curves.png").exists()
        imported |= set(done.stdout.rpartition("imported ")[2].split())
    owners = packages_distributions()
    used = {normal(owner) for name in imported for owner in owners.get(name, [])}
    core = {normal(Requirement(text).name) for text in PROJECT["dependencies"]}
    # timm requires safetensors and the hub's package; its models need torchvision, too.
    assert core - used <= {"timm", "wandb", "safetensors", "huggingface-hub", "torchvision"}


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
