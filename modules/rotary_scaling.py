"""Lower frequencies of rotary positions, for longer sequences than in the first training."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from modules.config import check_choice, require

ScalingName = Literal["linear", "llama3"]


@dataclass(frozen=True)
class RotaryScaling:
    """Lower frequencies of rotary positions, for longer sequences than in the first training.

    Args:
        kind: "linear": all frequencies are divided by `factor` (Chen 2023); "llama3": only the low
            ones, those between in part (code of Llama 3.1, 2024).
        factor: What frequencies are divided by, at least 1.
        low_freq_factor: "llama3": frequencies with wavelengths above `original_max_length` / this
            are divided by `factor`.
        high_freq_factor: "llama3": those with wavelengths below `original_max_length` / this stay.
        original_max_length: "llama3": context of the first training, in tokens.
    """

    kind: ScalingName = "linear"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        check_choice("kind of rotary scaling", self.kind, get_args(ScalingName))
        require(self.factor >= 1, f"The factor of rotary scaling is {self.factor}; give 1 or more.")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor {self.low_freq_factor} of rotary scaling must be above 0 and below "
            f"high_freq_factor {self.high_freq_factor}.",
        )
        require(
            self.original_max_length >= 1,
            f"original_max_length of rotary scaling is {self.original_max_length}; give 1 or more.",
        )

    def scale(self, frequency: Tensor) -> Tensor:
        """Angles per position, lowered; keeps the shape."""
        if self.kind == "linear":
            return frequency / self.factor
        wavelength = 2 * math.pi / frequency
        turns = self.original_max_length / wavelength  # within the first context
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return (1 - kept) * frequency / self.factor + kept * frequency
