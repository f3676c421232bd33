"""How the model writes messages: which form its calls have, and whether its answers hold reasoning."""

from __future__ import annotations

from dataclasses import replace

from tpserve.frontend.chat import message_grammar, reasoning
from tpserve.frontend.chat.deltas import Deltas
from tpserve.frontend.chat.message import Delta, MessageParser, PlainMessage
from tpserve.frontend.chat.reasoning import ReasoningSplitter
from tpserve.frontend.chat.template import ChatTemplate
from tpserve.frontend.chat.tools import ChatTools
from tpserve.frontend.chat.tools.finder import CallFinder
from tpserve.frontend.chat.tools.forms import FORMS, PLAIN, CallForm, recognized
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest
from tpserve.frontend.structured import literal
from tpserve.tokenizer import Tokenizer


class MessageFormat:
    """Chosen once, by the settings and the template. For each chat, off the event loop:

    1. `request = form.checked(request)`
    2. `is_open = form.opens_reasoning(text)`, with the text that the template makes of the chat
    3. `request = form.constrained(request, is_open)`, whose grammar is then compiled
    4. `form.parser(request.tools, is_open)` for the text of each choice
    """

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str):
        source = template.source if template is not None else ""
        self.call_form = recognized(source) if tool_call_parser == "auto" else FORMS.get(tool_call_parser)
        self._reasoning = reasoning_parser
        self._tokenizer = tokenizer

    @property
    def described(self) -> str:
        """What the log says of calls."""
        if self.call_form is not None:
            return f"written as {self.call_form.name}"
        return "no parser is known, so tool_choice auto is refused; --tool-call-parser sets one"

    def checked(self, request: GenerateRequest) -> GenerateRequest:
        """The request, its answers' marks shown to the parser. Raises InvalidRequest if its tools cannot be served."""
        tools = _callable(request.tools)
        marks = [reasoning.OPEN, reasoning.CLOSE] if self._reasons else []
        if tools is not None:
            form = self._form(tools)
            marks += [form.opening, form.closing]
            if request.grammar and _is_auto(tools) and not form.opening:
                what = "auto is not supported beside a constraint of the content for this model's form of calls"
                raise InvalidRequest(f"tool_choice: {what}", "tool_choice")
        return replace(request, shown_ids=frozenset(id_ for mark in marks if (id_ := self._special(mark)) is not None))

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the answer to a prompt, as the template has rendered it, begins within reasoning."""
        return self._reasons and reasoning.opens(self._reasoning, prompt)

    def constrained(self, request: GenerateRequest, opens_reasoning: bool) -> GenerateRequest:
        """A checked request with the grammar of the whole answer, its calls and reasoning included."""
        grammar = self._after_reasoning(request)
        if grammar and self._reasons:
            grammar = message_grammar.after_reasoning(grammar, opens_reasoning, self._spell)
        return replace(request, grammar=grammar)

    def parser(self, tools: ChatTools | None, opens_reasoning: bool) -> MessageParser:
        """For one choice's text. Without tools or reasoning, all of it is content."""
        tools = _callable(tools)
        if tools is None and not self._reasons:
            return PlainMessage()
        deltas = Deltas(tools)
        splitter = ReasoningSplitter(opens_reasoning, deltas) if self._reasons else None
        return AnswerParser(deltas, splitter, tools, None if tools is None else self._form(tools))

    @property
    def _reasons(self) -> bool:
        return self._reasoning != "none"

    def _after_reasoning(self, request: GenerateRequest) -> str:
        """The grammar of what follows the reasoning; "" is none."""
        tools = _callable(request.tools)
        if tools is None:
            return request.grammar
        form = self._form(tools)
        if not _is_auto(tools):
            return message_grammar.calls(tools, form, self._spell)
        if request.grammar:
            return message_grammar.calls_or(tools, form, self._spell, request.grammar)
        if any(tool["function"].get("strict") for tool in tools.tools):
            return message_grammar.content_and_calls(tools, form, self._spell)
        return ""

    def _form(self, tools: ChatTools) -> CallForm:
        """The model's own form; where calls are certain, the grammar can have it write any."""
        if self.call_form is not None:
            return self.call_form
        if _is_auto(tools):
            remedy = "start the server with --tool-call-parser, or choose none, required or a tool by its name"
            raise InvalidRequest(f"tool_choice: auto needs to know how this model writes calls; {remedy}", "tool_choice")
        return PLAIN

    def _special(self, text: str) -> int | None:
        """The id of the special token that is spelled so, if there is one."""
        id_ = self._tokenizer.id_of(text)
        return id_ if id_ in self._tokenizer.special_ids else None

    def _spell(self, mark: str) -> str:
        id_ = self._special(mark)
        return literal(mark) if id_ is None else f"<[{id_}]>"


def _callable(tools: ChatTools | None) -> ChatTools | None:
    """The tools, if the model may call them."""
    return None if tools is None or (tools.choice == "none" and not tools.is_named) else tools


def _is_auto(tools: ChatTools) -> bool:
    return tools.choice == "auto" and not tools.is_named


class AnswerParser:
    """Reads one answer: its reasoning first, then calls and content."""

    def __init__(self, deltas: Deltas, splitter: ReasoningSplitter | None, tools: ChatTools | None, form: CallForm | None):
        self._deltas = deltas
        self._splitter = splitter
        self._is_named = tools is not None and tools.is_named
        self._finder = None
        if tools is not None and form is not None:
            self._finder = CallFinder(form, frozenset(tool["function"]["name"] for tool in tools.tools), deltas)

    def feed(self, text: str) -> list[Delta]:
        """What the text adds to the message and can be told now."""
        self._after_reasoning(text if self._splitter is None else self._splitter.feed(text))
        return self._deltas.take()

    def end(self) -> list[Delta]:
        """What was held back, when no more text comes."""
        if self._splitter is not None:
            self._after_reasoning(self._splitter.end())
        if self._finder is not None:
            self._finder.end()
        self._deltas.end()
        return self._deltas.take()

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's: an answer that made calls has stopped for them, but where the request named the call."""
        return "tool_calls" if reason == "stop" and self._deltas.calls and not self._is_named else reason

    def _after_reasoning(self, text: str) -> None:
        if self._finder is not None:
            self._finder.feed(text)
        elif text:
            self._deltas.content(text)
