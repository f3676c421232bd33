"""Ids of requests, and the lines that the log has of them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.unit.frontend.http.test_auth import guarded
from tests.unit.frontend.rig import in_loop, rig, wait_for
from tpserve.deployment import Deployment
from tpserve.messages import Abort, Finish, Submit

MADE = re.compile("[0-9a-f]{32}")


class Lines(logging.Handler):
    """Keeps the fields and the text of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "fields"):
            self.fields.append(record.fields)
            self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The access log of a test."""
    kept, logger = Lines(), logging.getLogger("tpserve")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(kept)
    logger.setLevel(level)


@in_loop
async def test_id_of_the_client_comes_back_on_answers_streams_and_errors(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        r.client.headers["X-Request-Id"] = "my-id/7"
        assert (await r.answer(r.complete(), "ok")).headers["x-request-id"] == "my-id/7"
        assert (await r.answer(r.complete(stream=True), "ok")).headers["x-request-id"] == "my-id/7"
        assert (await r.complete(n=0)).headers["x-request-id"] == "my-id/7"
        assert (await r.client.get("/nothing")).headers["x-request-id"] == "my-id/7"


@in_loop
@pytest.mark.parametrize("sent", [None, "", "a b", "x" * 129, "a\x7f", "\xe9"])
async def test_id_is_made_where_none_comes_that_can_be_repeated(deployment: Deployment, sent: str | None) -> None:
    async with rig(deployment) as r:
        headers = {} if sent is None else {"X-Request-Id": sent.encode("latin-1")}
        made = (await r.client.get("/v1/models", headers=headers)).headers["x-request-id"]
        assert MADE.fullmatch(made)


@in_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_line_of_an_answer_has_its_tokens_and_times(deployment: Deployment, lines: Lines, stream: bool) -> None:
    async with rig(guarded(deployment)) as r:
        r.client.headers.update({"Authorization": "Bearer sk-alice", "X-Request-Id": "my-id"})
        sent = r.complete(prompt=["a", "b"], stream=stream)
        first, second = await r.coordinator.next(Submit), await r.coordinator.next(Submit)
        await r.coordinator.generate(first, r.ids("abc"))
        await r.coordinator.generate(second, [*r.ids("d"), 0], Finish.STOP)
        await sent
        await wait_for(lambda: lines.fields)
        (fields,) = lines.fields
        assert fields.pop("latency_s") >= fields.pop("ttft_s") > 0
        assert fields == {
            "method": "POST", "path": "/v1/completions", "status": 200, "prompt_tokens": 2,
            "completion_tokens": len(r.ids("abc")) + 2, "finish": "length,stop", "key": "alice", "request_id": "my-id",
        }  # fmt: skip
        assert re.fullmatch(r"POST /v1/completions 200 latency_s=\S+ ttft_s=\S+ .* request_id=my-id", lines.texts[0])


@in_loop
async def test_line_of_a_client_that_hangs_up_says_so(deployment: Deployment, lines: Lines) -> None:
    async with rig(deployment) as r:
        for stream in (False, True):
            async with httpx.AsyncClient(base_url=r.url, trust_env=False, verify=False) as client:
                sent = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": stream}))
                await r.coordinator.next(Submit)
                sent.cancel()
            await r.coordinator.next(Abort)
            await wait_for(lambda stream=stream: len(lines.fields) == 1 + stream)
        assert [(fields["status"], fields["finish"]) for fields in lines.fields] == [(499, "abort"), (200, "abort")]


@in_loop
async def test_line_of_an_error_has_its_status_and_no_tokens(deployment: Deployment, lines: Lines) -> None:
    async with rig(deployment) as r:
        await r.complete(n=0)
        await wait_for(lambda: lines.fields)
        assert lines.fields[0]["status"] == 400
        assert "completion_tokens" not in lines.fields[0]


@in_loop
async def test_nothing_of_a_client_can_begin_a_line_or_tell_a_secret(deployment: Deployment, lines: Lines) -> None:
    async with rig(guarded(deployment)) as r:
        path = "/a%0d%0a12:00:00%20ERROR%20x?api_key=secret"
        await r.client.get(path, headers={"Authorization": "Bearer sk-secret", "X-Request-Id": "a secret"})
        await wait_for(lambda: lines.texts)
        assert lines.texts[0].startswith("GET /a%0d%0a12:00:00%20ERROR%20x 401 ")
        assert "secret" not in lines.texts[0]


@in_loop
async def test_monitors_leave_no_lines(deployment: Deployment, lines: Lines) -> None:
    async with rig(deployment) as r:
        for path in ("/health", "/health/live", "/metrics", "/v1/models"):
            await r.client.get(path)
        await wait_for(lambda: lines.fields)
        assert [fields["path"] for fields in lines.fields] == ["/v1/models"]


@in_loop
async def test_fields_that_nobody_knows_are_named_on_answers_and_streams(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        unknown = {"request_id": "a", "x\n": 1, "stream_options": {"include_usage": True, "b": 1}}
        for stream in (True, False):
            fields = unknown if stream else {name: unknown[name] for name in ("request_id", "x\n")}
            answer = await r.answer(r.complete(stream=stream, **fields), "ok")
            expected = "request_id, x%0A" + (", stream_options.b" if stream else "")
            assert answer.headers["x-ignored-fields"] == expected
        assert "x-ignored-fields" not in (await r.answer(r.complete(), "ok")).headers


@in_loop
async def test_fields_that_nobody_knows_are_refused_by_a_strict_server(deployment: Deployment) -> None:
    strict = deployment.model_copy(update={"settings": deployment.settings.model_copy(update={"strict": True})})
    async with rig(strict) as r:
        for send in (r.complete, r.chat):
            error = (await send(temprature=1)).json()["error"]
            assert (error["message"], error["param"]) == (
                "temprature: unknown field; did you mean temperature?",
                "temprature",
            )
        assert (await r.post("/tokenize", prompt="a", zzz=1)).json()["error"]["message"] == "zzz: unknown field"
