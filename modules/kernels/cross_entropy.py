"""Cross entropy over a large vocabulary, without holding all logits.

`torch.nn.functional.linear_cross_entropy` is not used: it saves as much memory, but takes
more than twice the time on CPUs, and it gives neither the number of correct predictions nor the
softmax's denominator, for the z-loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.kernels.linear import linear, linear_to_many, takes_onednn

IGNORE_INDEX = -100  # the target that does not count, as in `F.cross_entropy`
LOGITS_PER_CHUNK = 2**23
GPU_LOGITS_PER_CHUNK = 2**27  # GPUs need larger matmuls to be busy


def plain_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The formula of the loss; `chunked_cross_entropy` computes the same without all logits.

    Each target has the loss -log p(target), where p = softmax(logits). Label smoothing s replaces
    it by -(1 - s) log p(target) - s mean(log p) (Szegedy 2016). The z-loss adds
    z log(sum(exp(logits)))^2, which keeps the softmax's denominator near 1 (Chowdhery 2022).

    Args:
        logits: (S, V).
        targets: Token ids (S,), or -100 for what does not count.
        smoothing: s above.
        z_loss: z above.

    Returns:
        Mean loss (); 0 if nothing counts.
    """
    counted = targets != IGNORE_INDEX  # (S,)
    logits = logits[counted]  # (S, V) -> (S', V)
    log_denominator = logits.logsumexp(1, keepdim=True)  # (S', 1)
    log_probs = logits - log_denominator  # (S', V)
    target_log_probs = log_probs.gather(1, targets[counted, None])  # (S', 1)
    losses = -(1 - smoothing) * target_log_probs - smoothing * log_probs.mean(1, keepdim=True)
    losses = losses + z_loss * log_denominator.square()
    return losses.sum() / counted.sum().clamp(min=1)


def align_rows(rows: int) -> int:
    """`rows` rounded down to a multiple of 8, for matmuls on GPUs; 1 to 7 as they are, 0 to 1."""
    return max(1, rows // 8 * 8 or rows)


def cast(x: Tensor) -> Tensor:
    """`x` in the dtype to which autocast would cast the input of a matmul."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def is_largest(logits: Tensor, target: Tensor) -> Tensor:
    """Whether each row's logit (C, V) of the target (C, 1) is the largest: boolean, (C,).

    In 16 bits, where equal logits are common, and on GPUs, the first of them counts as the largest.
    In 32 bits or more on CPUs each of them does, but none if all logits of a row are equal.
    """
    if logits.device.type != "cpu" or logits.dtype.itemsize < 4:
        return logits.argmax(1) == target[:, 0]
    largest = logits.amax(1)  # several times faster than argmax on CPUs
    not_constant = largest > logits.amin(1)  # those of zero weights predict nothing
    return (logits.gather(1, target)[:, 0] == largest) & not_constant


def logits_grad(
    log_probs: Tensor,
    target: Tensor,
    smoothing: float,
    z_factor: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the sum of the losses with respect to the logits (C, V) of a chunk of C rows.

    It works in place and scatters, which saves memory, but which the compiler does not fuse.

    Args:
        log_probs: Overwritten, (C, V).
        target: (C, 1).
        smoothing: Probability mass of label smoothing.
        z_factor: 1 + 2 z log(sum of exp(logits)), (C,); None: there is no z-loss.
        dtype: Of the result.
    """
    if torch.compiler.is_compiling():
        return fusible_logits_grad(log_probs, target, smoothing, z_factor).to(dtype)
    if smoothing or z_factor is not None:
        grad = log_probs.exp_()
        if z_factor is not None:
            grad *= z_factor[:, None]
        grad -= smoothing / log_probs.shape[1]
        grad.scatter_add_(1, target, grad.new_full((), smoothing - 1).expand_as(target))
        return grad.to(dtype)
    target_grad = log_probs.gather(1, target).expm1()  # (C, 1)
    out = log_probs if log_probs.dtype == dtype else log_probs.new_empty(0, dtype=dtype)
    grad = torch.exp(log_probs, out=out)  # one pass, the cast included
    return grad.scatter_(1, target, target_grad.to(dtype))


def fusible_logits_grad(
    log_probs: Tensor, target: Tensor, smoothing: float, z_factor: Tensor | None
) -> Tensor:
    """As `logits_grad`, by operators that the compiler computes in one pass."""
    count = log_probs.shape[1]
    is_target = torch.arange(count, device=target.device) == target  # (C, V)
    probs = log_probs.exp()  # (C, V)
    if z_factor is not None:
        probs = probs * z_factor[:, None]
    return probs - smoothing / count - (1 - smoothing) * is_target


ChunkLoss = Callable[
    ..., tuple[Tensor, Tensor, Tensor | None]
]  # `chunk_loss`, or its compiled form


class LossOptions(NamedTuple):
    """Arguments of the loss that have no gradient; as in `chunked_cross_entropy`.

    `with_grad`: whether the caller had gradients enabled; inside `Function.forward` they never are.
    """

    targets: Tensor
    smoothing: float
    z_loss: float
    with_grad: bool
    loss_of_chunk: ChunkLoss


def chunk_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    z_loss: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a chunk of C rows, in float32 at least.

    Args:
        x: (C, E), in the dtype of `weight`.
        weight: (V, E).
        bias: (V,) or None.
        targets: (C,).
        smoothing: As in `chunked_cross_entropy`.
        z_loss: As there.
        with_grad: Whether to compute the gradient.

    Returns:
        Sum of the losses (), number of correct predictions (), and the gradient of the sum with
        respect to the logits (C, V) in the dtype of `x`; undefined in rows that do not count.
    """
    valid = targets != IGNORE_INDEX  # (C,)
    target = targets.masked_fill(~valid, 0)[:, None]  # (C, 1)
    logits = linear_to_many(x, weight, bias)  # (C, V)
    target_logits = logits.gather(1, target)[:, 0] if z_loss else None  # (C,)
    correct = (is_largest(logits, target) & valid).sum()
    log_probs = logits.log_softmax(1, dtype=torch.promote_types(x.dtype, torch.float32))  # (C, V)
    del logits
    target_log_probs = log_probs.gather(1, target)[:, 0]  # (C,)
    losses = (smoothing - 1) * target_log_probs  # (C,)
    if smoothing:
        losses -= smoothing * log_probs.mean(1)
    z_factor = None
    if target_logits is not None:
        log_denominator = target_logits - target_log_probs  # (C,)
        losses += z_loss * log_denominator.square()
        z_factor = 1 + 2 * z_loss * log_denominator  # (C,)
    loss = losses.masked_fill(~valid, 0.0).sum()
    if not with_grad:
        return loss, correct, None
    return loss, correct, logits_grad(log_probs, target, smoothing, z_factor, weight.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, max_temporary: int) -> None:
    """Adds the product of a (M, K) and b (K, N) to `total` (M, N) in place.

    oneDNN, and processors other than NVIDIA's for products of 16 bits that are summed in 32, need a
    temporary result of up to `max_temporary` values.
    """
    if a.dtype == total.dtype and not takes_onednn(a, b.T):
        torch.addmm(total, a, b, out=total)  # counters of FLOPs do not know `addmm_`
        return
    if a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    count = align_rows(max_temporary // total.shape[1])
    for start in range(0, len(total), count):
        rows = slice(start, start + count)
        total[rows] += linear(a[rows], b.T)  # (M', N)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of x W^T + b with its gradients, chunk by chunk: logits are never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions
    ) -> tuple[Tensor, Tensor]:
        """(S, E), (V, E), (V,), targets (S,) -> mean loss and number of correct predictions."""
        targets, smoothing, z_loss, with_grad, loss_of_chunk = options
        chunk_logits = LOGITS_PER_CHUNK if x.device.type == "cpu" else GPU_LOGITS_PER_CHUNK
        chunk_rows = align_rows(chunk_logits // len(weight))
        dtype = torch.promote_types(x.dtype, torch.float32)
        matrix = cast(weight)  # once, not for each chunk
        counted = targets != IGNORE_INDEX  # (S,)
        mean_factor = counted.sum().clamp(min=1).to(dtype).reciprocal()
        loss = x.new_zeros((), dtype=dtype)
        correct = targets.new_zeros(())
        needs = [with_grad and flag for flag in ctx.needs_input_grad[:3]]
        needs_x, needs_weight, needs_bias = needs
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = weight.new_zeros(len(weight), dtype=dtype) if needs_bias else None
        for start in range(0, len(x), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            chunk_x = cast(x[chunk])  # (C, E)
            chunk_sum, chunk_correct, grad = loss_of_chunk(
                chunk_x, matrix, bias, targets[chunk], smoothing, z_loss, any(needs)
            )
            loss += chunk_sum
            correct += chunk_correct
            if grad is None:
                continue
            valid = counted[chunk, None]  # (C, 1)
            if grad_x is not None:
                grad_x[chunk] = linear(grad, matrix.T) * valid
            if grad_weight is not None:
                # (V, C), (C, E) -> (V, E); a temporary part takes a quarter of a chunk of logits
                add_product(grad_weight, grad.T, chunk_x * valid, chunk_logits // 4)
            if grad_bias is not None:
                grad_bias += valid[:, 0].to(matrix.dtype) @ grad
        ctx.save_for_backward(mean_factor, grad_x, grad_weight, grad_bias)
        ctx.mark_non_differentiable(correct)
        return loss * mean_factor, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the gradients that the forward pass has made."""
        mean_factor, *sums = ctx.saved_tensors
        scale = grads[0] * mean_factor
        return *(None if one is None else one * scale for one in sums), None


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_of_chunk: ChunkLoss = chunk_loss,
) -> tuple[Tensor, Tensor]:
    """`plain_cross_entropy(x W^T + b, targets)` in the memory of one chunk of logits.

    Args:
        x: Vectors (..., E).
        weight: Output embedding (V, E).
        bias: (V,) or None.
        targets: Token ids (...), or -100 for what does not count; if nothing counts, the loss
            is 0. Any other number raises an error on CPUs and fails an assertion on GPUs.
        smoothing: Probability mass of the target spread evenly over all tokens (Szegedy 2016).
        z_loss: Weight of the mean of log(sum of exp(logits))^2, which is added (Chowdhery 2022).
        loss_of_chunk: `chunk_loss`, or its compiled form.

    Returns:
        Mean loss, in float32 or float64, and the number of correct predictions (the target has the
        largest logit).
    """
    rows = x.flatten(0, -2)  # (..., E) -> (S, E)
    options = LossOptions(
        targets.flatten(), smoothing, z_loss, torch.is_grad_enabled(), loss_of_chunk
    )
    return ChunkedCrossEntropy.apply(rows, weight, bias, options)
