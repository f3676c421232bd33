from __future__ import annotations

from typing import Any

import pytest

from tpserve.frontend.chat.answer.message import PlainMessage, merged


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    head = {} if name is None else {"id": f"call_{name}", "type": "function"}
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, **head, "function": function}]}


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ([], {"content": ""}),
        ([{"content": "a"}, {"content": "b"}], {"content": "ab"}),
        ([{"reasoning_content": "r"}, {"content": "a"}], {"content": "a", "reasoning_content": "r"}),
        ([{"reasoning_content": "r"}], {"content": "", "reasoning_content": "r"}),
    ],
)
def test_parts_of_a_message_are_joined(deltas: list[dict[str, Any]], message: dict[str, Any]) -> None:
    assert merged(deltas) == {"role": "assistant", **message}


def test_calls_are_put_together_by_their_index() -> None:
    deltas = [call(0, "", "f"), call(0, '{"a"'), call(1, "{", "g"), call(0, ": 1}"), call(1, "}")]
    assert merged(deltas) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "call_g", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_content_stays_beside_calls() -> None:
    assert merged([{"content": "a"}, call(0, "{}", "f")])["content"] == "a"


def test_plain_text_is_content_and_ends_as_it_ends() -> None:
    parser = PlainMessage()
    assert (parser.feed("a"), parser.feed(""), parser.end()) == ([{"content": "a"}], [], [])
    assert [parser.finish_reason(reason) for reason in ("stop", "length", None)] == ["stop", "length", None]
