"""Which kernels compute: chosen once, before any process starts, and for all ranks. Torch-free."""

from __future__ import annotations

from typing import Literal

from tpserve.deployment import Native
from tpserve.kernels.native.library import MAX_HEAD_DIM, Library, NotBuilt, library
from tpserve.model.spec import ModelSpec
from tpserve.settings import Settings, UserError


def choose(settings: Settings, device: Literal["cpu", "cuda"], spec: ModelSpec) -> tuple[Native | None, str | None]:
    """(The native kernels, or None where torch computes; what the user should know of it).

    Raises UserError if native kernels are wanted that cannot be used.
    """
    if device != "cpu":
        ignored = settings.kernels == "native"
        return None, "--kernels native has no effect on a GPU: torch computes there" if ignored else None
    if settings.kernels == "torch":
        return None, None
    try:
        return _usable(spec), None
    except NotBuilt as error:
        if settings.kernels == "native":
            raise UserError(f"--kernels native: {error}; or give --kernels torch, which is slower") from error
        return None, f"plain torch does the work, which is slower: {error}"


def chosen(native: Native | None) -> Library | None:
    """What was chosen, as a rank loads it. Raises NotBuilt if it is not what it was."""
    if native is None:
        return None
    lib = library()
    if _described(lib) != native:
        raise NotBuilt(f"the native kernels were exchanged since the launch: {_described(lib)}, not {native}")
    return lib


def _usable(spec: ModelSpec) -> Native:
    if spec.head_dim > MAX_HEAD_DIM:
        raise NotBuilt(f"native attention is for heads of up to {MAX_HEAD_DIM} dimensions, not {spec.head_dim}")
    return _described(library())


def _described(lib: Library) -> Native:
    return Native(level=lib.name, sources=lib.sources)
