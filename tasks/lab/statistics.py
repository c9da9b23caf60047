"""Means over seeds, and differences paired by seed with what can be concluded from them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tasks.tracking.report import DIGITS

CONFIDENCE = 0.95  # of all intervals
T_QUANTILES = (  # P(|T| <= t) = 0.95 of Student's T with 1, 2, ... degrees of freedom
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
NORMAL_QUANTILE = 1.9600  # the limit of many degrees of freedom


class Difference(NamedTuple):
    """The mean of paired differences, its interval, their number, and what follows."""

    mean: float
    low: float
    high: float
    pairs: int
    verdict: str


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; NaN where there are too few values."""
    mean = float(np.mean(values)) if values else math.nan
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return mean, deviation


def t_quantile(degrees: int) -> float:
    """The t with P(|T| <= t) = 0.95; above 30 degrees of freedom that of 30, at most 4.2 % more."""
    return T_QUANTILES[min(degrees, len(T_QUANTILES)) - 1]


def paired_difference(
    values: Mapping[int, float], base: Mapping[int, float], goal: str
) -> Difference:
    """The mean of `values - base` over the seeds that both have, with its t interval.

    The values are rounded to `DIGITS`: nothing within one unit of the last digit is decided.

    Args:
        values: A metric by seed.
        base: The same of what it is compared with.
        goal: "maximize" or "minimize" the metric.
    """
    seeds = sorted(values.keys() & base.keys())
    unit = last_digit([*values.values(), *base.values()])
    differences = [values[seed] - base[seed] for seed in seeds]
    differences = [0.0 if abs(one) < unit / 2 else one for one in differences]  # float noise
    mean, deviation = mean_and_deviation(differences)
    if len(seeds) < 2:
        verdict = "one seed decides nothing" if seeds else "no pair of runs has a result"
        return Difference(mean, math.nan, math.nan, len(seeds), verdict)
    half = t_quantile(len(seeds) - 1) * deviation / math.sqrt(len(seeds))
    low = mean - half
    high = mean + half
    if low == high == 0:
        verdict = "equal"
    elif low - unit <= 0 <= high + unit or high - low <= unit:
        verdict = f"inconclusive at {CONFIDENCE * 100:g} %"
    else:
        verdict = "better" if (mean > 0) == (goal == "maximize") else "worse"
    return Difference(mean, low, high, len(seeds), verdict)


def last_digit(values: list[float]) -> float:
    """One unit of the last significant digit of the largest value.

    >>> last_digit([-6.46765, 0.5])
    1e-05
    """
    largest = max(map(abs, values), default=0.0)
    return float(f"1e{math.floor(math.log10(largest)) + 1 - DIGITS}") if largest else 0.0
