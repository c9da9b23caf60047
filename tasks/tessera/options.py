"""Keyword arguments of methods that generate, for type checkers and editors."""

from typing_extensions import TypedDict

from modules.generation.sampling import StoppingName


class SamplingOptions(TypedDict, total=False):
    """Those of `tasks.igpt.sampling.PixelSampling`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int


class GenerationOptions(SamplingOptions, total=False):
    """Those of `modules.generation.sampling.GenerationConfig`."""

    max_new_tokens: int
    repetition_penalty: float
    beams: int
    length_penalty: float
    early_stopping: StoppingName


class TranslationOptions(GenerationOptions, total=False):
    """Those of `GenerationConfig`, and texts at a time."""

    batch_size: int
