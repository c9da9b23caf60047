"""Records the attention weights of a forward pass."""

from dataclasses import dataclass, field

from torch import Tensor

from modules.attention import AttentionCache
from modules.cache import BlockCache, StackCache


class WeightRecorder(AttentionCache):
    """Appends attention weights, (B, H, N, M), to a list."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.on_weights = weights.append


@dataclass(frozen=True)
class AttentionRecord(StackCache):
    """Collects attention weights, one (B, H, N, M) tensor per block, as the `cache` of a model."""

    self_attn: list[Tensor] = field(default_factory=list)
    cross_attn: list[Tensor] = field(default_factory=list)

    def block(self, index: int) -> BlockCache:
        """The part of block `index`."""
        return BlockCache(WeightRecorder(self.self_attn), WeightRecorder(self.cross_attn))
