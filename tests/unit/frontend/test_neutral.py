"""Fields that are known and not built, and those that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest

from tpserve.frontend import neutral
from tpserve.frontend.body import ChatBody, CompletionBody
from tpserve.frontend.errors import InvalidRequest

TABLE: neutral.Table = {"store": (False,), "length_penalty": (1,), "audio": ()}


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"store": None}, {"length_penalty": 1.0}, {"audio": None}])
def test_value_that_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert neutral.check(fields, TABLE) == []


@pytest.mark.parametrize("fields", [{"store": True}, {"store": 0}, {"length_penalty": True}, {"audio": {}}, {"audio": False}])
def test_known_field_that_asks_for_something_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest, match=rf"^messages\[0\]\.{name} is not supported yet$") as refusal:
        neutral.check(fields, TABLE, "messages[0].")
    assert refusal.value.param == "messages"


def test_unknown_fields_are_returned_with_their_place() -> None:
    assert neutral.check({"a": 1, "store": False, "b": None}, TABLE, "stream_options.") == [
        "stream_options.a",
        "stream_options.b",
    ]


@pytest.mark.parametrize(
    ("unknown", "says", "param"),
    [
        ("temprature", "temprature: unknown field; did you mean temperature?", "temprature"),
        ("zzzz", "zzzz: unknown field", "zzzz"),
        ("messages[3].foo", "messages[3].foo: unknown field", "messages"),
        ("stream_options.foo", "stream_options.foo: unknown field", "stream_options"),
    ],
)
def test_refusal_of_an_unknown_field_names_the_nearest(unknown: str, says: str, param: str) -> None:
    refusal = neutral.refuse(unknown, {"temperature", "top_p"})
    assert (refusal.message, refusal.param) == (says, param)


def test_header_of_unknown_fields_cannot_be_broken_and_is_bounded() -> None:
    assert neutral.header(["a", "b[0].c", "x\r\nSet-Cookie: a", "é,"]) == "a, b[0].c, x%0D%0ASet-Cookie%3A%20a, %C3%A9%2C"
    long = neutral.header(["x" * 1000] * 500)
    assert long.endswith(", and 480 more")
    assert len(long) < 4000


@pytest.mark.parametrize(("body", "table"), [(CompletionBody, neutral.COMPLETION), (ChatBody, neutral.CHAT)])
def test_field_that_is_built_is_in_no_table_of_those_that_are_not(body: Any, table: neutral.Table) -> None:
    assert not body.model_fields.keys() & table.keys()
