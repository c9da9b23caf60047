"""Muon's share of a training step, for each recipe that uses it on CPUs.

    python -m tests.benchmarks.muon [--recipes lm/reference,vit/cifar10_cpu] [--steps 40]

The `fit` of each recipe in `configs/`, cut to some steps, in a process with two threads. Times are
medians; a step is the time from the end of one to the end of the next. Folders of data are read
from TESSERA_DATA.
"""

import importlib
import logging
import statistics
import tempfile
import time
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

from tests.benchmarks import _compare

# Options beside the config. `vit/cifar10_deit_cpu` is left out: it needs a trained teacher.
RECIPES = {
    "vit/cifar10_cpu": "",
    "vit/cifar10_swin_cpu": "",
    "mae/digits": "",
    "mae/cifar10_cpu": "",
    "bert/reviews": "",
    "bert/imdb_cpu": "",
    "lm/reference": "",
    "lm/shakespeare_char_cpu": "--data.path {}",
    "mlm/reference": "",
    "mlm/imdb_cpu": "",
    "igpt/digits": "",
    "igpt/cifar10_cpu": "",
    "seq2seq/dates": "",
    "seq2seq/prefix": "",
    "seq2seq/multi30k_cpu": "",
}
FIT = (
    "fit --config configs/{}.yaml --trainer.max_steps {} --trainer.max_epochs -1"
    " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0"
)


def prepare(recipe: str, options: Namespace) -> _compare.Round:
    """Rounds that run the recipe."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from tasks.cli.main import main
    from tasks.training.muon import Muon
    from tasks.training.optim import MuonAdamW

    logging.disable()
    app = importlib.import_module(f"tasks.{recipe.partition('/')[0]}.__main__").APP
    line = FIT.format(recipe, options.steps)
    if extra := RECIPES[recipe]:
        line += " " + extra.format(_compare.data_folder("tinyshakespeare"))
    starts: list[float] = []  # of Muon's steps
    muon: list[float] = []
    ends: list[float] = []

    def before(optimizer: Any, *_: object) -> None:
        if isinstance(optimizer, Muon):
            starts.append(time.perf_counter())

    def after(optimizer: Any, *_: object) -> None:
        if isinstance(optimizer, Muon):
            muon.append(time.perf_counter() - starts[-1])
        elif isinstance(optimizer, MuonAdamW):
            ends.append(time.perf_counter())

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)

    def run() -> dict[str, float]:
        ends.clear()
        muon.clear()
        said = StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(said), redirect_stderr(said):
            status = main(app, [*line.split(), "--run_dir", f"{folder}/run"])
        if status:
            raise SystemExit(f"{line} ended with {status}:\n{said.getvalue()}")
        steps = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        return {"step": statistics.median(steps), "muon": statistics.median(muon)}

    return run


def main() -> None:
    """Prints the table."""
    parser = _compare.arguments(__doc__, 1)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--steps", type=int, default=40)
    competitors = {recipe: partial(prepare, recipe) for recipe in RECIPES}
    options = _compare.parse(parser, competitors)
    print(_compare.machine())
    print(f"{'':<28}{'step ms':>10}{'Muon ms':>10}{'share %':>10}", flush=True)
    for recipe in options.recipes.split(","):
        found = _compare.interleave([recipe], options.rounds)[recipe]
        step, muon = (
            1000 * statistics.median(one[name] for one in found.rounds) for name in ("step", "muon")
        )
        print(f"{recipe:<28}{step:>10.1f}{muon:>10.1f}{100 * muon / step:>10.1f}", flush=True)


if __name__ == "__main__":
    main()
