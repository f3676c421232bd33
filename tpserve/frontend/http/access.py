"""What every request gets: an id that goes in and out, and a line in the log when it has ended."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpserve import log
from tpserve.frontend import neutral
from tpserve.frontend.errors import shown
from tpserve.frontend.records import Generation

logger = logging.getLogger("tpserve")

REQUEST_ID = "X-Request-Id"
IGNORED_FIELDS = "X-Ignored-Fields"
_HUNG_UP = 499  # in the log, as nginx has it: the client went before there was an answer
_QUIET = re.compile(r"/health(/.*)?|/metrics")  # asked by monitors, every few seconds


class Access:
    """ASGI middleware, the outermost: what is inside finds `request_id` in the request's state, and leaves there
    `key`, `ignored` (fields that nobody knows) and `generation` if there are any.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, and log the end."""
        began, status = time.monotonic(), _HUNG_UP
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = _request_id(Headers(scope=scope).get(REQUEST_ID))

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message, state)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            _log(scope, status, time.monotonic() - began)


def new_request_id() -> str:
    """An id that nobody has had before."""
    return secrets.token_hex(16)


def _request_id(sent: str | None) -> str:
    """The client's, if it is fit to be repeated."""
    return sent if sent and re.fullmatch(r"[\x21-\x7e]{1,128}", sent) else new_request_id()


def _add_headers(message: Message, state: dict[str, Any]) -> None:
    headers = MutableHeaders(scope=message)
    headers[REQUEST_ID] = state["request_id"]
    if ignored := state.get("ignored"):
        headers[IGNORED_FIELDS] = neutral.header(ignored)


def _log(scope: Scope, status: int, latency_s: float) -> None:
    level = logging.DEBUG if _QUIET.fullmatch(scope["path"]) else logging.INFO
    if not logger.isEnabledFor(level):
        return
    state = scope["state"]
    # As it came, percent-encoded: nobody can write lines into the log. The query may hold secrets.
    request = {"method": scope["method"], "path": shown(scope["raw_path"].decode("ascii")), "status": status}
    fields: dict[str, Any] = {"latency_s": round(latency_s, 4)}
    if generation := state.get("generation"):
        fields |= _generated(generation)
    if key := state.get("key"):
        fields["key"] = key.name
    fields["request_id"] = state["request_id"]
    text = " ".join([*map(str, request.values()), *(f"{name}={value}" for name, value in fields.items())])
    logger.log(level, "%s", text, extra=log.with_fields({**request, **fields}))


def _generated(generation: Generation) -> dict[str, Any]:
    """What there is to tell of an answer. A prompt counts once, however many choices it has."""
    choices = [*generation.choices()]
    fields: dict[str, Any] = {}
    if begun := [choice.first_at for choice in choices if choice.ids]:
        fields["ttft_s"] = round(min(begun) - generation.arrived, 4)
    fields["prompt_tokens"] = sum(map(len, generation.prompts))
    fields["completion_tokens"] = sum(len(choice.ids) for choice in choices)
    fields["finish"] = ",".join(sorted({choice.finish_reason or "error" for choice in choices})) or "error"
    return fields
