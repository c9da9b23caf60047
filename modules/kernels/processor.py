"""The kernels that this processor is given.

They follow from what the processor is, not from a measurement: a resumed run computes the same
bits. `python -m tests.benchmarks.kernels` shows all choices beside each other.
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


# PyTorch's own float32 product is MKL's, which stays with AVX2 on AMD's processors: half the speed
# where they have AVX-512. Without it, MKL is faster (measured on AMD).
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
PREFERS_ONEDNN = HAS_ONEDNN and HAS_AVX512 and "AMD" in NAME
# Emulated, a product in bfloat16 takes 5 to 10 times as long as in float32.
HAS_BFLOAT16 = _has("avx512_bf16", "amx_bf16")
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
# Without it, products of int8 are added in pairs in int16, which must not overflow.
HAS_VNNI = _has("avx512_vnni")


def matmul_dtype(device: torch.device) -> torch.dtype:
    """The type of matrix products that need few digits: bfloat16 where it is native."""
    if device.type == "cpu":
        native = HAS_BFLOAT16
    elif device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = True
    return torch.bfloat16 if native else torch.float32


def kernels() -> dict[str, str]:
    """What computes what on this processor, for the record of a run."""
    return {
        "float32 products": "oneDNN" if PREFERS_ONEDNN else "PyTorch",
        "int8 products": "FBGEMM" if HAS_FBGEMM else "PyTorch, in float32",
        "Muon": str(matmul_dtype(torch.device("cpu"))).removeprefix("torch."),
    }
