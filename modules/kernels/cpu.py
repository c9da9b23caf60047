"""Which kernels are used on this CPU.

They follow from what the CPU is, not from a measurement: a run that is resumed on the same kind of
machine computes the same bits. `python -m tests.benchmarks.kernels` times most of them.
"""

import platform
from typing import Any

import torch

# What PyTorch knows about the processor; nothing where it cannot tell.
_FEATURES: dict[str, Any] = dict(getattr(torch.cpu, "get_capabilities", dict)())
NAME = str(_FEATURES.get("cpu_name", "unknown processor"))
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def _has(*names: str) -> bool:
    return HAS_AVX512 and any(_FEATURES.get(name) for name in names)


# On x86 only; oneDNN's kernels for ARM have not been measured.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
# MKL, which computes PyTorch's own float32 products, does not use AVX-512 on AMD's CPUs: it takes
# up to twice as long there. On CPUs without AVX-512, MKL is faster than oneDNN.
PREFERS_ONEDNN = HAS_ONEDNN and HAS_AVX512 and "AMD" in NAME
# AMD's CPUs before Zen 5 compute only half of AVX-512's width at a time: oneDNN saves less there.
# Zen 5 is AMD's first with AVX-512 and AVX-VNNI.
HAS_FULL_WIDTH = _has("avx_vnni", "avx512_vp2intersect")
# For the gradient of a weight, oneDNN copies both factors. If the weight's shorter side is below
# this, that takes longer than it saves.
MIN_SIDE_GRADIENT = 0 if HAS_FULL_WIDTH else 384
# Where it is emulated, a product in bfloat16 takes 5 to 10 times as long as in float32.
HAS_BFLOAT16 = _has("avx512_bf16", "amx_bf16")
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
    torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32"
)
# CPUs without VNNI instructions add pairs of int8 products in int16, which must not overflow.
HAS_VNNI = _has("avx512_vnni")
MIN_SIDE_BFLOAT16 = 128  # casts and calls of smaller products take longer than bfloat16 saves


def matmul_dtype(device: torch.device, side: int) -> torch.dtype:
    """The type of matrix products that need few digits: bfloat16 where it is native and faster.

    `side` is the shorter one of the matrices.
    """
    if device.type == "cpu":
        native = HAS_BFLOAT16 and side >= MIN_SIDE_BFLOAT16
    elif device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = True
    return torch.bfloat16 if native else torch.float32


def kernels() -> dict[str, str]:
    """Names of the kernels that are used on this CPU."""
    gradients = "oneDNN" if PREFERS_ONEDNN else "PyTorch"
    if PREFERS_ONEDNN and MIN_SIDE_GRADIENT:
        gradients += f" from a side of {MIN_SIDE_GRADIENT} on"
    return {
        "float32 products": "oneDNN" if PREFERS_ONEDNN else "PyTorch",
        "gradients of weights": gradients,
        "int8 products": "FBGEMM" if HAS_FBGEMM else "PyTorch, in float32",
        "orthogonalization": f"bfloat16 from a side of {MIN_SIDE_BFLOAT16} on"
        if HAS_BFLOAT16
        else "float32",
    }
