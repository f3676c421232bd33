from __future__ import annotations

import os
import time

import pytest

from tests.unit.frontend.rig import Rig, in_loop, rig, wait_for
from tpserve.deployment import Deployment
from tpserve.messages import Finish, Stats, Submit


async def status(r: Rig) -> tuple[int, str]:
    response = await r.client.get("/health/ready")
    whole = await r.client.get("/health")
    assert (whole.status_code, whole.json()["status"]) == (response.status_code, response.json()["status"])
    assert (await r.client.get("/health/live")).status_code == 200
    return response.status_code, response.json()["status"]


@in_loop
async def test_health_names_every_rank(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        r.beats[2].step(17)
        body = (await r.client.get("/health")).json()
        assert (body["status"], body["epoch"]) == ("ready", 4)
        ranks = [(rank["rank"], rank["pid"], rank["last_step"]) for rank in body["ranks"]]
        assert ranks == [(0, os.getpid(), 0), (1, os.getpid(), 17)]
        assert all(0 <= rank["age_s"] < 60 for rank in body["ranks"])


@in_loop
async def test_server_is_not_ready_before_and_after_it_takes_requests(deployment: Deployment) -> None:
    async with rig(deployment, connected=False) as r:
        assert await status(r) == (503, "loading")
    async with rig(deployment) as r:
        assert await status(r) == (200, "ready")
        r.engine.stop_taking("the server is shutting down")
        assert await status(r) == (503, "stopping")


@in_loop
@pytest.mark.parametrize("record", [0, 1, 2])
async def test_process_that_stands_still_while_idle_is_not_ready(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, record: int
) -> None:
    async with rig(deployment) as r:
        now = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: now + 10 * 10**9)
        for other in {0, 1, 2} - {record}:
            r.beats[other].beat()
        assert await status(r) == (503, "stalled")
        r.beats[record].beat()
        assert await status(r) == (200, "ready")


@in_loop
async def test_busy_process_may_take_as_long_as_a_step_may(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(deployment) as r:
        sent = r.complete()
        submit = await r.coordinator.next(Submit)
        now, limit_s = time.monotonic_ns(), deployment.settings.step_timeout
        for seconds, expected in ((limit_s - 1, (200, "ready")), (limit_s + 1, (503, "stalled"))):
            monkeypatch.setattr(time, "monotonic_ns", lambda: now + int(seconds * 1e9))  # noqa: B023  read at once
            assert await status(r) == expected
        monkeypatch.undo()
        await r.coordinator.tokens((submit.request, 0, 5, Finish.LENGTH))
        await sent


@in_loop
async def test_engine_that_still_works_on_an_aborted_request_is_not_idle(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        await r.coordinator.say(Stats(running=1))
        await wait_for(lambda: not r.engine.is_idle)
        await r.coordinator.say(Stats())
        await wait_for(lambda: r.engine.is_idle)
