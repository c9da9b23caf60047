"""Images from a language model of pixels: sampled, or continued from their upper halves."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modules.config import require
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from tasks.igpt.architectures import PixelModel

BATCH = 64  # images that are generated at the same time
MAX_SAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class PixelSampling:
    """How pixels are sampled.

    Args:
        temperature: Number that scores are divided by before sampling; 0: always the most likely
            colour.
        top_k: Sample from the k most likely colours only (Fan 2018); null: from all.
        top_p: Sample from the fewest most likely colours that together have at least this
            probability (Holtzman 2020); null: from all.
        min_p: Sample from colours with at least this fraction of the most likely one's probability
            (Nguyen 2024); null or 0: from all.
        seed: Seed of the first image; that of each next image is 1 higher.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.config(1).require_sampling()

    def config(self, pixels: int) -> GenerationConfig:
        """Returns the options of `generate` for so many new pixels.

        Raises `ValueError` if one is out of range.
        """
        return GenerationConfig(
            max_new_tokens=pixels,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


def check_count(name: str, count: int, temperature: float) -> None:
    """Raises `ValueError` if there cannot be so many images, or all would be the same."""
    require(1 <= count <= MAX_SAMPLES, f"{name} is {count}; it must be from 1 to {MAX_SAMPLES:,}.")
    require(
        count == 1 or temperature > 0,
        f"{name} is {count}, but at temperature 0 all are the same image; raise temperature.",
    )


def sample_images(model: PixelModel, count: int, sampling: PixelSampling) -> Tensor:
    """Returns new images, uint8 (count, C, S, S)."""
    prompts = torch.empty(count, 0, dtype=torch.int64)
    return model.palette.decode(continue_pixels(model, prompts, sampling))


def complete_images(
    model: PixelModel, images: Tensor, count: int, sampling: PixelSampling
) -> Tensor:
    """Returns images whose lower halves are new: uint8 (B, C, S, S) -> (B, count, C, S, S).

    The upper half has S // 2 rows.
    """
    known = model.size // 2 * model.size
    upper = model.palette.encode(images)[:, :known].cpu()  # (B, M)
    tokens = continue_pixels(model, upper.repeat_interleave(count, 0), sampling)
    return model.palette.decode(tokens).unflatten(0, (len(images), count))


def continue_pixels(model: PixelModel, known: Tensor, sampling: PixelSampling) -> Tensor:
    """Returns the tokens of whole images that begin with tokens (B, M): (B, S * S), on the CPU."""
    start = torch.full((len(known), 1), model.start)
    config = sampling.config(model.size**2 - known.shape[1])
    banned = () if model.net.config.output_vocabulary else (model.start,)
    seeds = range(sampling.seed, sampling.seed + len(known))
    parts = []
    with torch.compiler.set_stance("force_eager"):
        for first in range(0, len(known), BATCH):
            rows = slice(first, first + BATCH)
            prompts: Sequence[list[int]] = torch.cat([start, known], 1)[rows].tolist()
            steps = generate(model.net, prompts, config, (), seeds[rows], banned)
            parts.append(torch.stack([tokens.cpu() for tokens in steps], 1))  # (rows, N - M)
    return torch.cat([known, torch.cat(parts)], 1)  # (B, N)
