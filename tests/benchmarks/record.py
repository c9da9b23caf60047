"""Store what a benchmark prints, with commit and processor; print a table of all that is stored.

    python -m tests.benchmarks.record vit_step [OPTIONS OF THE BENCHMARK]
    python -m tests.benchmarks.record

The first line runs `python -m tests.benchmarks.vit_step` and writes its output to a file in
`tests/benchmarks/results/avx512/` or, if PyTorch has or may use AVX2 only, `avx2/`. The second
prints the table in Markdown: of each benchmark, our rows and how they compare with the first row,
the share of Muon in the step of each recipe, or else the name of the file.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
KINDS = {"avx512": "AVX-512", "avx2": "AVX2"}
SHARE = "share %"  # the column of tests.benchmarks.muon
# Of the instructions that are used.
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS")


class Row(NamedTuple):
    """A line of a table: its name, numbers by their heads, and the name of the first line."""

    name: str
    numbers: dict[str, float]
    base: str


def main() -> None:
    """Runs a benchmark, or prints the table."""
    if "--help" in sys.argv[1:2]:
        print(__doc__)
    elif len(sys.argv) > 1:
        record(*sys.argv[1:])
    else:
        print("\n".join(lines()))


def record(name: str, *options: str) -> None:
    """Runs a benchmark and stores its output; nothing is stored if it fails."""
    import torch

    kind = "avx512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "avx2"
    changed = git("status", "--porcelain", "--", "modules", "datamodules", "tasks", "tests/*.py")
    commit = git("rev-parse", "--short=9", "HEAD") + ", with changes" * bool(changed)
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode:
        raise SystemExit(done.returncode)
    shown = ["FOLDER" if Path(option).exists() else option for option in options]
    line = " ".join(["python -m", f"tests.benchmarks.{name}", *shown])
    given = " ".join(f"{key}={os.environ[key]}" for key in LIMITS if key in os.environ)
    head = f"{f'{given} {line}'.strip()}\ncommit {commit}, {date.today()}\n\n"
    words = re.findall(r"[a-z0-9]+", " ".join(shown))
    file = RESULTS / kind / f"{'_'.join([name, *words])}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(head + done.stdout)


def git(*arguments: str) -> str:
    """What git answers."""
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def lines() -> Iterator[str]:
    """The table in Markdown: a row for each benchmark, a column for each kind of processor."""
    yield f"| command | {' | '.join(KINDS.values())} |"
    yield "|---" * (1 + len(KINDS)) + "|"
    for name in sorted({file.name for file in RESULTS.glob("*/*.txt")}):
        texts = {kind: RESULTS / kind / name for kind in KINDS}
        found = {kind: path.read_text() for kind, path in texts.items() if path.exists()}
        command = re.search(r"python -m .*", next(iter(found.values())))
        cells = [cell(found[kind], texts[kind]) if kind in found else "" for kind in KINDS]
        yield f"| `{command and command[0]}` | {' | '.join(cells)} |"


def cell(text: str, file: Path) -> str:
    """Our rows of a stored result, each recipe's share of Muon, or the file; and the commit."""
    parts = []
    for name, numbers, base in rows(text):
        head, median = next(iter(numbers.items()))  # such as "median images/s"
        unit = head.removeprefix("median ")
        if SHARE in numbers:
            parts.append(f"{name} {numbers[SHARE]} %")
        elif "tessera" in name:
            parts.append(f"{name} {median:,.4g} {unit}, {numbers['ratio']}x {base}")
    parts = parts or [f"see {file.parent.name}/{file.name}"]
    commit = re.search(r"^commit (.+), [\d-]+$", text, re.M)
    return f"{'; '.join(parts)} ({commit and commit[1]})"


def rows(text: str) -> Iterator[Row]:
    """All lines of all tables in a benchmark's output."""
    heads: list[str] = []
    base = ""
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if "ratio" in cells or SHARE in cells:
            heads, base = cells, ""
        elif heads and len(cells) == len(heads) + 1:
            numbers = dict(zip(heads, map(float, cells[1:]), strict=True))
            base = base or cells[0]
            yield Row(cells[0], numbers, base)


if __name__ == "__main__":
    main()
