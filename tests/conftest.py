"""What all tests share: a seed, no network, no accounts, a cache of their own, real data sets."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true", MPLBACKEND="Agg")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads leave the cores to other workers
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:  # share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
pytest.register_assert_rewrite("tests.helpers")  # failed assertions of helpers show their values
gc.disable()  # until all tests are imported


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases that `plain_every` leaves out as slow.

    Cases that `exhaustive_except` leaves out are marked as slow and as exhaustive.
    """
    seen: Counter[str] = Counter()
    for item in sorted(items, key=lambda item: item.nodeid):
        for mark in item.iter_markers("plain_every"):
            step, *also = mark.args
            name, _, case = item.nodeid.partition("[")
            if seen[name] % step and not any(text in case for text in also):
                item.add_marker("slow")
            seen[name] += 1
        for mark in item.iter_markers("exhaustive_except"):
            case = item.nodeid.partition("[")[2]
            if not any(text in case for text in mark.args):
                item.add_marker("slow")
                item.add_marker("exhaustive")


def pytest_collection_finish() -> None:
    """Garbage collections need not look through what the tests imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def same_start() -> None:
    """The same random numbers in whatever order the tests run."""
    import torch

    torch.default_generator.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """The same random numbers in fixtures of several tests, whichever test is the first."""
    import torch

    if fixturedef.scope != "function":
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenizers and tables of tokens are kept for these tests only."""
    os.environ["TESSERA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def end_of_process() -> Iterator[None]:
    """Ends the W&B run of a test, and restores the environment and the number of threads."""
    import torch

    before = dict(os.environ)
    threads = torch.get_num_threads()  # sums are rounded differently with another number
    yield
    torch.set_num_threads(threads)
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real data sets, from `TESSERA_DATA`."""
    folder = os.environ.get("TESSERA_DATA")
    if not folder:
        pytest.skip("TESSERA_DATA is not set: it names the folder of real data sets")
    return Path(folder).resolve()
