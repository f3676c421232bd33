"""What the parsers of an answer find, as OpenAI's deltas."""

from __future__ import annotations

import secrets

from tpserve.frontend.chat.answer.message import Delta


class Deltas:
    """Collects the parts of one message in their order.

    Line ends around reasoning and before a call belong to the form that models write in, so they are in no part: those
    at the end of a part are held back until more of it follows.
    """

    def __init__(self, may_call: bool, one_call: bool):
        self._may_call = may_call
        self._one_call = one_call  # those after the first are not told
        self._parts: list[tuple[str, int, list[str]]] = []  # (kind, number of the call, its text in pieces)
        self._kind = ""  # of the last text
        self._lines = ""  # line ends held back, of that kind
        self._begins = False  # the last text has nothing but line ends, which are left out
        self.calls = 0

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        self._text("reasoning_content", text)

    def content(self, text: str) -> None:
        """More content."""
        self._text("content", text)

    def call(self, name: str) -> None:
        """A call begins."""
        self._kind, self._lines, self._begins = "", "", False
        self.calls += 1
        if self._is_told:
            self._add("call", name)

    def arguments(self, text: str) -> None:
        """More arguments of that call."""
        if self._is_told:
            self._add("arguments", text)

    def end(self) -> None:
        """No more comes. Content that is not beside calls keeps its last line ends."""
        if self._kind == "content" and not self.calls:
            self._add("content", self._lines)
        self._lines = ""

    def take(self) -> list[Delta]:
        """What is new."""
        parts, self._parts = self._parts, []
        return [_delta(kind, index, "".join(pieces)) for kind, index, pieces in parts]

    @property
    def _is_told(self) -> bool:
        return self.calls == 1 or not self._one_call

    def _text(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._begins = "reasoning_content" in (kind, self._kind)
            self._kind, self._lines = kind, ""
        if self._begins:
            text = text.lstrip("\n")
            self._begins = not text
        shown = text.rstrip("\n") if self._may_call or kind == "reasoning_content" else text
        if shown:
            self._add(kind, self._lines + shown)
            self._lines = ""
        self._lines += text[len(shown) :]

    def _add(self, kind: str, text: str) -> None:
        part = (kind, self.calls - 1)
        if self._parts and self._parts[-1][:2] == part:
            self._parts[-1][2].append(text)
        elif text:
            self._parts.append((*part, [text]))


def _delta(kind: str, index: int, text: str) -> Delta:
    match kind:
        case "call":
            head = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            return {"tool_calls": [{"index": index, **head, "function": {"name": text, "arguments": ""}}]}
        case "arguments":
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {kind: text}
