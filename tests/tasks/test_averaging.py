"""The mean of the weights at the latest validations: what sees it, and that a resumed run goes on
with it.
"""

import contextlib
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from tasks.training.averaging import LastWeights
from tests.tasks.test_ema import Stop, Toy, Weights, fit, load, same, trained, weights_of

COUNT = 3


def close(a: Weights, b: Weights) -> bool:
    return all(torch.allclose(a[name], b[name], atol=1e-7) for name in a if name != "net.count")


def tied(weights: Weights) -> Weights:
    """With the second name of the weight that has two."""
    return {**weights, "net.b.weight": weights["net.a.weight"]}


def plain(steps: int) -> list[Weights]:
    """The weights at each validation of a run without averages, and those at its end."""
    task = Toy()
    fit(task, steps)
    return [*task.seen[1:], weights_of(task)]  # the first are seen by the sanity check


def mean(weights: list[Weights]) -> Weights:
    return {name: sum(one[name] / len(weights) for one in weights) for name in weights[0]}


def test_validation_and_what_follows_see_the_mean_of_the_latest() -> None:
    expected, task = plain(14), Toy()
    fit(task, 14, LastWeights(COUNT))
    seen = task.seen[1:]
    assert len(seen) == len(expected) - 1 > COUNT
    for number, found in enumerate(seen, 1):
        assert close(found, mean(expected[max(0, number - COUNT) : number])), number
    assert close(weights_of(task), mean(expected[-1 - COUNT : -1]))
    assert not close(weights_of(task), expected[-1])
    assert not task._state_dict_hooks


@pytest.mark.parametrize("stop_at", [2, 9, 17])
def test_a_resumed_run_ends_the_same(tmp_path: Path, stop_at: int) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with contextlib.suppress(Stop):
        fit(Toy(stop_at=stop_at), 14, LastWeights(COUNT), saver)
    saved = tmp_path / f"step={stop_at // 2}.ckpt"
    if stop_at == 2:  # before the first validation there is no average
        assert same(load(saved)["state_dict"], tied(trained(load(saved), "LastWeights")))
    task, straight = Toy(), Toy()
    fit(task, 14, LastWeights(COUNT), resume=saved)
    fit(straight, 14, LastWeights(COUNT))
    assert same(weights_of(task), weights_of(straight))


def test_the_best_checkpoint_holds_the_mean_and_the_state_the_trained_weights(
    tmp_path: Path,
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="x", every_n_epochs=1, save_on_train_epoch_end=False)
    task = Toy()
    fit(task, 4, LastWeights(COUNT), saver)
    checkpoint, expected = load(tmp_path / "x.ckpt"), plain(4)
    assert close(checkpoint["state_dict"], mean(expected[:-1]))
    assert close(tied(trained(checkpoint, "LastWeights")), expected[-2])
    assert len(checkpoint["callbacks"]["LastWeights"]["last"]) == len(expected) - 1


@pytest.mark.parametrize("count", [-1, 1])
def test_number_out_of_range(count: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        LastWeights(count)
