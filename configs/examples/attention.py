"""Attention from scratch, formula by formula, compared with the block of the library.

    python -m configs.examples.attention

All formulas are from "Attention Is All You Need" (Vaswani 2017). This script computes each step as
the paper writes it; `modules/attention.py` computes the same with PyTorch's fast kernels.
"""

import math

import torch
from torch import Tensor

from modules.attention import MultiHeadAttention
from modules.masks import Mask

SAMPLES = 2  # B
TOKENS = 5  # N
WIDTH = 12  # E, size of each token's vector
HEADS = 3  # H
HEAD_DIM = WIDTH // HEADS  # D


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 1: softmax(Q K^T / sqrt(D)) V.

    Args:
        q: Queries (..., N, D).
        k: Keys (..., M, D).
        v: Values (..., M, D).
        allowed: Boolean (N, M), True where query n may attend to key m.

    Returns:
        Weighted means of the values, (..., N, D), and the weights, (..., N, M).
    """
    # How well each query fits each key. Without the root, scores would grow like sqrt(D), and the
    # softmax would give nearly all weight to one key (section 3.2.1).
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (..., N, M)
    # Section 3.2.3: a score of minus infinity has a weight of zero.
    scores = scores.masked_fill(~allowed, -math.inf)
    # Softmax: positive weights, which sum to 1 over the keys. (`torch.softmax` first subtracts the
    # largest score, so that exp cannot overflow.)
    exponentials = scores.exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    return weights @ v, weights


def multi_head(x: Tensor, block: MultiHeadAttention, allowed: Tensor) -> Tensor:
    """Section 3.2.2: Concat(head_1, ..., head_H) W^O.

    Here head_i = attend(x W_i^Q, x W_i^K, x W_i^V): (B, N, E) -> (B, N, D).
    The weights are those of `block`, which holds W^Q, W^K and W^V of all heads in one matrix, and
    biases, which the paper leaves out.
    """
    w_q, w_k, w_v = block.qkv.weight.chunk(3)  # (E, E) each; a linear layer computes x W^T + b
    b_q, b_k, b_v = block.qkv.bias.chunk(3)  # (E,) each
    heads = []
    for head in range(HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)  # those of this head
        q = x @ w_q[rows].T + b_q[rows]  # (B, N, D)
        k = x @ w_k[rows].T + b_k[rows]  # (B, N, D)
        v = x @ w_v[rows].T + b_v[rows]  # (B, N, D)
        out, _ = attend(q, k, v, allowed)
        heads.append(out)
    joined = torch.cat(heads, -1)  # H times (B, N, D) -> (B, N, E)
    return joined @ block.output.weight.T + block.output.bias


def main() -> None:
    torch.manual_seed(0)
    everything = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    causal = everything.tril()  # token n sees tokens 0 to n

    print("1. Why sqrt(D): the standard deviation of q . k, and of q . k / sqrt(D)")
    for size in (4, 64, 1024):
        q, k = torch.randn(2, 10_000, size)
        dots = (q * k).sum(-1)
        print(f"   D = {size:>4}: {dots.std():6.2f}  {(dots / math.sqrt(size)).std():.2f}")

    print("2. One head with a causal mask: weights of each token (rows) for each token (columns)")
    x = torch.randn(TOKENS, HEAD_DIM)
    out, weights = attend(x, x, x, causal)
    for row in weights.tolist():
        print("   " + "  ".join(f"{weight:.2f}" for weight in row))
    assert torch.equal(out[0], x[0]), "the first token sees only itself"
    changed = x.clone()  # other keys and values for the last token
    changed[-1] += 1
    assert torch.equal(attend(x, changed, changed, causal)[0][:-1], out[:-1])
    print("   A change of the last token changes no earlier one.")

    print("3. Multi-head attention: the largest difference from modules.attention")
    block = MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    for name, allowed, mask in (("all", everything, Mask()), ("causal", causal, Mask(causal=True))):
        ours = multi_head(x, block, allowed)
        theirs = block(x, mask=mask)
        torch.testing.assert_close(ours, theirs)
        print(f"   {name:>6}: {(ours - theirs).abs().max():.1e}")
    print("They are the same.")


if __name__ == "__main__":
    main()
