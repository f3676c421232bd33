"""The parser of one answer: its reasoning first, then calls and content."""

from __future__ import annotations

from dataclasses import dataclass

from tpserve.frontend.chat.answer.deltas import Deltas
from tpserve.frontend.chat.answer.finder import CallFinder
from tpserve.frontend.chat.answer.forms import CallForm
from tpserve.frontend.chat.answer.message import Delta
from tpserve.frontend.chat.answer.reasoning import ReasoningSplitter


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may have."""

    form: CallForm
    names: frozenset[str]  # of functions
    parallel: bool  # whether there may be several
    are_named: bool  # whether the request says which one is made
    are_all: bool  # whether an answer is nothing but calls, as a grammar sees to


class AnswerParser:
    """A MessageParser. `begins_reasoning` is None where answers have no reasoning, `calls` where they may have none."""

    def __init__(self, begins_reasoning: bool | None, calls: Calls | None):
        self._calls = calls
        self._deltas = Deltas(may_call=calls is not None, one_call=calls is not None and not calls.parallel)
        self._splitter = None if begins_reasoning is None else ReasoningSplitter(begins_reasoning, self._deltas)
        self._finder = None if calls is None else CallFinder(calls.form, calls.names, self._deltas)

    def feed(self, text: str) -> list[Delta]:
        """What the text adds to the message and can be told now."""
        self._after_reasoning(text if self._splitter is None else self._splitter.feed(text))
        return self._deltas.take()

    def end(self) -> list[Delta]:
        """What was held back, when no more text comes."""
        if self._splitter is not None:
            self._after_reasoning(self._splitter.end())
        if self._finder is not None and self._calls is not None and not self._calls.are_all:
            self._finder.end()  # else what is held is the beginning of a call that was cut
        self._deltas.end()
        return self._deltas.take()

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's: an answer that made calls has stopped for them, but where the request named the call."""
        is_for_calls = self._deltas.calls and not (self._calls is not None and self._calls.are_named)
        return "tool_calls" if reason == "stop" and is_for_calls else reason

    def _after_reasoning(self, text: str) -> None:
        if self._finder is not None:
            self._finder.feed(text)
        elif text:
            self._deltas.content(text)
