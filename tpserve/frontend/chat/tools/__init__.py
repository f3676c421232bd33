"""Tools that a chat may call: what a request says of them, how a model writes its calls, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatTools:
    """A request's tools, as OpenAI has them, and which of them are to be called."""

    tools: tuple[Mapping[str, Any], ...]
    choice: str  # "none", "auto", "required", or the name of the one to be called
    is_named: bool
    parallel: bool  # whether several calls may be made
