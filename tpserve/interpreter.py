"""Fresh interpreters for children: the command, and an environment in which they find this tpserve."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments``, by the interpreter that runs this."""
    # -P: a folder that happens to hold torch.py or tpserve/ must not be imported from.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's. Where its tpserve comes from by its own `sys.path`, children find it by PYTHONPATH."""
    root = str(Path(__file__).parents[1])
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
