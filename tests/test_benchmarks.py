"""Every benchmark that the README names runs and prints its table, which says what was promised of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = sorted(
    set(re.findall(r"python -m (tests\.benchmarks\.\w+)", (ROOT / "README.md").read_text()))
)
SHORT = {
    "tests.benchmarks.checkpoints": ["--rounds", "1", "--largest", "10M"],
    "tests.benchmarks.cifar_peer": ["--minutes", "0.5"],
    "tests.benchmarks.growth": ["--rounds", "1", "--axes", "length", "--smallest", "512"],
    "tests.benchmarks.imdb_baseline": [],
    "tests.benchmarks.nanogpt_peer": [],
    "tests.benchmarks.tokenised_bleu": ["translations.tsv"],
}
# Memory of ours to theirs: 0.43 and 0.49 when measured at length.
MOST = {
    "tests.benchmarks.mlm_step": ("peak MiB", 0.5),
    "tests.benchmarks.lm_step": ("taken MiB", 0.55),
}


PROMISES = (
    "bert_step",
    "growth",
    "lm_generate",
    "lm_step",
    "mlm_step",
    "seq2seq_decode",
)  # about speed or memory


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.alone) if name.endswith(PROMISES) else name
        for name in NAMED
    ],
)
def test_benchmark(module: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "TESSERA_DATA" in (ROOT / f"{module.replace('.', '/')}.py").read_text():
        request.getfixturevalue("real_data")
    (tmp_path / "translations.tsv").write_text(
        "translation\treference\n" + "ein guter Film\tein guter Film\n"
    )
    command = [sys.executable, "-m", module, *SHORT.get(module, ["--rounds", "1"])]
    plots = 'metavar="FILE.png"' in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    command += ["--plot", str(tmp_path / "plot.png")] if plots else []
    command = [str(tmp_path / word) if word == "translations.tsv" else word for word in command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\d+\.\d", done.stdout), done.stdout
    assert (tmp_path / "plot.png").exists() == plots
    # A single round on a machine that others use too: which is the faster, not by how much.
    if module == "tests.benchmarks.bert_step":
        assert row(done.stdout, "train: tessera")["ratio"] > 1, done.stdout  # 2.5 at length
    if module in MOST:
        (memory, most), ours, theirs = (
            MOST[module],
            row(done.stdout, "tessera"),
            row(done.stdout, "hugging face"),
        )
        assert ours["ratio"] > 1 and ours[memory] <= most * theirs[memory], (
            done.stdout
        )  # 4.6 and 1.9
    if (
        module == "tests.benchmarks.growth"
    ):  # to the byte in test_decoder.py; what is resident has the allocator's gaps
        taken = [float(found) for found in re.findall(r"^length \d+ .* (\d+)$", done.stdout, re.M)]
        assert len(taken) == 4 and taken[3] / taken[0] < 8.8, done.stdout
    if module == "tests.benchmarks.seq2seq_decode":
        ours, theirs = row(done.stdout, "tessera"), row(done.stdout, "hugging face")
        assert ours["ratio"] > 1 and ours["taken MiB"] < theirs["taken MiB"], (
            done.stdout
        )  # 3.1, and 0.57 of it
    if module == "tests.benchmarks.lm_generate":
        assert row(done.stdout, "tessera")["ratio"] > 1, done.stdout  # 2.5


def row(text: str, name: str) -> dict[str, float]:
    """The numbers in the row of a benchmark's table that begins with `name`, by their heads."""
    lines = text.splitlines()
    heads = re.split(r"\s{2,}", next(line for line in lines if "ratio" in line).strip())
    numbers = next(line for line in lines if line.startswith(f"{name} ")).removeprefix(name).split()
    return dict(zip(heads, map(float, numbers), strict=True))


def test_every_benchmark_is_named() -> None:
    files = {path.stem for path in (ROOT / "tests" / "benchmarks").glob("[a-z]*.py")}
    assert {f"tests.benchmarks.{name}" for name in files} == set(NAMED)
