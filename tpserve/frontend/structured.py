"""From the fields of a request that constrain its answer to one grammar (see `tpserve.grammar`); pure and cheap.

Whether the grammar can be used is found later, by compiling it (`tpserve.frontend.compiler`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pydantic_core
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from tpserve.frontend.errors import InvalidRequest, shown

MAX_BYTES = 64 * 1024  # of a schema, regex, grammar, or all choices
MAX_EBNF_BYTES = 8 * 1024  # of a grammar that is converted, which takes the square of its length
MAX_DEPTH = 64  # of a schema's nesting
MAX_INTEGER = 2**53  # of a schema: llguidance has numbers as float64
MAX_CHOICES = 1024

# Between the parts of JSON: nothing, a space, or a line's end and some indentation. With more, an answer could go on
# with white space for ever.
_SPACE = r"\x20|\n\x20{0,20}"
# Of llguidance's options of a rule, those that are for the sampler, or take back what has been sampled.
_RULE_OPTION = re.compile(r"^[ \t]*[\w-]+\[[^\]\n]*\b(temperature|stop)[ \t]*=", re.MULTILINE)
_COMPACT = {"whitespace_flexible": False}
_FLEXIBLE = {"whitespace_pattern": _SPACE}


def grammar_of(fields: Mapping[str, Any]) -> tuple[str, str]:
    """The field that constrains the answer, and the grammar that it asks for; both "" if none does. Raises InvalidRequest.

    The bodies of a regex, of a choice and of a grammar are matched from the answer's first character to its last.
    """
    grammars = {name: read(fields[name], name) for name, read in _READERS.items() if fields.get(name) is not None}
    wanted = [name for name, grammar in grammars.items() if grammar]
    if len(wanted) > 1:
        raise InvalidRequest(f"{' and '.join(wanted)}: an answer has one constraint; give one of them", wanted[1])
    return (wanted[0], grammars[wanted[0]]) if wanted else ("", "")


def json_node(schema: Mapping[str, Any], options: Mapping[str, Any] = _FLEXIBLE) -> str:
    """What stands in a grammar's rule for a JSON value of this schema, white space between its parts bounded."""
    return "%json " + json.dumps({**schema, "x-guidance": options}, allow_nan=False)


def literal(text: str) -> str:
    """What stands in a grammar's rule for this text."""
    return json.dumps(text)


def check_schema(schema: object, where: str) -> Mapping[str, Any]:
    """A JSON schema as a client sent it, if it is an object within the bounds. Raises InvalidRequest, naming `where`."""
    if not isinstance(schema, dict):
        raise _wrong(where, "must be an object: a JSON schema")
    values = _values(schema, MAX_DEPTH)
    if values is None:
        raise _wrong(where, f"nests deeper than {MAX_DEPTH}, which is the most")
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise _wrong(where, f"the number {shown(str(value))} would not be exact; up to {MAX_INTEGER} they are")
    try:
        _check_size(json.dumps(schema, ensure_ascii=False, allow_nan=False), where)
    except ValueError:
        raise _wrong(where, "NaN and infinities are no JSON") from None
    if "x-guidance" in schema:  # llguidance's options, among them to ignore what it cannot enforce
        raise _wrong(where, "x-guidance is not supported")
    return schema


def _response_format(value: Any, where: str) -> str:
    kind = _object(value, where).get("type")
    match kind:
        case "text":
            _only(value, where, "type")
            return ""
        case "json_object":
            _only(value, where, "type")
            return _json({"type": "object"})
        case "json_schema":
            _only(value, where, "type", "json_schema")
            return _named_schema(value.get("json_schema"), f"{where}.json_schema")
    raise _wrong(f"{where}.type", f"{shown(repr(kind))} is not supported; text, json_object and json_schema are")


def _named_schema(value: Any, where: str) -> str:
    """OpenAI's; it is enforced whether `strict` is set or not."""
    _only(_object(value, where), where, "name", "schema", "strict", "description")
    for name, kind, wanted in (("name", str, "a string"), ("strict", bool, "true or false"), ("description", str, "a string")):
        if not isinstance(value.get(name), (kind, type(None))) or (name == "name" and not value.get(name)):
            raise _wrong(f"{where}.{name}", f"must be {wanted}")
    return _json(check_schema(value.get("schema"), f"{where}.schema"))


def _structured_outputs(value: Any, where: str) -> str:
    """vLLM's: one constraint, and options of how to apply it."""
    _only(_object(value, where), where, *_KINDS, "json_object", *_SPACING, "disable_fallback")
    for name in ("json_object", "disable_any_whitespace", "disable_fallback"):  # what never falls back, never does
        if not isinstance(value.get(name), (bool, type(None))):
            raise _wrong(f"{where}.{name}", "must be true or false")
    kinds = [kind for kind in (*_KINDS, "json_object") if _asks(value.get(kind))]
    if len(kinds) != 1:
        given = f"has {' and '.join(kinds)}" if kinds else "has none"
        raise _wrong(where, f"must have one of {', '.join(_KINDS)} and json_object; it {given}")
    spacing = [name for name in _SPACING if _asks(value.get(name))]
    if kinds[0] not in ("json", "json_object"):
        if spacing:
            raise _wrong(f"{where}.{spacing[0]}", "only with json or json_object")
        return _KINDS[kinds[0]](value[kinds[0]], f"{where}.{kinds[0]}")
    schema = {"type": "object"} if kinds[0] == "json_object" else _schema(value["json"], f"{where}.json")
    return _json(schema, _spacing(value, spacing, where))


def _spacing(value: Mapping[str, Any], given: list[str], where: str) -> Mapping[str, Any]:
    """llguidance's options for white space between the parts of JSON."""
    if len(given) > 1:
        raise _wrong(where, f"{' and '.join(given)}: give one of them")
    if "whitespace_pattern" not in given:
        return _COMPACT if given else _FLEXIBLE
    pattern = value["whitespace_pattern"]
    if not isinstance(pattern, str):
        raise _wrong(f"{where}.whitespace_pattern", "must be a string")
    _check_size(pattern, f"{where}.whitespace_pattern")
    return {"whitespace_pattern": pattern}


def _json(schema: Mapping[str, Any], options: Mapping[str, Any] = _FLEXIBLE) -> str:
    return f"start: {json_node(schema, options)}"


def _schema(value: Any, where: str) -> Mapping[str, Any]:
    """A schema, or the text of one."""
    if isinstance(value, str):
        _check_size(value, where)
        try:
            value = pydantic_core.from_json(value)
        except ValueError as error:
            raise _wrong(where, f"is not valid JSON: {error}") from None
    return check_schema(value, where)


def _regex(value: Any, where: str) -> str:
    """In the syntax of Rust's `regex`, where \\d is 0 to 9."""
    pattern = _text(value, where).removeprefix("^")
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    if pattern.endswith("$") and not escapes % 2:
        pattern = pattern[:-1]  # both are so by themselves, for all of the answer is matched
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise _wrong(where, "ends with a backslash that escapes nothing")
    return f"start: /{regex_to_lark(pattern, 'd')}/"


def _grammar(value: Any, where: str) -> str:
    """Lark as llguidance has it, or EBNF as llama.cpp has it (`root ::= …`)."""
    grammar = _text(value, where)
    if found := _RULE_OPTION.search(grammar):
        raise _wrong(where, f"{found[1]} of a rule is not supported")
    if is_lark_syntax(grammar) or "::=" not in grammar:
        return grammar
    _check_size(grammar, where, MAX_EBNF_BYTES)
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise _wrong(where, "nests too deep") from None
    except Exception as error:  # the library raises nothing narrower
        raise _wrong(where, f"is no EBNF: {' '.join(str(error).split())}") from None


def _choice(value: Any, where: str) -> str:
    if not isinstance(value, list) or not value or any(not isinstance(choice, str) for choice in value):
        raise _wrong(where, "must be a list of strings, and not empty")
    if len(value) > MAX_CHOICES:
        raise _wrong(where, f"has {len(value)} choices; {MAX_CHOICES} is the most")
    _check_size("".join(value), where)
    return f"start: CHOICE\nCHOICE: {' | '.join(map(literal, dict.fromkeys(value)))}"


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, "must be a string, and not empty")
    _check_size(value, where)
    return value


_KINDS: Mapping[str, Callable[[Any, str], str]] = {
    "json": lambda value, where: _json(_schema(value, where)),
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_SPACING = ("disable_any_whitespace", "whitespace_pattern")
_READERS: Mapping[str, Callable[[Any, str], str]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{kind}": reader for kind, reader in _KINDS.items()},
}
FIELDS = tuple(_READERS)  # of a body, that are read here


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "must be an object")
    return value


def _only(value: Mapping[str, Any], where: str, *known: str) -> None:
    """Refuse the first field that is not known and asks for something."""
    for name in value:
        if name not in known and _asks(value[name]):
            raise _wrong(f"{where}.{shown(name)}", "is not supported")


def _asks(value: Any) -> bool:
    """Whether it asks for something: null and false do not, but 0, which equals false, may."""
    return value is not None and value is not False


def _values(schema: Mapping[str, Any], most: int) -> list[Any] | None:
    """All values in it that are neither objects nor lists, or None where these nest deeper than that."""
    level: list[Any] = [schema]
    found: list[Any] = []
    for _ in range(most):
        children = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        level = [child for child in children if isinstance(child, (dict, list))]
        found += (child for child in children if not isinstance(child, (dict, list)))
    return None if level else found


def _check_size(text: str, where: str, most: int = MAX_BYTES) -> None:
    size = len(text.encode())
    if size > most:
        raise _wrong(where, f"has {size} bytes; {most} is the most")


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", where.partition(".")[0])
