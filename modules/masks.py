"""Attention masks: who may attend to whom (True = attend), built once per forward and combined with `&`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, and what is added to the scores.

    Args:
        allowed: Boolean, broadcastable to (B, H, N, M), True = attend; None: everything is allowed.
        causal: Query i sees keys 0..i only (N = M); kept as a flag, because SDPA has a fast path for it.
        dead: Boolean (B, 1, N or 1, 1): queries with no key at all; their result is zeros. None: there are none.
        bias: Added to the scores, broadcastable to (B, H, N, M); None: nothing. Set by `with_bias`.
        merged: `bias` with -inf where attention is not allowed. Set by `with_bias`.
    """

    allowed: Tensor | None = None
    causal: bool = False
    dead: Tensor | None = None
    bias: Tensor | None = None
    merged: Tensor | None = None

    def __and__(self, other: "Mask") -> "Mask":
        """A mask that allows what both allow and adds what either adds."""
        if self.allowed is None and other.allowed is None:
            both = Mask(causal=self.causal or other.causal)
        else:
            one, two = self._drawn(other), other._drawn(self)
            allowed = two if one is None else one if two is None else one & two
            both = _without_dead_rows(allowed) if allowed is not None else Mask()
        return both.with_bias(self.bias).with_bias(other.bias)

    def _drawn(self, other: "Mask") -> Tensor | None:
        """`allowed` with the causal flag drawn in and dead rows all False."""
        allowed = (
            self.allowed if self.dead is None or self.allowed is None else self.allowed & ~self.dead
        )
        like = allowed if allowed is not None else other.allowed
        if not self.causal or like is None:
            return allowed
        triangle = _triangle(like.shape[-1], like.shape[-1], like.device)
        return triangle if allowed is None else allowed & triangle

    def with_bias(self, bias: Tensor | None) -> "Mask":
        """The same mask that also adds `bias`, (1 or B, H, N, M), to the scores."""
        if bias is None:
            return self
        bias = bias if self.bias is None else self.bias + bias
        merged = bias if self.allowed is None else bias.masked_fill(~self.allowed, float("-inf"))
        if self.causal:
            merged = merged.masked_fill(
                ~_triangle(bias.shape[-2], bias.shape[-1], bias.device), float("-inf")
            )
        return replace(self, bias=bias, merged=merged)

    def select(self, rows: Tensor) -> "Mask":
        """The same for some rows of the batch, (R,) of B."""
        parts = [
            part if part is None or len(part) == 1 else part[rows]  # (R, H or 1, N or 1, M)
            for part in (self.allowed, self.dead, self.bias, self.merged)
        ]
        return Mask(parts[0], self.causal, *parts[1:])

    @property
    def is_causal(self) -> bool:
        """Whether SDPA has to draw the triangle itself."""
        return self.causal and self.merged is None

    def tensor(self, dtype: torch.dtype) -> Tensor | None:
        """What SDPA takes as `attn_mask`: boolean, or `dtype` where there is a bias."""
        return self.allowed if self.merged is None else self.merged.to(dtype)

    def add_to(self, scores: Tensor) -> Tensor:
        """Adds the bias, and -inf where attention is not allowed, to scores (B, H, N, M) in place."""
        if self.merged is not None:
            return scores.add_(self.merged.to(scores.dtype))
        closed = [] if self.allowed is None else [~self.allowed]
        if self.causal:
            closed.append(~_triangle(scores.shape[-2], scores.shape[-1], scores.device))
        for where in closed:  # adding is several times faster than filling, forward and backward
            scores.add_(
                torch.zeros_like(where, dtype=scores.dtype).masked_fill_(where, float("-inf"))
            )
        return scores

    def silence(self, values: Tensor) -> Tensor:
        """Values (B, H, N, ...) with zeros for the queries that see nothing."""
        return values if self.dead is None else values.masked_fill(self.dead, 0.0)


def _triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    """True on and below the diagonal that ends in the lower right corner: (N, M)."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _without_dead_rows(allowed: Tensor) -> Mask:
    """Lets rows without any key see everything, so that softmax stays finite, and remembers them as dead."""
    dead = ~allowed.any(-1, keepdim=True)
    if allowed.device.type == "cpu" and not torch.compiler.is_compiling() and not dead.any():
        return Mask(allowed)  # elsewhere this check would wait for the device
    return Mask(allowed | dead, dead=dead)


def is_full(keep: Tensor) -> bool:
    """Whether nothing is padding, where looking costs nothing: without a mask, attention takes a faster path."""
    return keep.device.type == "cpu" and not torch.compiler.is_compiling() and bool(keep.all())


def causal(queries: int, keys: int | None = None, device: torch.device | str = "cpu") -> Mask:
    """Each query sees itself and what is before it.

    Args:
        queries: Number N of queries.
        keys: Number M of keys, of which the queries are the last N; None: N.
        device: Where the mask lives, if it needs a tensor.
    """
    if keys is None or keys == queries:
        return Mask(causal=True)
    return Mask(_triangle(queries, keys, torch.device(device))[None, None])  # (1, 1, N, M)


def prefix(count: int, tokens: int, device: torch.device | str = "cpu") -> Mask:
    """Of so many tokens, each sees itself, what is before it, and the first `count`."""
    allowed = _triangle(tokens, tokens, torch.device(device))
    allowed[:, :count] = True
    return Mask(allowed[None, None])  # (1, 1, N, N)


def padding(keep: Tensor) -> Mask:
    """Nobody sees padding.

    Args:
        keep: Boolean (B, M), True where a real token stands.
    """
    return _without_dead_rows(keep[:, None, None, :])  # (B, 1, 1, M)


def documents(ids: Tensor) -> Mask:
    """Tokens see their own document only, where several are packed into one sequence (block-diagonal).

    Args:
        ids: Integers (B, N), the same number for tokens of the same document.
    """
    return Mask(
        (ids[:, :, None] == ids[:, None, :])[:, None]
    )  # (B, 1, N, N): each token sees itself, none is dead


def pairs(allowed: Tensor) -> Mask:
    """Any boolean mask, True = attend.

    Args:
        allowed: (N, M), (B, N, M) or (B, H, N, M).
    """
    if allowed.dim() == 3:
        allowed = allowed[:, None]  # (B, 1, N, M)
    return _without_dead_rows(allowed)
