"""Grammars of messages with reasoning and calls, in llguidance's Lark (see `tpserve.grammar`).

A `Spell` says how a grammar has a mark such as <tool_call>: as text, or as a special token, which spells no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpserve.frontend.chat.answer import reasoning
from tpserve.frontend.chat.answer.forms import CallForm
from tpserve.frontend.chat.tools import ChatTools
from tpserve.frontend.structured import json_node, literal

Spell = Callable[[str], str]

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
_TEXT = "/(?s:.*)/"
# What an answer may begin with so that it is not read as calls without marks.
_CONTENT = r"/\s*([^\s{\[](?s:.*))?/"


def with_calls(tools: ChatTools, form: CallForm, spell: Spell, grammar: str) -> str:
    """Answers that may have calls as the tools say, and else follow `grammar` if it is not ""; "" where any text will do."""
    if not tools.is_auto:
        return _calls(tools, form, spell)
    if grammar:
        return _calls_or(tools, form, spell, grammar)
    if any(tool["function"].get("strict") for tool in tools.tools):
        return _content_and_calls(tools, form, spell)
    return ""


def after_reasoning(grammar: str, is_open: bool, spell: Spell) -> str:
    """Answers that reason and then follow `grammar`. Where reasoning is not open, it may be left out."""
    part = "thoughts" if is_open else f"({spell(reasoning.OPEN)} thoughts)?"
    thoughts = _up_to("thoughts", spell(reasoning.CLOSE))
    return "\n".join([f"start: {part} LINES answer", thoughts, r"LINES: /\n{0,2}/", _nested("answer", grammar)])


def _calls(tools: ChatTools, form: CallForm, spell: Spell) -> str:
    """Answers that are calls and nothing else, with arguments that follow the tools' schemas."""
    return "\n".join([f"start: {_all(tools, form)}", *_rules(tools, form, spell, are_strict=True)])


def _calls_or(tools: ChatTools, form: CallForm, spell: Spell, grammar: str) -> str:
    """Answers that are calls, or follow `grammar`. For forms with marks: it must be clear at once which of them."""
    rules = _rules(tools, form, spell, are_strict=False)
    return "\n".join([f"start: calls | answer\ncalls: {_all(tools, form)}", *rules, _nested("answer", grammar)])


def _content_and_calls(tools: ChatTools, form: CallForm, spell: Spell) -> str:
    """Answers of any text, in which the arguments of calls to strict tools follow the tools' schemas."""
    rules = _rules(tools, form, spell, are_strict=False)
    if not form.opening:
        return "\n".join([f"start: {_all(tools, form)} | CONTENT\nCONTENT: {_CONTENT}", *rules])
    more = "*" if tools.parallel else "?"
    start = f'start: (head "\\n" function "\\n" {spell(form.closing)} LINES){more} TEXT'
    return "\n".join([start, f"TEXT: {_TEXT}\nLINES: /\\n?/", _up_to("head", spell(form.opening)), *rules])


def _up_to(rule: str, mark: str) -> str:
    """Any text up to the mark, with it."""
    return f"{rule}[suffix={mark}]: {_TEXT}" if mark.startswith('"') else f"{rule}: {_TEXT} {mark}"


def _nested(rule: str, grammar: str) -> str:
    return f"{rule}: %lark {{\n{grammar}\n}}"


def _all(tools: ChatTools, form: CallForm) -> str:
    """One call, or as many as the model likes."""
    if tools.named is not None or not tools.parallel:
        return "call"
    parts = [form.first and literal(form.first), f"call ({literal(form.between)} call)*", form.last and literal(form.last)]
    return " ".join(filter(None, parts))


def _rules(tools: ChatTools, form: CallForm, spell: Spell, are_strict: bool) -> list[str]:
    """`call`, with the form's marks, and `function`, without; for each tool that may be called."""
    marked = f'{spell(form.opening)} "\\n" function "\\n" {spell(form.closing)}' if form.opening else "function"
    functions = [tool["function"] for tool in tools.tools if tools.named in (None, tool["function"]["name"])]
    rules = [f"call: {marked}", f"function: {' | '.join(f'function_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        head = f'{{"name": "{function["name"]}", "{form.arguments}": '
        rules.append(f'function_{i}: {literal(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {json_node(_schema(function, are_strict), _SPACING)}")
    return rules


def _schema(function: Mapping[str, Any], are_strict: bool) -> Mapping[str, Any]:
    """Of the arguments; those of a function without parameters, or that need not follow them, are any object."""
    follows = are_strict or function.get("strict")
    return {**((function.get("parameters") or {}) if follows else {}), "type": "object"}
