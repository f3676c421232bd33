"""Values of numpy and torch, known by their `tolist`, as Python's own."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """An array or tensor as a list, one of their numbers as int, float or bool, also inside lists, tuples and dicts."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
