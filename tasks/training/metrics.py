"""Metrics of torchmetrics whose results at the edges are others here."""

import warnings

import torch
from torch import Tensor
from torchmetrics import R2Score
from torchmetrics.classification import MultilabelAveragePrecision


class MeanAveragePrecision(MultilabelAveragePrecision):
    """Of a label that no sample has it is 0, without a warning: report.csv shows its support."""

    def compute(self) -> Tensor:  # type: ignore[override]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No positive samples found in target")
            return super().compute()


class R2(R2Score):
    """Coefficient of determination, 1 - mean of squared errors / variance; NaN without a variance.

    `mean` and `std` of the training numbers scale both numbers, which does not change it: sums of
    squares of large numbers would be inexact. torchmetrics takes small sums for 0.
    """

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean = mean
        self.std = std

    def update(self, preds: Tensor, target: Tensor) -> None:
        kind = torch.float32 if preds.device.type == "mps" else torch.float64
        # (B, 1) -> (B,): else the states change their shapes, and ranks with and without samples
        # would wait for each other.
        numbers = (preds.flatten().to(kind), target.flatten().to(kind))
        super().update(*((values - self.mean) / self.std for values in numbers))

    def compute(self) -> Tensor:
        squares = self.sum_squared_error - self.sum_error.square() / self.total
        rounding = self.total * torch.finfo(squares.dtype).eps * self.sum_squared_error
        if self.total < 2 or squares <= rounding:
            return torch.tensor(torch.nan)
        return (1 - self.residual / squares).float()
