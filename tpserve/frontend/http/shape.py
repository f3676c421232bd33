"""The size of a JSON text, told without parsing it: the parser holds up every other thread until it is done."""

from __future__ import annotations

from tpserve.frontend.errors import InvalidRequest

MAX_STRINGS = 100_000  # of a body, names of fields included
MAX_GROUPS = 100_000  # lists and objects
MAX_VALUES = 2**19  # among them the token ids of all prompts


def check(body: bytes) -> None:
    """Refuse what no request needs and would take long to parse. Raises InvalidRequest.

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
