"""Keeps what schemathesis makes up small: what is tried are the bodies, not how long an answer can be."""

from __future__ import annotations

from typing import Any

import schemathesis

MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}


def map_body(context: Any, body: Any) -> Any:
    """A body whose valid limits are at most those; wrong ones stay as they are. Without a limit there would be none."""
    if not isinstance(body, dict):
        return body
    small = {name: most for name, most in MOST.items() if isinstance(body.get(name), int) and body[name] > most}
    limited = {"max_tokens": 4} if body.get("max_tokens", body.get("max_completion_tokens")) is None else {}
    return body | small | limited


schemathesis.hook(map_body)
