"""tpserve: tensor-parallel serving of a language model by N worker processes. Importing it does not import torch.

`LLM` is the offline API; it and what goes with it are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpserve.llm import LLM
    from tpserve.offline.host import EngineDead
    from tpserve.offline.outputs import CompletionOutput, RequestOutput
    from tpserve.offline.params import SamplingParams
    from tpserve.settings import UserError

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineDead", "RequestOutput", "SamplingParams", "UserError"]

_HOMES = {
    "LLM": "tpserve.llm",
    "EngineDead": "tpserve.offline.host",
    "CompletionOutput": "tpserve.offline.outputs",
    "RequestOutput": "tpserve.offline.outputs",
    "SamplingParams": "tpserve.offline.params",
    "UserError": "tpserve.settings",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
