"""Constraints over HTTP: from the body's field, by the child that compiles, to the coordinator or a refusal."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.frontend.rig import in_loop, rig
from tpserve.deployment import Deployment
from tpserve.frontend.structured import grammar_of
from tpserve.messages import Finish, Submit

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type: 'yaml' is not supported"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, 'structured_outputs: failed to compile JSON schema: Unimpl'),
    ({"guided_regex": "(a"}, "guided_regex: invalid regex"),
    ({"guided_grammar": "start: foo"}, 'guided_grammar: unknown name: "foo"'),
]  # fmt: skip


@in_loop
async def test_constraints_reach_the_coordinator_or_are_refused_by_name(deployment: Deployment) -> None:
    async with rig(deployment) as made:
        for fields, said in REFUSED:
            for sent in (made.complete(**fields), made.chat(**fields)):
                error = refusal(await sent)
                assert said in error["message"]
                assert error["param"] in fields
        assert await made.coordinator.is_told_nothing()
        fields = {"response_format": {"type": "json_object"}}
        sent = made.complete(**fields)
        submit = await made.coordinator.next(Submit)
        assert submit.grammar == grammar_of(fields)[1]
        await made.coordinator.generate(submit, made.ids("{}"), Finish.COMPLETE)
        (choice,) = (await sent).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("{}", "stop")


@pytest.mark.parametrize("path", ["complete", "chat"])
@in_loop
async def test_body_without_a_constraint_starts_no_child(deployment: Deployment, path: str) -> None:
    async with rig(deployment) as made:
        sent = getattr(made, path)(response_format={"type": "text"})
        submit = await made.coordinator.next(Submit)
        assert submit.grammar == ""
        await made.coordinator.generate(submit, made.ids("a"))
        assert (await sent).status_code == 200


@in_loop
async def test_schema_of_a_tool_that_cannot_be_enforced_is_refused(deployment: Deployment) -> None:
    parameters = {"type": "object", "properties": {"city": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    async with rig(deployment) as made:
        error = refusal(await made.chat(tools=[tool], tool_choice="required"))
        assert error["param"] == "tools"
        assert 'Unimplemented keys: ["not"]' in error["message"]


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error
