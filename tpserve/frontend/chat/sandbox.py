"""The sandbox that chat templates run in: no way out of it, and an end to everything.

A template is the operator's, yet what it works on is anybody's: a message or an argument may make it loop or grow without
an end. A thread cannot be stopped from outside, so the work counts itself: loops and calls look at the clock, and
operators that make large things out of small ones look at the size before. The clock is the thread's own, for a busy
machine is no fault of the template's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of the thread's processor time
MAX_LENGTH = 2**25  # characters of a text, elements of a list
_MAX_BITS = 4096  # of an integer

_deadline: ContextVar[float] = ContextVar("deadline")  # seconds of `time.thread_time`, of the rendering that this thread is at


class TooMuchWork(jinja2.TemplateError):
    """The template takes longer, or makes more, than any prompt needs."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up, bounded."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            optimized=False,  # nothing is computed before it is needed, such as "a" * 10**9
        )
        self.filters["each_in_time"] = _each_in_time
        self.filters["within_size"] = _within_size

    def compiled(self, source: str) -> jinja2.Template:
        """The template. Raises what Jinja and Python raise for a wrong one."""
        return self.from_string(_Bounds().visit(self.parse(source)))

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What every call in a template goes through, such as those of macros, which may call themselves."""
        _check_time()
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What every intercepted operator goes through."""
        if _is_too_large(operator, left, right):
            raise TooMuchWork(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Has loops look at the clock, and what `~` joins at its length."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Its items come through a filter."""
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, "each_in_time")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """Its result goes through a filter."""
        self.generic_visit(node)
        return _filtered(node, "within_size")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def render(template: jinja2.Template, names: dict[str, Any]) -> str:
    """The template's text. Raises TooMuchWork, and whatever else the template may raise."""
    token = _deadline.set(time.thread_time() + MAX_SECONDS)
    try:
        return "".join(_bounded(template.generate(names)))
    finally:
        _deadline.reset(token)


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        _check_time()
        length += len(piece)
        if length > MAX_LENGTH:
            raise TooMuchWork(f"the text has more than {MAX_LENGTH} characters")
        yield piece


def _each_in_time(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _check_time()
        yield item


def _within_size(text: str) -> str:
    if len(text) > MAX_LENGTH:
        raise TooMuchWork(f"a text of more than {MAX_LENGTH} characters")
    return text


def _check_time() -> None:
    if time.thread_time() > _deadline.get():
        raise TooMuchWork(f"it takes more than {MAX_SECONDS:g} s")


def _is_too_large(operator: str, left: Any, right: Any) -> bool:
    """Whether the result is: an integer by its bits, a sequence by its elements."""
    match operator, left, right:
        case "**", int(), int():
            return left.bit_length() * right > _MAX_BITS
        case "*", int(), int():
            return left.bit_length() + right.bit_length() > _MAX_BITS
        case "*", str() | list() | tuple(), int():
            return len(left) * right > MAX_LENGTH
        case "*", int(), str() | list() | tuple():
            return left * len(right) > MAX_LENGTH
        case "+", str() | list() | tuple(), str() | list() | tuple():
            return len(left) + len(right) > MAX_LENGTH
    return False
