"""Sending the answer of an open generation, while watching whether its client is still there."""

from __future__ import annotations

import asyncio
import contextlib

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpserve.frontend.answers import Answer, event
from tpserve.frontend.engine import Engine
from tpserve.frontend.records import Generation

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies would collect the events
]


_WATCH_S = 0.5


class GenerationResponse(Response):
    """Runs a generation and sends its answer, whole or as it comes.

    Sending waits for the client, so one that reads slowly gets more text in each event; nothing queues up but
    the text itself.
    """

    def __init__(self, engine: Engine, generation: Generation, answer: Answer):
        super().__init__()
        self._engine = engine
        self._generation = generation
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError for an error that comes before the first byte."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            self._engine.submit(self._generation)
            if self._generation.request.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            watch.cancel()
            self._engine.finish(self._generation)

    async def _watch(self, receive: Receive) -> None:
        """Notice that the client hangs up, whatever the handler is waiting for."""
        message = None
        while message is None or message["type"] != "http.disconnect":
            # Asked again and again: uvicorn stops reading, and so sees no end, after bytes that follow the body.
            with contextlib.suppress(TimeoutError):
                message = await asyncio.wait_for(receive(), _WATCH_S)
        self._engine.hang_up(self._generation)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        while not generation.is_over:
            await generation.changes()
        if generation.error is not None:
            raise generation.error
        if not generation.hung_up:
            content = await asyncio.to_thread(self._rendered)
            await Response(content, media_type="application/json")(scope, receive, send)

    def _rendered(self) -> bytes:
        """The whole answer. With many logprobs it takes a while, in which others are served."""
        return to_json(self._answer.whole())

    async def _stream(self, send: Send) -> None:
        """Headers go out with the first news: what fails before it still gets a status code of its own."""
        news, is_last = await self._news()
        if self._generation.error is not None:
            raise self._generation.error
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        while not is_last:
            if news:
                await send({"type": "http.response.body", "body": news, "more_body": True})
            news, is_last = await self._news()
        await send({"type": "http.response.body", "body": news + self._last_events(), "more_body": False})

    async def _news(self) -> tuple[bytes, bool]:
        """Events for all that came since the last call, and whether nothing comes after them."""
        news = [(choice, choice.take()) for choice in await self._generation.changes()]
        is_over = self._generation.is_over
        if self._generation.request.prompt_likeliest < 0:
            return self._answer.events(news), is_over
        return await asyncio.to_thread(self._answer.events, news), is_over

    def _last_events(self) -> bytes:
        """The end of the stream. After an error no [DONE] follows: it would tell clients that the answer is whole."""
        if self._generation.error is not None:
            return event(self._generation.error.body())
        return self._answer.last_events()
