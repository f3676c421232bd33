"""Keeps what schemathesis makes up small: what is tried are the bodies, not how long an answer can be."""

from __future__ import annotations

from typing import Any

import schemathesis

MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Lower the body's valid limits to those; wrong ones stay as they are, and where there is none, one is set."""
    if not isinstance(case.body, dict):
        return
    lower = {name: most for name, most in MOST.items() if isinstance(case.body.get(name), int) and case.body[name] > most}
    case.body = case.body | lower
    if case.body.get("max_tokens") is None and case.body.get("max_completion_tokens") is None:
        case.body["max_tokens"] = 4


schemathesis.hook(before_call)
