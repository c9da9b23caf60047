"""Intervals and verdicts against SciPy, and scaling laws that are known."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tasks.lab.plan import Plan, Run
from tasks.lab.results import Result, differences
from tasks.lab.scaling import Law, fit_law, interval, scaling_report
from tasks.lab.statistics import paired_difference, t_quantile
from tasks.lab.tables import format_number

HOFFMANN = Law(1.69, 406.4, 0.34, 410.7, 0.28)  # 2022, equation 10
SIZES = torch.tensor([1e5, 3e5, 1e6, 3e6, 1e7]).double().repeat_interleave(4)
TOKENS = torch.tensor([1e6, 1e7, 1e8, 1e9]).double().repeat(5)


def test_quantiles_are_scipys() -> None:
    for degrees in range(1, 31):
        assert math.isclose(t_quantile(degrees), stats.t.ppf(0.975, degrees), rel_tol=1e-4)
    assert stats.t.ppf(0.975, 300) <= t_quantile(300) < 1.04 * stats.t.ppf(0.975, 300)


@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.0])
def test_paired_differences_are_scipys(shift: float) -> None:
    random = np.random.default_rng(0)
    base = random.normal(size=6)
    values = base + shift + 0.3 * random.normal(size=6)
    found = paired_difference(
        dict(enumerate(values)), {**dict(enumerate(base)), 9: 1.0}, "minimize"
    )
    test = stats.ttest_rel(values, base)
    low, high = test.confidence_interval(0.95)
    assert np.allclose((found.low, found.high), (low, high), rtol=1e-4)
    decided = test.pvalue < 0.05
    assert decided == (shift != 0) and found.pairs == 6
    if decided:
        assert found.verdict == ("better" if shift < 0 else "worse")
    else:
        assert found.verdict.startswith("inconclusive")


def test_one_seed_decides_nothing() -> None:
    one = paired_difference({0: 1.0}, {0: 0.0}, "maximize")
    assert one.mean == 1 and math.isnan(one.low) and math.isnan(one.high)
    none = paired_difference({0: 1.0}, {1: 0.0}, "maximize")
    equal = paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, "maximize")
    assert none.pairs == 0
    assert not {one.verdict, none.verdict} & {"better", "worse", "equal"}
    assert len({one.verdict, none.verdict, equal.verdict}) == 3


@pytest.mark.parametrize(
    ("values", "base", "mean"),
    [
        ([6.46765, 6.52341], [6.46766, 6.52342], -1e-5),  # both by one unit of the last digit
        ([0.51, 0.52, 0.53], [0.5, 0.51, 0.52], 0.01),  # no deviation but float noise
        ([0.1 + 0.2, 2.5], [0.3, 2.5], 0.0),
    ],
)
def test_differences_within_the_rounding_decide_nothing(
    values: list[float], base: list[float], mean: float
) -> None:
    found = paired_difference(dict(enumerate(values)), dict(enumerate(base)), "minimize")
    assert found.verdict not in ("better", "worse")
    assert format_number(found.mean) == format_number(mean)


def test_differences_of_the_means_over_the_other_axis() -> None:
    axes = {"a": ["x", "y"], "b": [1, 2, 3]}
    lab = {"axes": axes, "evaluations": {}, "goal": "minimize", "compare": {"a": "x", "b": 2}}
    random = np.random.default_rng(0)
    values = random.normal(size=(2, 3, 5))  # (a, b, seeds)
    points = {
        (a, b): dict(enumerate(values[i, j]))
        for i, a in enumerate("xy")
        for j, b in enumerate(axes["b"])
    }
    del points["y", 3][4]  # of a run that is not finished
    found = differences(Plan(lab, []), points)
    assert [point for point, *_ in found] == [
        *(("y", 1), ("y", 2), ("y", 3), ("y", "all")),
        *(("x", 1), ("x", 3), ("y", 1), ("y", 3), ("all", 1), ("all", 3)),
    ]
    for point, one, base in (
        (("y", "all"), values[1].mean(0)[:4], values[0].mean(0)[:4]),
        (("all", 1), values[:, 0].mean(0), values[:, 1].mean(0)),
        (("all", 3), values[:, 2].mean(0)[:4], values[:, 1].mean(0)[:4]),
    ):
        outcome = {row[0]: row[2] for row in found}[point]
        interval = stats.ttest_rel(one, base).confidence_interval(0.95)
        assert outcome.pairs == len(one) and math.isclose(outcome.mean, (one - base).mean())
        assert np.allclose((outcome.low, outcome.high), interval, rtol=1e-4)
    lab = {**lab, "axes": {"a": ["x", "y"]}, "compare": {"a": "x"}}
    alone = {(a,): {0: 1.0, 1: 2.0} for a in "xy"}
    assert [point for point, *_ in differences(Plan(lab, []), alone)] == [("y",)]


def planted(law: Law, noise: float, seed: int) -> torch.Tensor:
    """Losses (20,) of `SIZES` and `TOKENS` with relative noise."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(SIZES), generator=generator, dtype=torch.float64)
    return law.loss(SIZES, TOKENS) * (1 + noise * drawn)


def test_planted_exponents_are_recovered() -> None:
    found, samples = fit_law(SIZES, TOKENS, planted(HOFFMANN, 0.003, seed=0))
    for name in ("alpha", "beta"):
        low, high = interval(getattr(samples, name))
        assert low < getattr(HOFFMANN, name) < high and high - low < 0.06
        assert abs(getattr(found, name) / getattr(HOFFMANN, name) - 1) < 0.05
    assert abs(found.loss(5e7, 1e9) / HOFFMANN.loss(5e7, 1e9) - 1) < 0.02
    best = HOFFMANN.best_size(1e18)
    near = [HOFFMANN.loss(n, 1e18 / (6 * n)) for n in (best * 0.9, best, best * 1.1)]
    assert near[1] == min(near)


@pytest.mark.slow
def test_intervals_hold_the_planted_exponents_as_often_as_they_say() -> None:
    held = []
    for seed in range(60):
        _, samples = fit_law(SIZES, TOKENS, planted(HOFFMANN, 0.01, seed))
        for name in ("alpha", "beta"):
            low, high = interval(getattr(samples, name))
            held.append(low <= getattr(HOFFMANN, name) <= high)
    assert 0.9 <= np.mean(held) <= 0.99


def grid_results(sizes: tuple[float, ...], counts: tuple[int, ...], name: str) -> list[Result]:
    """Results of runs of these numbers of parameters and steps, with two seeds each."""
    law = Law(1.7, 60.0, 0.34, 200.0, 0.29)
    results = []
    for size in sizes:
        for steps in counts:
            is_largest = size * steps == max(sizes) * max(counts)
            for seed in (0, 1):
                loss = float(law.loss(torch.tensor(size), torch.tensor(steps * 1e3)))
                loss *= 2 if is_largest else 1  # the fit must not see it
                values = {"size": size, "steps": steps}
                run = Run("r", "lm", values, seed, [], {}, steps, 1e3, 6e3 * size, int(size))
                results.append(Result(run, "finished", "", {}, steps, {name: loss}))
    return results


@pytest.mark.parametrize("evaluation", ["", "long"])
def test_the_largest_model_is_held_out_with_all_its_seeds(tmp_path: Path, evaluation: str) -> None:
    results = grid_results((1e4, 3e4, 1e5, 3e5), (100, 300, 1000, 3000), evaluation)
    text = scaling_report(tmp_path, results, evaluation)
    assert "an error of 50.0%" in text
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"]


@pytest.mark.parametrize(
    ("sizes", "counts", "found"),
    [
        ((1e4, 3e4), (100, 300, 1000, 3000), "there are 2 and 4"),
        ((1e4, 3e4, 1e5, 3e5), (100, 300), "there are 4 and 2"),
    ],
)
def test_a_law_that_the_runs_do_not_determine_is_not_fitted(
    tmp_path: Path, sizes: tuple[float, ...], counts: tuple[int, ...], found: str
) -> None:
    text = scaling_report(tmp_path, grid_results(sizes, counts, ""))
    assert found in text and "interval" not in text and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("power", [0.0, 0.3], ids=["equal losses", "losses that grow with N"])
def test_a_law_without_a_best_size_says_so(tmp_path: Path, power: float) -> None:
    results = [
        replace(one, values={"": 2.0 * one.run.parameters**power})
        for one in grid_results((1e4, 3e4, 1e5, 3e5), (100, 300, 1000, 3000), "")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as those of complex numbers
        text = scaling_report(tmp_path, results)
    assert "no best N" in text and "exponent a" not in text and "an error of" in text
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"]
