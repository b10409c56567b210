"""Choose the processor's instructions for the tests, before torch and numpy load.

Most x86-64 processors with AVX2 then give the same bits. Processes that a test starts inherit the choice.
"""

from __future__ import annotations

import os
import sys

LOADED = sorted({"numpy", "torch"} & sys.modules.keys())
"""What was loaded before, and did not see the choice; none, or the digests may differ."""

os.environ |= {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
