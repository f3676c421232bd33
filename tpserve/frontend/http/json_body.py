"""From a body's bytes to its fields."""

from __future__ import annotations

from typing import Any

import pydantic_core

from tpserve.frontend.errors import InvalidRequest

MAX_STRINGS = 100_000  # of a body, names of fields included
MAX_GROUPS = 100_000  # lists and objects
MAX_VALUES = 2**19  # among them the token ids of all prompts
MAX_FIELDS = 200  # of the body itself: they are looked at one by one


def parse(body: bytes) -> dict[str, Any]:
    """The body's JSON object. NaN and infinities pass, to be refused with the name of their field. Raises InvalidRequest."""
    _check_size(body)
    try:
        fields = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    _bound(len(fields), MAX_FIELDS, "fields")
    return fields


def _check_size(body: bytes) -> None:
    """Refuse what no request needs and would take long to parse: the parser holds up every other thread until it is done.

    Exact as far as the text is JSON, and the parser goes no further. None of the steps takes more than some ms.
    """
    quoted = body.replace(rb"\\", b"").replace(rb"\"", b"")  # the quotes left are the ends of strings
    _bound(quoted.count(b'"') // 2, MAX_STRINGS, "strings")
    outside = b"".join(quoted.split(b'"')[::2])
    _bound(outside.count(b"[") + outside.count(b"{"), MAX_GROUPS, "lists and objects")
    _bound(outside.count(b","), MAX_VALUES, "values")


def _bound(count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequest(f"the body has {count} {what}; {most} are the most")
