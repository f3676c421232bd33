"""What is sent to the port and is no request, or none in time."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.frontend.rig import LIMIT_S, in_loop, rig
from tpserve.deployment import Deployment
from tpserve.frontend.http import protocol

LARGE = protocol.MAX_HEADER_BYTES + 100_000


async def answer(port: int, data: bytes) -> tuple[int, dict[str, object]]:
    """Status and body of what comes until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    head, _, body = (await asyncio.wait_for(reader.read(), LIMIT_S)).partition(b"\r\n\r\n")
    writer.close()
    assert b"X-Request-Id: " in head
    return int(head.split()[1]), json.loads(body)["error"]


@in_loop
@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * LARGE, 431, "headers have more than 65536 bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * (LARGE // 6) + b"\r\n", 431, "headers have more than"),
        (b"GET /" + b"b" * LARGE, 431, "headers have more than"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "not HTTP: illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "not HTTP: Missing mandatory Host"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, "not HTTP: bad Content-Length"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "illegal chunk header"),
    ],
)
async def test_what_is_no_request_is_refused_at_once(deployment: Deployment, data: bytes, status: int, says: str) -> None:
    async with rig(deployment) as r:
        found, error = await answer(r.port, data)
        assert found == status
        assert says in str(error["message"])
        assert (await r.client.get("/health/live")).status_code == 200


@in_loop
@pytest.mark.parametrize(
    "begun", [b"G", b"GET /health/live HT", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost"]
)
async def test_head_that_does_not_come_in_time_ends_the_connection(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.05)
    async with rig(deployment) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(begun)
        if begun.count(b"Host") == 2:
            assert b"200 OK" in await reader.readuntil(b'"live"}')
            writer.write(b": x")
        got = await asyncio.wait_for(reader.read(), LIMIT_S)
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"the headers did not come within 0.05 s" in got
        writer.close()


@in_loop
async def test_connection_on_which_nothing_is_asked_is_closed_without_a_word(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.05)
    async with rig(deployment) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()


@in_loop
async def test_idle_connection_is_kept_between_requests(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.05)
    async with rig(deployment) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        for _ in range(2):
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b'"live"}')
            await asyncio.sleep(0.15)  # what is tested
        writer.close()
