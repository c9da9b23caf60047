"""Attention masks: who may attend to whom (True = attend), combined with `&`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modules.config import require
from modules.kernels.derivatives import in_transform


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to, and what is added to the scores.

    `padding`, `causal`, `prefix` and `documents` make masks, and `&` combines them.

    Args:
        allowed: Boolean, True = attend, (B or 1, H or 1, N or 1, M); None: everything is allowed.
        causal: Query i attends to keys 0..i only (N = M); a flag, because SDPA has a fast path for
            it; only if `allowed` is None.
        fully_masked: Boolean, broadcastable to (B, H, N, 1): queries with no key at all, whose
            attention is zero. None: there are none.
        bias: Added to the scores, broadcastable to (B, H, N, M); None: nothing. Set by `with_bias`.
        bias_and_mask: `bias` with -inf where attention is not allowed. Set by `with_bias`.
        num_outputs: Only the first `num_outputs` queries attend, in a stack only in its last block;
            None: all. Set by `with_outputs`.
    """

    allowed: Tensor | None = None
    causal: bool = False
    fully_masked: Tensor | None = None
    bias: Tensor | None = None
    bias_and_mask: Tensor | None = None
    num_outputs: int | None = None

    def __and__(self, other: "Mask") -> "Mask":
        """Allows what both allow, and adds both biases; one of them may have `num_outputs`."""
        counts = {self.num_outputs, other.num_outputs} - {None}
        require(len(counts) <= 1, f"Two masks have {counts} outputs; give one of them.")
        like = other.allowed if self.allowed is None else self.allowed
        if like is None:
            both = Mask(causal=self.causal or other.causal)
        else:
            both = _unmask_empty_rows(self._as_tensor(like) & other._as_tensor(like))
        both = both.with_bias(self.bias).with_bias(other.bias)
        return both.with_outputs(next(iter(counts), None))

    def _as_tensor(self, like: Tensor) -> Tensor:
        """`allowed` with the causal flag in it; `like` has the number of keys and the device."""
        allowed = like.new_ones(1) if self.allowed is None else self.allowed
        if self.fully_masked is not None:
            allowed = allowed & ~self.fully_masked
        if self.causal:
            allowed = allowed & _lower_triangle(like.shape[-1], like.shape[-1], like.device)
        return allowed

    def with_bias(self, bias: Tensor | None) -> "Mask":
        """The same mask that also adds `bias`, (1 or B, H, N, M), to the scores."""
        if bias is None:
            return self
        if self.bias is not None:
            bias = self.bias + bias
        merged = bias
        if self.allowed is not None:
            merged = merged.masked_fill(~self.allowed, float("-inf"))
        if self.causal:
            triangle = _lower_triangle(bias.shape[-2], bias.shape[-1], bias.device)
            merged = merged.masked_fill(~triangle, float("-inf"))
        return replace(self, bias=bias, bias_and_mask=merged)

    def select(self, rows: Tensor) -> "Mask":
        """The same for the rows of the batch at the indices `rows`, (R,)."""

        def pick(part: Tensor | None) -> Tensor | None:
            return part if part is None or len(part) == 1 else part[rows]

        return Mask(
            pick(self.allowed),
            self.causal,
            pick(self.fully_masked),
            pick(self.bias),
            pick(self.bias_and_mask),
            self.num_outputs,
        )

    def with_outputs(self, num_outputs: int | None) -> "Mask":
        """The same mask for the first `num_outputs` queries only; None: for all."""
        return replace(self, num_outputs=num_outputs)

    def first_queries(self, keys: int, device: torch.device) -> "Mask":
        """The rows of the queries that attend; `keys` is the number M of keys."""
        allowed = self.allowed
        if self.causal:
            allowed = _lower_triangle(keys, keys, device)[None, None]  # (1, 1, M, M)

        def cut(part: Tensor | None) -> Tensor | None:
            return part if part is None else part[..., : self.num_outputs, :]  # (..., outputs, M)

        return Mask(
            cut(allowed),
            False,
            cut(self.fully_masked),
            cut(self.bias),
            cut(self.bias_and_mask),
        )

    @property
    def has_learned_bias(self) -> bool:
        """Whether the bias needs a gradient."""
        return self.bias_and_mask is not None and self.bias_and_mask.requires_grad

    @property
    def is_causal(self) -> bool:
        """Whether SDPA has to add the triangle itself."""
        return self.causal and self.bias_and_mask is None

    def attn_mask(self, dtype: torch.dtype) -> Tensor | None:
        """What SDPA takes as `attn_mask`: boolean, or `dtype` if there is a bias."""
        return self.allowed if self.bias_and_mask is None else self.bias_and_mask.to(dtype)

    def add_to(self, scores: Tensor) -> Tensor:
        """Adds the bias, and -inf where not allowed, to scores (B, H, N, M) in place."""
        if self.bias_and_mask is not None:
            return scores.add_(self.bias_and_mask.to(scores.dtype))
        blocked = [] if self.allowed is None else [~self.allowed]
        if self.causal:
            blocked.append(~_lower_triangle(scores.shape[-2], scores.shape[-1], scores.device))
        for masked in blocked:  # adding is several times faster than filling
            zeros = torch.zeros_like(masked, dtype=scores.dtype)
            scores.add_(zeros.masked_fill_(masked, float("-inf")))
        return scores

    def zero_masked_rows(self, values: Tensor) -> Tensor:
        """Values (B, H, N, ...) with zeros for the queries that have no key."""
        if self.fully_masked is None:
            return values
        return values.masked_fill(self.fully_masked, 0.0)


NO_MASK = Mask()


def _lower_triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    """True on and below the diagonal that ends in the lower right corner: (N, M)."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _unmask_empty_rows(allowed: Tensor) -> Mask:
    """A mask whose rows without any key have all of them, so that softmax stays finite."""
    fully_masked = ~allowed.any(-1, keepdim=True)
    if is_cheap_to_read(allowed) and not fully_masked.any():
        return Mask(allowed)
    return Mask(allowed | fully_masked, fully_masked=fully_masked)


def is_cheap_to_read(tensor: Tensor) -> bool:
    """Whether Python can read values, without waiting for a device or breaking a compiled graph."""
    is_traced = torch.compiler.is_compiling() or in_transform()
    return tensor.device.type == "cpu" and not is_traced


def none_if_no_padding(padding_mask: Tensor | None) -> Tensor | None:
    """None if nothing is padding, where that is cheap to check: without a mask SDPA is faster."""
    if padding_mask is None or (is_cheap_to_read(padding_mask) and bool(padding_mask.all())):
        return None
    return padding_mask


def causal(queries: int, keys: int | None = None, device: torch.device | str = "cpu") -> Mask:
    """Causal mask; the N queries are the last N of M keys.

    `keys=None`: M = N. If M = N, a flag is set and no tensor is made.
    """
    if keys is None or keys == queries:
        return Mask(causal=True)
    return Mask(_lower_triangle(queries, keys, torch.device(device))[None, None])  # (1, 1, N, M)


def prefix(count: int, length: int, device: torch.device | str = "cpu") -> Mask:
    """Causal mask of `length` tokens that may also all attend to the first `count`."""
    allowed = _lower_triangle(length, length, torch.device(device))
    allowed[:, :count] = True
    return Mask(allowed[None, None])  # (1, 1, N, N)


def padding(padding_mask: Tensor | None) -> Mask:
    """Mask from a padding mask (B, M), False or 0 at padding; None: there is none."""
    padding_mask = none_if_no_padding(None if padding_mask is None else padding_mask.bool())
    if padding_mask is None:
        return NO_MASK
    return _unmask_empty_rows(padding_mask[:, None, None, :])  # (B, 1, 1, M)


def documents(ids: Tensor) -> Mask:
    """Block-diagonal mask of packed documents: tokens attend to those with the same id (B, N)."""
    same = ids[:, :, None] == ids[:, None, :]  # (B, N, N)
    return Mask(same[:, None])  # (B, 1, N, N); the diagonal is True: no row is fully masked
