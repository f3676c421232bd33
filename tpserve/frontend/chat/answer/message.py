"""The text of a chat's answer as the parts of a message: deltas of a stream, and all of them merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

Delta = dict[str, Any]


class MessageParser(Protocol):
    """Takes one answer's text in pieces. The deltas merged are the same however the text was cut."""

    def feed(self, text: str) -> list[Delta]:
        """What the text adds to the message and can be told now."""

    def end(self) -> list[Delta]:
        """What was held back, when no more text comes."""

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the message ended, where the text ended for `reason`."""


class PlainMessage:
    """All text is content."""

    def feed(self, text: str) -> list[Delta]:
        """The text."""
        return [{"content": text}] if text else []

    def end(self) -> list[Delta]:
        """Nothing is held back."""
        return []

    def finish_reason(self, reason: str | None) -> str | None:
        """The text's own."""
        return reason


def merged(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The message that a stream of these deltas makes. Without calls it has content, be it empty."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            _add_call(calls, call)
        for part in ("reasoning_content", "content"):
            if part in delta:
                message[part] = (message.get(part) or "") + delta[part]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _add_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    """A call's first delta has its id, type and name; those after it have more of its arguments."""
    if delta["index"] not in calls:
        function = {"arguments": "", **delta["function"]}
        calls[delta["index"]] = {"id": delta["id"], "type": delta["type"], "function": function}
    else:
        calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
