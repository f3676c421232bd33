"""The package's build compiles the native kernels, if there is a compiler; without them tpserve runs on plain torch."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):  # type: ignore[misc]
    """Runs before a wheel, or an editable installation, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; the wheel is then of this kind of machine."""
        build = runpy.run_path(str(Path(self.root, "tpserve/kernels/native/build.py")))
        if build["main"]() == 0:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
