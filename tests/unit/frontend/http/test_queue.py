"""What a client is told whom the queue does not serve."""

from __future__ import annotations

import pytest

from tests.unit.frontend.rig import in_loop, rig
from tpserve.deployment import Deployment
from tpserve.messages import Abort, Refusal, Refused, Submit


@in_loop
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "code"), [(Refusal.QUEUE_FULL, 429, "queue_full"), (Refusal.WAITED, 503, "queue_timeout")]
)
async def test_request_that_the_queue_refuses_is_told_when_to_come_again(
    deployment: Deployment, kind: Refusal, status: int, code: str, stream: bool
) -> None:
    async with rig(deployment) as r:
        for waited_s, again_s in ((0.0, "1"), (6.5, "7")):
            r.engine._wait_s = waited_s
            sent = r.complete(prompt=["a", "b"], stream=stream)
            first, second = await r.coordinator.next(Submit), await r.coordinator.next(Submit)
            assert first.group == second.group
            for submit in (first, second):
                await r.coordinator.say(Refused(submit.request, kind, "not now"))
            response = await sent
            assert (response.status_code, response.headers["retry-after"]) == (status, again_s)
            assert response.json()["error"]["message"] == "not now"
            assert response.json()["error"]["code"] == code
            assert {(await r.coordinator.next(Abort)).request for _ in range(2)} == {first.request, second.request}


@in_loop
async def test_time_to_come_again_is_how_long_the_last_one_waited(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        await r.answer(r.complete(), "a")
        assert r.engine._wait_s == 0.25  # as the rig has it
