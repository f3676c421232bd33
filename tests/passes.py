"""The forms of the passes over logits, by name: torch's, and each level of the native kernels that this machine has."""

from __future__ import annotations

from tpserve.kernels.native.library import NotBuilt, library
from tpserve.worker.native_passes import NativePasses
from tpserve.worker.passes import TORCH, Passes


def passes(form: str) -> Passes:
    """Raises NotBuilt."""
    return TORCH if form == "torch" else NativePasses(library(form))


def _is_here(form: str) -> bool:
    try:
        passes(form)
    except NotBuilt:
        return False
    return True


FORMS = [form for form in ("torch", "plain", "avx2", "avx512", "amx") if _is_here(form)]
BEST = FORMS[-1]
