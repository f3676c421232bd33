"""The part of an answer in which the model thinks, `<think>...</think>` at its beginning."""

from __future__ import annotations

from tpserve.frontend.chat.answer.deltas import Deltas
from tpserve.frontend.text.stops import StopPattern

OPEN, CLOSE = "<think>", "</think>"
_CLOSE = StopPattern(CLOSE)


def opens(parser: str, prompt: str, continued: str | None) -> bool:
    """Whether an answer to this prompt, a chat template's text, begins within reasoning.

    It does where the template has opened it. The models that `deepseek_r1` is for begin so by themselves, unless the
    template has closed it. An answer that goes on with a message is where that message, `continued`, stops.
    """
    if continued is not None:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    end = prompt.rstrip()
    return end.endswith(OPEN) or (parser == "deepseek_r1" and not end.endswith(CLOSE))


class ReasoningSplitter:
    """Sends reasoning to `out` and gives back what is not reasoning.

    An answer that does not begin within reasoning may still begin with its mark; one that does may repeat the mark.
    """

    def __init__(self, is_open: bool, out: Deltas):
        self._is_open = is_open
        self._out = out
        self._begins = True
        self._is_over = False
        self._held = ""

    def feed(self, text: str) -> str:
        """The next part of the answer; what of it is no reasoning, as far as that is known."""
        if self._begins:
            text = self._begin(text)
        if self._begins:  # still
            return ""
        if self._is_over or not self._is_open:
            return text
        return self._reason(text)

    def end(self) -> str:
        """No more comes; what was held back and is no reasoning."""
        if not self._is_open:
            return self._held
        if not self._is_over:
            self._out.reasoning(self._held)
        return ""

    def _begin(self, text: str) -> str:
        """Hold back what may be the opening mark, with white space before it."""
        self._held += text
        seen = self._held.lstrip()
        if OPEN.startswith(seen) and seen != OPEN:
            return ""
        self._begins = False
        text, self._held = self._held, ""
        if seen.startswith(OPEN):
            self._is_open = True
            return seen.removeprefix(OPEN)
        return text

    def _reason(self, text: str) -> str:
        text = self._held + text
        reasoning, mark, rest = text.partition(CLOSE)
        self._is_over = bool(mark)
        keep = 0 if mark else _suffix(text)
        self._held = text[len(text) - keep :]
        self._out.reasoning(reasoning[: len(reasoning) - keep])
        return rest


def _suffix(text: str) -> int:
    """The length of the longest end of the text that the closing mark begins with."""
    matched = 0
    for char in text[1 - len(CLOSE) :]:
        matched = _CLOSE.advance(matched, char)
    return matched
