"""The benchmarks that their README names run, print a table, and hold what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modules.models.images import build_image_net
from modules.pretrained.images import conversion
from tests.benchmarks import record, vit_step
from tests.helpers.tiny_models import close, shaken

ROOT = Path(__file__).parents[1]
README = (ROOT / "tests/benchmarks/README.md").read_text()
NAMES = sorted(set(re.findall(r"python -m tests\.benchmarks\.(\w+)", README)))
SHORT = {  # others: one round
    "checkpoints": "--rounds 0 --largest 10M",
    "cifar_peer": "--minutes 0.1",
    "gpu": "--rounds 1 --tiny",
    "growth": "--rounds 1 --axes length --smallest 512 --plot plot.png",
    "imdb_baseline": "--every 20",
    "input": "--rounds 1 --seconds 1",
    "loop": "--rounds 0",
    "muon": "--rounds 0 --steps 8 --recipes lm/reference",
    "nanogpt_peer": "--steps 100",
    "processes": "--rounds 0 --steps 10",
    "record": "",
    "savings": "--rounds 0",
    "seq2seq_step": "--rounds 0",
    "startup": "--rounds 1",
    "threads": "--rounds 1 --tasks vit --jobs 1 --steps 8",
    "tokenise": "--rounds 1 --texts 2000",
    "tokenised_bleu": "translations.tsv",
    "vit_step": "--rounds 0",
}
FASTER = {  # row that is faster than the first of its table, on all processors measured
    "bert_step": "train: tessera",
    "lm_generate": "tessera",
    "mlm_step": "tessera",
    "seq2seq_decode": "tessera",
}
MEMORY = {  # head and largest ratio of the additional memory of the row "tessera" to the first's
    "lm_step": ("taken MiB", 0.55),  # 0.46 to 0.49
    "mlm_step": ("taken MiB", 0.5),  # 0.35 to 0.40
    "seq2seq_decode": ("taken MiB", 1.0),  # 0.57
}
ALONE = {*FASTER, "growth", "startup"}


def marked(name: str) -> object:
    """A benchmark whose measurements are compared runs alone."""
    return pytest.param(name, marks=pytest.mark.alone) if name in ALONE else name


@pytest.mark.slow
@pytest.mark.exhaustive_except(
    *ALONE - {"bert_step", "growth"}, "gpu", "record", "tokenised_bleu", "vit_step"
)
@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_benchmark(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = (ROOT / "tests" / "benchmarks" / f"{name}.py").read_text()
    if "TESSERA_DATA" in source:
        request.getfixturevalue("real_data")
    table = "translation\treference\nein guter Film\tein guter Film\n"
    (tmp_path / "translations.tsv").write_text(table)
    options = SHORT.get(name, "--rounds 1").replace("translations", f"{tmp_path}/translations")
    options = options.replace("plot.png", f"{tmp_path}/plot.png")
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-2000:]
    if name not in ("gpu", "record", "tokenised_bleu"):  # which measure no time on this CPU
        assert re.search(r", load \d.*\d GFLOP/s", done.stdout), done.stdout
    assert re.search(r"\d+\.\d", done.stdout), done.stdout
    assert ("interleave(" in source) <= ("round 0 of " in done.stderr), done.stderr
    assert (tmp_path / "plot.png").exists() == ("plot" in options)
    if name in {*FASTER, *MEMORY}:
        found = {row.name: row for row in record.rows(done.stdout)}
    if name in FASTER:
        assert found[FASTER[name]].numbers["ratio"] > 1, done.stdout
    if name in MEMORY:
        head, most = MEMORY[name]
        ours, first = found["tessera"].numbers, found[found["tessera"].base].numbers
        assert ours[head] <= most * first[head], done.stdout
    if name == "startup":
        starts = re.findall(r"^(.{26}) .* (\S+)  (\S+), import \w+$", done.stdout, re.M)
        assert len(starts) >= 5
        assert all(float(ratio) <= float(most) for _, ratio, most in starts), done.stdout
    if name == "gpu":
        assert "left out: nothing" in done.stdout, done.stderr[-2000:]
    if name == "growth":  # of 512 to 4,096 tokens, with the gaps that the allocator leaves
        taken = [float(found) for found in re.findall(r"^length \d+ .* (\d+)$", done.stdout, re.M)]
        assert len(taken) == 4
        assert taken[3] / taken[0] < 8.8, done.stdout


VARIANTS = [
    "lm_generate --batch 8 --plot FILE.png",
    "lm_step --size tiny",
    "vit_step --preset mixer --profile",
]


@pytest.mark.slow
@pytest.mark.exhaustive_except("vit_step")
@pytest.mark.parametrize("command", VARIANTS)
def test_variant(command: str, tmp_path: Path) -> None:
    name, *options = command.replace("FILE.png", f"{tmp_path}/plot.png").split()
    line = [sys.executable, "-m", f"tests.benchmarks.{name}", *options, "--rounds", "0"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\d+\.\d", done.stdout), done.stdout
    assert (tmp_path / "plot.png").exists() == ("--plot" in options)
    assert ("timm: " in done.stdout) == ("--profile" in options), done.stdout


@pytest.mark.plain_every(4)
@pytest.mark.parametrize("preset", vit_step.CLASSES)
def test_networks_of_the_vit_step_are_timms(preset: str) -> None:
    config = vit_step.config_of(preset)
    ours, theirs = shaken(build_image_net(config)).eval(), vit_step.timm_net(preset).eval()
    theirs.load_state_dict(conversion(config).family.weights_to_external(ours.state_dict(), config))
    images = torch.randn(2, 3, config.image_size, config.image_size)
    close(ours(images), theirs(images), atol=1e-4)


def test_options_of_the_readme_are_tried() -> None:
    """Except `--rounds` and `--nanogpt`, which needs the code of nanoGPT."""
    tried = [*VARIANTS, *(f"{name} {options}" for name, options in SHORT.items())]
    named = set(
        re.findall(r"python -m tests\.benchmarks\.(\w+) [^`]*?(--(?!rounds|nanogpt)\w+)", README)
    )
    assert len(named) >= 6
    for name, option in named:
        assert any(line.startswith(f"{name} ") and option in line for line in tried), (name, option)


WITHOUT_PEERS: list[str] = []  # stored results whose benchmarks compare nothing


def test_stored_results() -> None:
    """Each has its commit, and the row that the table is about."""
    text = "python -m b\ncommit 0a1b2c3d4, 2026-01-02\n\ncpu, 2 threads\n"
    text += f"{'':<24}{'median images/s':>18}{'ratio':>8}\n"
    text += f"{'timm':<24}{10:>18}{1:>8}\n{'tessera':<24}{12.34:>18}{1.23:>8}\n"
    file = record.RESULTS / "avx2" / "b.txt"
    assert record.cell(text, file) == "tessera 12.34 images/s, 1.23x timm (0a1b2c3d4)"
    text = "python -m b\ncommit 0a1b2c3d4, 2026-01-02\n\ncpu, 2 threads\n"
    text += f"{'':<24}{'step ms':>12}{'Muon ms':>12}{'share %':>12}\n"
    text += f"{'lm/a':<24}{80:>12}{4:>12}{5.0:>12}\n{'vit/b':<24}{10:>12}{2:>12}{20.0:>12}\n"
    assert record.cell(text, file) == "lm/a 5.0 %; vit/b 20.0 % (0a1b2c3d4)"
    text = "python -m b\ncommit 0a1b2c3d4, with changes, 2026-01-02\n\nsaved in 1.5 s\n"
    assert record.cell(text, file) == "see avx2/b.txt (0a1b2c3d4, with changes)"
    stored = sorted(record.RESULTS.glob("*/*.txt"))
    assert stored
    for path in stored:
        ours = r"tessera .*\d [a-z]+.*x .*|train: .*|(\w+/\w+ [\d.]+ %(; )?)+"
        if path.stem in WITHOUT_PEERS:
            ours = "see .*"
        cell = record.cell(path.read_text(), path)
        assert re.fullmatch(rf"({ours}) \([0-9a-f]{{9}}\)", cell), path


def test_every_benchmark_is_named() -> None:
    assert [path.stem for path in sorted(ROOT.glob("tests/benchmarks/[a-z]*.py"))] == NAMES
