from __future__ import annotations

from typing import Any

import pytest

from tpserve.frontend.chat.messages import MAX_CALLS, MAX_KWARGS, MAX_KWARGS_CHARS
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest, chat_request

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET", "n": [1]}'}}


def request(*messages: Any, **fields: Any) -> GenerateRequest:
    return chat_request({"messages": [*messages], **fields}, None, 300)


def message(sent: dict[str, Any]) -> dict[str, Any]:
    made = request(USER, sent).messages
    assert made is not None
    return dict(made[1])


def refusal(*messages: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        request(*messages, **fields)
    return caught.value.message


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "anything"])
def test_message_of_text_is_kept_with_its_name(role: str) -> None:
    assert message({"role": role, "content": "x", "name": "ann"}) == {"role": role, "content": "x", "name": "ann"}


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert message({"role": "tool", "tool_call_id": "a", "content": parts})["content"] == "one\ntwo"


@pytest.mark.parametrize("content", [None, ""])
def test_calls_become_objects_beside_empty_content(content: str | None) -> None:
    made = message({"role": "assistant", "content": content, "tool_calls": [CALL]})
    function = {"name": "now", "arguments": {"zone": "CET", "n": [1]}}
    assert made == {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", {}), (" ", {}), ("{}", {}), ('{"a": ', '{"a": '), ("[1]", "[1]"), ('"x"', '"x"'), ("[" * 9999, "[" * 9999)],
)
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(arguments: str, shown: Any) -> None:
    call = {**CALL, "function": {"name": "now", "arguments": arguments}}
    assert message({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"] == shown


def test_delta_that_is_sent_back_is_a_call() -> None:
    assert message({"role": "assistant", "tool_calls": [{"index": 0, **CALL}]})["tool_calls"][0]["id"] == "call_1"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_one_name_for_templates(name: str) -> None:
    assert message({"role": "assistant", "content": None, name: "hm"}) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
    }


def test_functions_of_old_are_tools() -> None:
    made = message({"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}})
    assert made["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    assert message({"role": "function", "name": "now", "content": "12"}) == {"role": "tool", "name": "now", "content": "12"}


def test_answer_of_a_tool_names_its_call() -> None:
    sent = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
    assert message(sent) == sent


@pytest.mark.parametrize("nothing", [{"refusal": None}, {"annotations": []}, {"audio": None}, {"tool_calls": None}])
def test_what_clients_send_back_unchanged_says_nothing(nothing: dict[str, Any]) -> None:
    assert message({"role": "assistant", "content": "x", **nothing}) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("sent", "start"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id: is missing"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[1].content: is missing"),
        ({"role": "function", "content": "x"}, "messages[1].name: is missing"),
        ({"role": "assistant"}, "messages[1].content: "),
        ({"role": "assistant", "content": None}, "messages[1].content: "),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content: "),
        ({"role": "user"}, "messages[1].content: is missing"),
        ({"role": "user", "content": None}, "messages[1].content: is missing"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls: "),
        ({"role": "user", "content": "x", "reasoning": "hm"}, "messages[1].reasoning_content: "),
        ({"role": "assistant", "reasoning": "hm", "reasoning_content": "so"}, "messages[1].reasoning: differs"),
        ({"role": "assistant", "content": "x", "tool_call_id": "a"}, "messages[1].tool_call_id: "),
        ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls: "),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]: must be an object"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function: "),
        ({"role": "assistant", "tool_calls": [CALL, {**CALL, "id": 5}]}, "messages[1].tool_calls[1].id: "),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0].type: "),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": 5, "arguments": ""}}]},
            "messages[1].tool_calls[0].function.name: ",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "x", "arguments": {}}}]},
            "messages[1].tool_calls[0].function.arguments: ",
        ),
        ({"role": "assistant", "tool_calls": [CALL] * (MAX_CALLS + 1)}, "messages[1].tool_calls: "),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content: a part of type 'image_url'",
        ),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[1].audio is not supported"),
    ],
)
def test_malformed_message_is_refused_with_the_path_of_what_is_wrong(sent: Any, start: str) -> None:
    assert refusal(USER, sent).startswith(start)


def test_fields_that_nobody_knows_are_named_with_their_place() -> None:
    call = {**CALL, "colour": 1, "function": {**CALL["function"], "shade": 2}}  # type: ignore[dict-item]
    made = request({**USER, "mood": 1}, {"role": "assistant", "tool_calls": [call]})
    place = "messages[1].tool_calls[0]"
    assert made.ignored == ("messages[0].mood", f"{place}.colour", f"{place}.function.shade")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}]
    assert request({**USER, "content": parts}).ignored == ("messages[0].content[1].cache_control",)
    old = {"role": "assistant", "content": parts, "function_call": {"name": "now", "arguments": "", "z": 1}}
    assert request(old).ignored == ("messages[0].content[1].cache_control", "messages[0].function_call.z")


def test_kwargs_reach_the_template_beside_how_the_prompt_ends() -> None:
    made = request(USER, chat_template_kwargs={"enable_thinking": False})
    assert made.template_kwargs == {"enable_thinking": False, "add_generation_prompt": True}
    assert request(USER, add_generation_prompt=False).template_kwargs == {"add_generation_prompt": False}


@pytest.mark.parametrize(
    "kwargs",
    [
        *({name: 1} for name in ("messages", "tools", "add_generation_prompt", "bos_token", "any_token", "raise_exception")),
        {str(i): i for i in range(MAX_KWARGS + 1)},
        {"a": "x" * MAX_KWARGS_CHARS},
        {"a": object()},
        [],
    ],
)
def test_kwargs_are_bounded_and_take_no_name_of_ours(kwargs: Any) -> None:
    assert refusal(USER, chat_template_kwargs=kwargs).startswith("chat_template_kwargs: ")


def test_final_message_is_continued_only_if_it_is_the_assistants() -> None:
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert request(USER, {"role": "assistant", "content": "So"}, **continued).template_kwargs == continued
    assert refusal(USER, **continued).startswith("continue_final_message: the final message must be the assistant's")
    assert refusal(USER, {"role": "assistant", "content": " "}, **continued).startswith("continue_final_message: ")
    assert refusal(USER, continue_final_message=True).startswith("continue_final_message: needs add_generation_prompt false")
