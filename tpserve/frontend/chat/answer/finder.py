"""Telling an answer's calls from its content, character by character, so that it matters nowhere how the text is cut."""

from __future__ import annotations

from collections.abc import Container, Generator

from tpserve.frontend.chat.answer.deltas import Deltas
from tpserve.frontend.chat.answer.forms import PYTHON_TAG, CallForm
from tpserve.frontend.chat.answer.reader import CallReader, Malformed
from tpserve.frontend.text.stops import StopPattern

_SPACE = " \t\n\r"
_BETWEEN = _SPACE + ",;]"  # of calls without marks around them

_Steps = Generator[None, str, str]  # takes characters, returns the first that is the next part's


class CallFinder:
    """Sends calls and content to `out` as soon as it is certain which of them a text is.

    Text is held back while it may still be a call: from its mark, or from the answer's beginning where the form has no
    mark, until its name is known and its arguments begin. What turns out to be no call is content, mark and all. In a
    call that has begun, arguments end with their last bracket, or where they cannot go on; content follows.
    """

    def __init__(self, form: CallForm, names: Container[str], out: Deltas):
        self._names = names
        self._out = out
        self._held: list[str] = []  # characters
        self._is_frame = False  # what is held comes behind a call, and may belong to the form
        self._mark = form.opening
        self._in_content = False  # where only the mark's first character is of interest
        self._steps = self._marked(form) if form.opening else self._bare()
        next(self._steps)

    def feed(self, text: str) -> None:
        """The next part of the answer."""
        if self._in_content and not (self._mark and self._mark[0] in text):
            self._out.content(text)  # at once, for most text is content
            return
        for char in text:
            self._steps.send(char)

    def end(self) -> None:
        """No more comes."""
        if not self._is_frame:
            self._release()

    def _marked(self, form: CallForm) -> Generator[None, str, None]:
        """Calls between marks, content around them."""
        opening, closing = StopPattern(form.opening), StopPattern(form.closing)
        char = yield
        while True:
            char = yield from self._up_to_call(opening, closing, char)
            char = yield from self._call(char)

    def _up_to_call(self, opening: StopPattern, closing: StopPattern, char: str) -> _Steps:
        """Content, and the mark of the next call. What only closes the last one is dropped."""
        opened = closed = kept = 0  # characters of the marks that have come
        while True:
            self._held.append(char)
            opened = opening.advance(opened, char)
            closed = closing.advance(closed, char) if self._is_frame else 0
            before, kept = kept, max(opened, closed)
            self._is_frame = self._is_frame and (kept > before or (char in _SPACE and not before))
            if not self._is_frame:
                self._release(kept)
            self._in_content = not self._held
            if opened == len(opening.text):
                self._held = [*opening.text]
                self._is_frame = False
                return (yield)
            if closed == len(closing.text):
                self._held.clear()
                self._is_frame = False
                kept = 0
            char = yield

    def _bare(self) -> Generator[None, str, None]:
        """Calls from the answer's beginning on, one after the other, be it in a list; then content."""
        char = yield from self._beginning()
        if char == "[":
            self._held.append(char)
            char = yield from self._skip(_SPACE, (yield))
        while char == "{":
            char = yield from self._call(char)
            if not self._is_frame:
                break
            char = yield from self._skip(_BETWEEN, char)
        self._release()
        self._in_content = True
        while True:
            self._out.content(char)
            char = yield

    def _beginning(self) -> _Steps:
        """White space and Llama's tag, if the answer begins with them."""
        seen = ""
        while True:
            char = yield
            seen = (seen + char).lstrip()
            if not PYTHON_TAG.startswith(seen):
                return char
            self._held.append(char)
            if seen == PYTHON_TAG:
                seen = ""

    def _skip(self, chars: str, char: str) -> _Steps:
        while char in chars:
            self._held.append(char)
            char = yield
        return char

    def _call(self, char: str) -> _Steps:
        """A call, or as much of it as is there. What is held before it becomes content if there is none."""
        reader = CallReader(self._names)
        self._is_frame = False
        while not reader.is_complete:
            try:
                reader.feed(char)
            except Malformed:
                break
            self._held.append(char)
            if reader.name is not None:
                self._held.clear()
                if not self._is_frame:
                    self._out.call(reader.name)
                self._is_frame = True
                self._out.arguments(reader.take())
            char = yield
        if not self._is_frame:
            self._release()
        return char

    def _release(self, keep: int = 0) -> None:
        """What is held is content, but for the last `keep` characters."""
        count = len(self._held) - keep
        if count:
            self._out.content("".join(self._held[:count]))
            del self._held[:count]
