"""How the model writes messages: which form its calls have, and whether its answers hold reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tpserve.frontend.chat import message_grammar
from tpserve.frontend.chat.answer import reasoning
from tpserve.frontend.chat.answer.forms import FORMS, PLAIN, CallForm, recognized
from tpserve.frontend.chat.answer.message import MessageParser, PlainMessage
from tpserve.frontend.chat.answer.parser import AnswerParser, Calls
from tpserve.frontend.chat.template import ChatTemplate
from tpserve.frontend.chat.tools import ChatTools
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest
from tpserve.frontend.structured import literal
from tpserve.tokenizer import Tokenizer

_Calling = tuple[ChatTools, CallForm]  # what may be called, and how calls are written


class MessageFormat:
    """Chosen once, by the settings and the template. Holds no state, so any number of threads may use it at once."""

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
        return "where required or named; for tool_choice auto say how the model writes them, by --tool-call-parser"

    def prepare(
        self, request: GenerateRequest, render: Callable[[GenerateRequest], str]
    ) -> tuple[GenerateRequest, str, Callable[[], MessageParser]]:
        """Of a chat: (the request with the grammar of whole answers, their calls and reasoning included, and with the special
        tokens that mark these; its prompt as `render` has made it; what makes a parser for the text of each choice).

        Raises InvalidRequest if the tools cannot be served, before the work of rendering.
        """
        calling = self._calling(request)
        prompt = render(request)
        begins = reasoning.opens(self._reasoning, prompt, _continued(request)) if self._reasons else None
        request = replace(self._constrained(request, calling, begins), shown_ids=self._marks(calling))
        calls = None if calling is None else _to_read(*calling)
        if calls is None and begins is None:
            return request, prompt, PlainMessage
        return request, prompt, lambda: AnswerParser(begins, calls)

    @property
    def _reasons(self) -> bool:
        return self._reasoning != "none"

    def _calling(self, request: GenerateRequest) -> _Calling | None:
        """The tools that the model may call, if it may. Where calls are certain, the grammar can have it write any form."""
        tools, form = request.tools, self.call_form
        if tools is None or not tools.may_call:
            return None
        if form is None and tools.is_auto:
            remedy = "start the server with --tool-call-parser, or choose none, required or a tool by its name"
            raise InvalidRequest(f"tool_choice: auto needs to know how this model writes calls; {remedy}", "tool_choice")
        if request.grammar:
            _check_constraint(request.constraint, tools, form or PLAIN)
        return tools, form or PLAIN

    def _constrained(self, request: GenerateRequest, calling: _Calling | None, begins: bool | None) -> GenerateRequest:
        """The request with the grammar of the whole answer, which may begin within reasoning."""
        constraint, grammar = request.constraint, request.grammar
        if calling is not None:
            tools, form = calling
            constraint = constraint if tools.is_auto and grammar else "tools"
            grammar = message_grammar.with_calls(tools, form, self._spell, grammar)
        if grammar and begins is not None:
            grammar = message_grammar.after_reasoning(grammar, begins, self._spell)
        return replace(request, constraint=constraint if grammar else "", grammar=grammar)

    def _marks(self, calling: _Calling | None) -> frozenset[int]:
        """The special tokens that a parser has to see."""
        marks = [reasoning.OPEN, reasoning.CLOSE] if self._reasons else []
        if calling is not None:
            _, form = calling
            marks += [form.opening, form.closing]
        return frozenset(id_ for mark in marks if (id_ := self._special(mark)) is not None)

    def _special(self, text: str) -> int | None:
        """The id of the special token that is spelled so, if there is one."""
        id_ = self._tokenizer.id_of(text)
        return id_ if id_ in self._tokenizer.special_ids else None

    def _spell(self, mark: str) -> str:
        id_ = self._special(mark)
        return literal(mark) if id_ is None else f"<[{id_}]>"


def _check_constraint(constraint: str, tools: ChatTools, form: CallForm) -> None:
    """Whether an answer can both follow the constraint and have calls. OpenAI's response_format is of content alone, so
    an answer that is all calls does not break it; the other fields are of the answer.
    """
    if tools.is_auto and not form.opening:
        what = "auto is not supported beside a constraint of the content for this model's form of calls"
        raise InvalidRequest(f"tool_choice: {what}", "tool_choice")
    if not tools.is_auto and constraint != "response_format":
        what = "not with a tool_choice that has the answer be calls; their arguments follow the tools' parameters"
        raise InvalidRequest(f"{constraint}: {what}", constraint)


def _to_read(tools: ChatTools, form: CallForm) -> Calls:
    return Calls(form, tools.names, tools.parallel, are_named=tools.named is not None, are_all=not tools.is_auto)


def _continued(request: GenerateRequest) -> str | None:
    """The content that the answer goes on with, if it begins no message of its own."""
    if request.messages is None or not request.template_kwargs.get("continue_final_message"):
        return None
    content: str = request.messages[-1]["content"]
    return content
