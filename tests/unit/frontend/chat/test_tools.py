from __future__ import annotations

from typing import Any

import pytest

from tpserve.frontend.chat.tools import MAX_TOOLS, ChatTools
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest, chat_request

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}


def request(**fields: Any) -> GenerateRequest:
    return chat_request({"messages": [{"role": "user", "content": "hi"}], **fields}, None, 300)


def tools(**fields: Any) -> ChatTools:
    made = request(tools=[WEATHER, NOW], **fields).tools
    assert made is not None
    return made


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request(**fields)
    return caught.value


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def test_tools_are_kept_as_they_were_sent() -> None:
    assert tools().tools == (WEATHER, NOW)
    odd = {**WEATHER, "function": {**WEATHER["function"], "strict": True, "returns": None}}  # type: ignore[dict-item]
    made = request(tools=[odd]).tools
    assert made is not None
    assert made.tools == (odd,)


@pytest.mark.parametrize(
    ("choice", "kind", "named"),
    [
        (None, "auto", None), ("auto", "auto", None), ("none", "none", None), ("required", "required", None),
        (NAMED, "required", "now"),
    ],
)  # fmt: skip
def test_choice_is_auto_where_nothing_is_said(choice: Any, kind: str, named: str | None) -> None:
    made = tools(tool_choice=choice)
    assert (made.choice, made.named) == (kind, named)
    assert (made.may_call, made.is_auto) == (kind != "none", kind == "auto")


def test_fields_of_a_choice_that_nobody_knows_are_named() -> None:
    choice = {**NAMED, "x": 1, "function": {"name": "now", "y": 2}}
    assert request(tools=[NOW], tool_choice=choice).ignored == ("tool_choice.x", "tool_choice.function.y")


@pytest.mark.parametrize(("parallel", "expected"), [(None, True), (True, True), (False, False)])
def test_calls_are_parallel_unless_forbidden(parallel: bool | None, expected: bool) -> None:
    assert tools(parallel_tool_calls=parallel).parallel is expected


@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
def test_without_tools_there_is_nothing_to_call(fields: dict[str, Any]) -> None:
    assert request(**fields).tools is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_choice_that_needs_tools_is_refused_without_them(choice: Any) -> None:
    assert refusal(tool_choice=choice).param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("any", "tool_choice: must be none, auto, required or "),
        (5, "tool_choice: must be "),
        ({}, "tool_choice: must be "),
        ({"type": "function"}, "tool_choice: must be "),
        ({"type": "function", "function": {"name": "later"}}, "tool_choice: no tool is named 'later'"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice: type 'allowed_tools' is not supported"),
    ],
)
def test_choice_of_another_kind_is_refused(choice: Any, message: str) -> None:
    assert refusal(tools=[NOW], tool_choice=choice).message.startswith(message)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ("x", "tools: "),
        ([5], "tools[0]: must be an object"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type: "),
        ([NOW, {"type": "function"}], "tools[1].function: "),
        ([tool(name="")], "tools[0].function.name: "),
        ([tool(name="a b")], "tools[0].function.name: "),
        ([tool(name="é")], "tools[0].function.name: "),
        ([tool(name="a\n")], "tools[0].function.name: "),
        ([tool(name="x" * 65)], "tools[0].function.name: "),
        ([tool(parameters=[])], "tools[0].function.parameters: "),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type: must be 'object'"),
        ([tool(parameters={"x": "a" * 70_000})], "tools[0].function.parameters: "),
        ([NOW, NOW], "tools: the name 'now' stands there twice"),
        ([tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "tools: "),
        ([tool(name=f"f{i}", description="x" * 10_000) for i in range(120)], "tools: "),
    ],
)
def test_malformed_tools_are_refused_with_the_path_of_what_is_wrong(given: Any, start: str) -> None:
    error = refusal(tools=given)
    assert error.message.startswith(start)
    assert str(error.param).startswith("tools")
