"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann 2022, eq. 2), fitted."""

import math
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from datamodules.utils.files import replacing
from tasks.lab.results import Result
from tasks.lab.statistics import CONFIDENCE, NORMAL_QUANTILE, t_quantile
from tasks.lab.tables import markdown
from tasks.tracking.report import write_png

# Of the Huber loss of the logarithms. Hoffmann (2022, section 3.3) has 1e-3 and 400 runs: residuals
# above it count by their size, not their square, which tells less from a dozen runs.
DELTA = 1e-2
STEPS = 100  # of Levenberg and Marquardt
SAMPLES = 200  # of the bootstrap
CONSTANTS = 5  # of the law
MIN_RUNS = 7  # that it is fitted to
MIN_VALUES = 3  # of N and of D: a constant and a power of each cannot be told apart from two


class Law(NamedTuple):
    """E, A, alpha, B and beta of the law; each a number or a tensor of the same shape."""

    e: Any
    a: Any
    alpha: Any
    b: Any
    beta: Any

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """L(N, D)."""
        return self.e + self.a * parameters**-self.alpha + self.b * tokens**-self.beta

    def best_size(self, flops: Any) -> Any:
        """The N with the lowest loss for 6 N D = `flops` (Hoffmann 2022, eq. 4)."""
        total = self.alpha + self.beta
        ratio = torch.as_tensor(self.alpha * self.a, dtype=torch.float64) / (self.beta * self.b)
        return ratio ** (1 / total) * (flops / 6) ** (self.beta / total)

    def has_best_size(self, flops: Any) -> bool:
        """Whether the loss falls with both N and D, so that some size is the best."""
        best = torch.as_tensor(self.best_size(flops))
        is_number = bool(best.isfinite().all() and (best > 0).all())
        return is_number and self.alpha > 0 and self.beta > 0


def residuals(theta: Tensor, logs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the law less the log of the loss, and its derivatives.

    Args:
        theta: log E, log A, alpha, log B and beta, (S, 5) of S fits.
        logs: log N and log D of R runs, (R, 2).
        target: Log of the losses, (S, R).

    Returns:
        (S, R) and (S, R, 5).
    """
    e, a, alpha, b, beta = theta[:, :, None].unbind(1)  # (S, 1) each
    size, tokens = logs.unbind(1)  # (R,) each
    terms = torch.stack((e + 0 * size, a - alpha * size, b - beta * tokens))  # (3, S, R)
    weights = terms.softmax(0)
    slopes = (
        weights[0],
        weights[1],
        -weights[1] * size,
        weights[2],
        -weights[2] * tokens,
    )
    return terms.logsumexp(0) - target, torch.stack(slopes, -1)


def huber(residual: Tensor) -> Tensor:
    """The sum of Huber's losses of (S, R) -> (S,)."""
    size = residual.abs()
    return torch.where(size <= DELTA, size.square() / 2, DELTA * (size - DELTA / 2)).sum(-1)


def minimise(theta: Tensor, logs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Levenberg and Marquardt with Huber's weights, of S fits at once: (S, 5) and losses (S,)."""
    damping = torch.full((len(theta), 1, 1), 1e-2, dtype=torch.float64)
    found, slopes = residuals(theta, logs, target)
    loss = huber(found)
    for _ in range(STEPS):
        weights = (DELTA / found.abs().clamp(min=1e-12)).clamp(max=1.0)  # (S, R)
        weighted = slopes * weights[..., None]
        curvature = weighted.mT @ slopes  # (S, 5, 5)
        gradient = weighted.mT @ found[..., None]  # (S, 5, 1)
        scale = curvature.diagonal(dim1=1, dim2=2).clamp(min=1e-12)
        step = torch.linalg.solve(curvature + damping * torch.diag_embed(scale), gradient)
        new = theta - step.squeeze(-1).clamp(-2.0, 2.0)
        new_found, new_slopes = residuals(new, logs, target)
        new_loss = huber(new_found)
        better = new_loss < loss
        theta = torch.where(better[:, None], new, theta)
        found = torch.where(better[:, None], new_found, found)
        slopes = torch.where(better[:, None, None], new_slopes, slopes)
        gain = (loss - new_loss).clamp(min=0) / loss.clamp(min=1e-300)
        loss = torch.where(better, new_loss, loss)
        if better.any() and float(gain.nan_to_num().max()) < 1e-9:
            break
        damping = torch.where(better[:, None, None], damping / 3, damping * 4).clamp(1e-9, 1e9)
    return theta, loss


def starts() -> Tensor:
    """Starting points (S, 5), a coarser grid than that of Hoffmann (2022)."""
    grid = product(
        (-1.0, 0.5), (0.0, 5.0, 12.0), (0.2, 0.6), (0.0, 5.0, 12.0), (0.2, 0.6),
    )  # fmt: skip
    return torch.tensor(list(grid), dtype=torch.float64)


def law_of(theta: Tensor) -> Law:
    """(..., 5) -> a law of tensors (...)."""
    e, a, alpha, b, beta = theta.unbind(-1)
    return Law(e.exp(), a.exp(), alpha, b.exp(), beta)


def fit_law(parameters: Tensor, tokens: Tensor, losses: Tensor) -> tuple[Law, Law]:
    """The law of R runs, (R,) each, and laws of `SAMPLES` bootstrap samples, tensors (SAMPLES,).

    The bootstrap draws residuals, not runs: of a dozen runs, a sample without the largest would
    say little about the exponents. A fit of five constants makes residuals too small, by
    sqrt(R / (R - 5)), and their spread is estimated from few, as in Student's t; they are
    enlarged by both. Of 100 planted laws each, with 15 and 19 runs and noise of 0.3 % and 1 %, the
    intervals of 95 % held 89 to 99 % of the true constants.
    """
    logs = torch.stack((parameters, tokens), 1).double().log()  # (R, 2)
    target = losses.double().log()
    grid = starts()
    theta, loss = minimise(grid, logs, target.expand(len(grid), -1))
    best = theta[loss.nan_to_num(math.inf).argmin()]
    found, _ = residuals(best[None], logs, target[None])
    runs = len(target)
    degrees = max(1, runs - CONSTANTS)
    enlarged = found[0] * math.sqrt(runs / degrees) * t_quantile(degrees) / NORMAL_QUANTILE
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(runs, (SAMPLES, runs), generator=generator)
    resampled = (target + found[0]) - enlarged[drawn]  # (SAMPLES, R)
    samples, _ = minimise(best.expand(SAMPLES, -1).clone(), logs, resampled)
    return Law(*map(float, law_of(best))), law_of(samples)


def interval(values: Tensor) -> tuple[float, float]:
    """The middle 95 % of bootstrap values."""
    edge = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(values, torch.tensor([edge, 1 - edge], dtype=values.dtype)).tolist()
    return low, high


def scaling_report(folder: Path, results: list[Result], evaluation: str = "") -> str:
    """The fitted law as Markdown, with a picture; the largest setting is held out of the fit.

    N are all parameters, D the tokens of all steps, and the largest setting is that of most FLOPs,
    with all of its seeds.

    Args:
        folder: For the picture, `scaling.png` or `scaling_EVALUATION.png`.
        results: Of all runs; those without a loss are left out.
        evaluation: Whose loss is fitted.
    """
    measured = [one for one in results if math.isfinite(one.values[evaluation])]
    largest = max(measured, key=lambda one: one.flops, default=None)
    held_out = [one for one in measured if largest and one.run.values == largest.run.values]
    fitted = [one for one in measured if one not in held_out]
    title = "\n## The scaling law\n\n"
    if evaluation:
        title = f"\n## The scaling law of {evaluation}\n\n"
    if len(fitted) < MIN_RUNS:
        return (
            f"{title}It is fitted to at least {MIN_RUNS} runs, without the largest; "
            f"{len(fitted)} are finished.\n"
        )
    runs = columns(fitted, evaluation)
    sizes, counts = (len(column.unique()) for column in runs[:2])
    if min(sizes, counts) < MIN_VALUES:
        return (
            f"{title}It is fitted to at least {MIN_VALUES} sizes N and {MIN_VALUES} numbers of "
            f"tokens D, without the largest run; there are {sizes} and {counts}.\n"
        )
    if min(one.values[evaluation] for one in measured) <= 0:
        return f"{title}It needs losses above 0, and not all are.\n"
    law, samples = fit_law(*runs)
    rows = [*zip(("E", "A", "alpha", "B", "beta"), law, samples, strict=True)]
    tests = columns(held_out, evaluation)
    best = "These runs show no best N: an exponent is not above 0, or A or B is 0."
    if law.has_best_size(6 * tests[0] * tests[1]):
        best = "The best N grows as C^a with C = 6 N D, the FLOPs."
        exponent = law.beta / (law.alpha + law.beta)
        rows.append(("exponent a", exponent, samples.beta / (samples.alpha + samples.beta)))
    table = []
    for name, value, sampled in rows:
        low, high = interval(sampled)
        table.append([name, f"{value:.4g}", f"{low:.4g} to {high:.4g}"])
    size, tokens, loss = (float(column.mean()) for column in tests)
    predicted = float(law.loss(size, tokens))
    picture = f"scaling_{evaluation}.png" if evaluation else "scaling.png"
    with replacing(folder / picture) as partial:
        write_png(draw_law(law, runs, tests), partial)
    error = abs(predicted / loss - 1)
    return f"""{title}L(N, D) = E + A / N^alpha + B / D^beta of N parameters and D tokens, fitted to
{len(fitted)} runs. {best}

{markdown(["constant", "value", "95 % interval"], table)}
The largest model, {size:,.0f} parameters and {tokens:,.0f} tokens, is held out of the fit:
predicted {predicted:.4f}, measured {loss:.4f}, an error of {error:.1%}.

![the law]({picture})
"""


def columns(results: list[Result], evaluation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, tokens and losses of R runs, (R,) each."""
    rows = [(one.run.parameters, one.tokens, one.values[evaluation]) for one in results]
    parameters, tokens, losses = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return parameters, tokens, losses


def draw_law(
    law: Law, fitted: tuple[Tensor, Tensor, Tensor], held_out: tuple[Tensor, Tensor, Tensor]
) -> Any:
    """Losses over 6 N D, a curve for each size, and the loss of the best size."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axis = figure.subplots()
    sizes, tokens, losses = fitted
    grid = spaced(tokens.min() / 2, held_out[1].max() * 2)
    for size in sizes.unique().tolist():
        chosen = sizes == size
        (line,) = axis.plot(6 * size * grid, law.loss(size, grid), linewidth=0.8)
        label = f"{int(size):,} parameters"
        flops = 6 * size * tokens[chosen]
        axis.plot(flops, losses[chosen], "o", color=line.get_color(), label=label)
    compute = spaced((6 * sizes * tokens).min(), (6 * held_out[0] * held_out[1]).max())
    if law.has_best_size(compute):
        best = law.best_size(compute)
        axis.plot(compute, law.loss(best, compute / (6 * best)), "k--", label="compute-optimal")
    flops = 6 * held_out[0] * held_out[1]
    axis.plot(flops, held_out[2], "*", markersize=14, color="black", label="held out")
    axis.set(xscale="log", xlabel="FLOPs, 6 N D", ylabel="loss")
    axis.legend(fontsize=7)
    return figure


def spaced(low: Tensor, high: Tensor) -> Tensor:
    """50 numbers from low to high, equally spaced on a logarithmic axis."""
    return torch.logspace(float(low.log10()), float(high.log10()), 50, dtype=torch.float64)
