"""Chats with tools and reasoning over HTTP: the settings, the engine's request, and both shapes of the answer."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.frontend.rig import Rig, in_loop, rig
from tpserve.deployment import Deployment
from tpserve.frontend.chat.answer.message import merged
from tpserve.messages import Finish, Submit

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ANSWER = '<think>\nhm\n</think>\n\nOne moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def reading(deployment: Deployment, **settings: Any) -> Deployment:
    return deployment.model_copy(update={"max_model_len": 400, "settings": deployment.settings.model_copy(update=settings)})


async def choice(r: Rig, **body: Any) -> dict[str, Any]:
    """The whole answer's choice; its call without the id."""
    answer = await r.answer(r.chat(tools=TOOLS, **body), ANSWER, Finish.STOP)
    (one,) = answer.json()["choices"]
    return dict(one)


async def streamed(r: Rig, **body: Any) -> tuple[dict[str, Any], list[str | None]]:
    """The message that the deltas of a stream make, and the finish reasons."""
    answer = await r.answer(r.chat(tools=TOOLS, stream=True, **body), ANSWER, Finish.STOP)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and line != "data: [DONE]"]
    choices = [chunk["choices"][0] for chunk in map(json.loads, lines)]
    return merged(one["delta"] for one in choices), [one["finish_reason"] for one in choices]


@in_loop
async def test_streamed_message_is_the_whole_one(deployment: Deployment) -> None:
    async with rig(reading(deployment, tool_call_parser="hermes", reasoning_parser="qwen3")) as r:
        whole = await choice(r)
        message, reasons = await streamed(r)
        for one in (whole["message"], message):
            (call,) = one["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
            assert (one["reasoning_content"], one["content"]) == ("hm", "One moment.")
        assert (whole["finish_reason"], reasons[-1]) == ("tool_calls", "tool_calls")
        assert set(reasons[:-1]) == {None}


@in_loop
async def test_required_call_is_constrained_for_any_model(deployment: Deployment) -> None:
    async with rig(reading(deployment)) as r:
        sent = r.chat(tools=TOOLS, tool_choice="required")
        submit = await r.coordinator.next(Submit)
        assert "weather" in submit.grammar
        await r.coordinator.generate(submit, r.ids('[{"name": "weather", "arguments": {"city": "x"}}]'), Finish.COMPLETE)
        (one,) = (await sent).json()["choices"]
        assert one["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "x"}'
        assert (one["message"]["content"], one["finish_reason"]) == (None, "tool_calls")


@in_loop
async def test_tools_that_cannot_be_served_are_refused_by_their_field(deployment: Deployment) -> None:
    async with rig(reading(deployment)) as r:
        auto = await r.chat(tools=TOOLS)
        unknown = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
        required = await r.chat(tools=[unknown], tool_choice="required")
        for answer, param in ((auto, "tool_choice"), (required, "tools")):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert await r.coordinator.is_told_nothing()
