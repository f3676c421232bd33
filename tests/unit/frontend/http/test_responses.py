"""Clients that hang up, clients that read slowly, and servers that end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.unit.frontend.rig import Rig, events, in_loop, rig, wait_for
from tpserve.deployment import Deployment
from tpserve.frontend.answers import Answer, ChatAnswer, CompletionAnswer
from tpserve.frontend.chat.answer.message import PlainMessage
from tpserve.frontend.records import Generation, new_record
from tpserve.frontend.schema import completion_request
from tpserve.messages import Abort, Finish, Submit
from tpserve.tokenizer import Tokenizer

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send_raw(r: Rig, receive_buffer_bytes: int | None = None, **body: Any) -> Streams:
    """A completion request on a connection that the test reads and closes itself."""
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", r.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**16)
    content = json.dumps({"prompt": "the fox", **body}).encode()
    head = "POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(content)}", "", ""
    writer.write("\r\n".join(head).encode() + content)
    await writer.drain()
    return reader, writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


# Hanging up


@in_loop
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
async def test_client_that_hangs_up_frees_its_request(deployment: Deployment, stream: bool, running: bool) -> None:
    async with rig(deployment) as r:
        _, writer = await send_raw(r, stream=stream, n=2)
        submit = await r.coordinator.next(Submit)
        if running:
            await r.coordinator.tokens((submit.request, 0, 5, Finish.NONE))
            await wait_for(lambda: r.metric("generated_tokens_total"))
        await hang_up(writer)
        abort = await r.coordinator.next(Abort)
        assert (abort.request, abort.choice) == (submit.request, -1)
        assert r.metric("requests_total", finish_reason="abort") == 2
        await r.coordinator.tokens((submit.request, 0, 5, Finish.NONE))  # an id that was under way
        assert (await r.answer(r.complete(), "ok")).status_code == 200
        assert r.metric("generated_tokens_total") == running + len(r.ids("ok"))


@in_loop
async def test_client_that_hangs_up_while_it_does_not_read_frees_its_request(deployment: Deployment) -> None:
    async with rig(deployment.model_copy(update={"max_model_len": 10_000}), send_buffer_bytes=4096) as r:
        _, writer = await send_raw(r, receive_buffer_bytes=4096, stream=True)
        submit = await r.coordinator.next(Submit)
        for _ in range(2000):
            await r.coordinator.tokens((submit.request, 0, 5, Finish.NONE))
        await wait_for(lambda: r.metric("generated_tokens_total") == 2000)
        await hang_up(writer)
        assert (await r.coordinator.next(Abort)).request == submit.request


@in_loop
async def test_answer_that_was_read_whole_is_not_aborted(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        for stream in (False, True):
            assert (await r.answer(r.complete(stream=stream), "ok")).status_code == 200
        await r.engine.idle()
        assert await r.coordinator.is_told_nothing()
        assert r.metric("requests_total", finish_reason="abort") == 0


@in_loop
async def test_client_that_leaves_within_its_body_leaves_nothing(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        _, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        await hang_up(writer)
        assert (await r.answer(r.complete(), "ok")).status_code == 200


# Reading slowly


@in_loop
async def test_slow_reader_gets_all_the_text_in_fewer_events(deployment: Deployment) -> None:
    """What has not been read is joined; without that every id would wait as an event of its own."""
    count = 2000
    async with rig(deployment.model_copy(update={"max_model_len": 10_000}), send_buffer_bytes=4096) as r:
        reader, writer = await send_raw(r, receive_buffer_bytes=4096, stream=True)
        submit = await r.coordinator.next(Submit)
        await r.coordinator.generate(submit, r.ids("a") * count)
        await wait_for(lambda: r.metric("requests_total", finish_reason="length"))  # not held up by the reader
        body = (await reader.read(-1)).split(b"\r\n\r\n", 1)[1]
        chunks = events(dechunked(body).decode())
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a" * count
        assert len(chunks) < count / 2
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        await hang_up(writer)


def dechunked(body: bytes) -> bytes:
    """The content of a body in HTTP chunks."""
    out = b""
    while body:
        size, body = body.split(b"\r\n", 1)
        out, body = out + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return out


@in_loop
async def test_reader_that_stands_still_does_not_hold_up_others(deployment: Deployment) -> None:
    async with rig(deployment.model_copy(update={"max_model_len": 10_000}), send_buffer_bytes=4096) as r:
        _, writer = await send_raw(r, receive_buffer_bytes=4096, stream=True)
        submit = await r.coordinator.next(Submit)
        for _ in range(1500):
            await r.coordinator.tokens((submit.request, 0, 5, Finish.NONE))
        assert (await r.answer(r.complete(), "ok")).status_code == 200
        await hang_up(writer)
        await r.coordinator.next(Abort)


# The end of serving


@in_loop
async def test_nothing_is_taken_before_the_engine_is_up(deployment: Deployment) -> None:
    async with rig(deployment, connected=False) as r:
        for sent in (r.complete(), r.chat(stream=True)):
            response = await sent
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["message"] == "the model is still loading"
        assert (await r.client.get("/v1/models")).status_code == 200


@in_loop
async def test_draining_finishes_open_requests_and_refuses_new_ones(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        running, queued = r.complete(stream=True), r.complete(prompt="b")
        submits = [await r.coordinator.next(Submit) for _ in range(2)]
        r.engine.stop_taking("the server is shutting down")
        refused = await r.complete()
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert (await r.client.get("/health/ready")).status_code == 503
        assert (await r.client.get("/health/live")).status_code == 200
        for submit in submits:
            await r.coordinator.generate(submit, r.ids("the end"))
        assert events((await running).text)[-1]["choices"][0]["finish_reason"] == "length"
        assert (await queued).json()["choices"][0]["text"] == "the end"
        await r.engine.idle()


@in_loop
async def test_stopping_ends_every_request_with_one_error(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        stream, whole = r.complete(stream=True), r.complete(prompt="b")
        submits = {tuple(s.prompt.tolist()): s for s in [await r.coordinator.next(Submit) for _ in range(2)]}
        await r.coordinator.tokens((submits[tuple(r.ids("the fox"))].request, 0, r.ids("a")[0], Finish.NONE))
        await wait_for(lambda: r.metric("generated_tokens_total"))
        await r.client.get("/health/live")  # a round trip, after which the first event is out
        r.engine.fail_all("rank 1 died at step 7")
        body = (await stream).text
        assert '"text":"a"' in body
        assert body.count("rank 1 died at step 7") == body.count('data: {"error"') == 1
        assert "[DONE]" not in body
        assert (await whole).status_code == 503
        assert (await whole).json()["error"]["message"] == "rank 1 died at step 7"
        assert (await r.complete()).status_code == 503
        await r.engine.idle()


@in_loop
async def test_request_whose_prompt_is_being_made_when_serving_ends_is_refused(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(deployment) as r:
        encode = r.tokenizer.encode

        def slow(text: str, add_special_tokens: bool) -> list[int]:
            r.engine.stop_taking("the server is shutting down")
            return encode(text, add_special_tokens)

        monkeypatch.setattr(r.tokenizer, "encode", slow)
        assert (await r.complete()).status_code == 503
        assert await r.coordinator.is_told_nothing()


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("answer", [CompletionAnswer, partial(ChatAnswer, new_parser=PlainMessage)])
def test_answer_that_was_cut_has_no_reason_to_have_ended(
    tokenizer: Tokenizer, deployment: Deployment, reason: str, answer: Callable[..., Answer]
) -> None:
    request = completion_request({"prompt": [5]}, 0, 310)
    generation = Generation(request, [np.array([5], "<i4")], 0.0)
    generation.records.append(new_record(generation, 0, 1, tokenizer, deployment))
    (choice,) = generation.choices()
    choice.add(tokenizer.encode("a", False)[0], Finish.NONE, 1.0, None)
    choice.finish_reason = reason
    deltas = answer("small", generation, tokenizer).deltas(choice, choice.take())
    assert deltas
    assert not any(delta["finish_reason"] for delta in deltas)
