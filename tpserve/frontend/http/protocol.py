"""HTTP/1.1 as uvicorn speaks it with h11, and what is done about requests that never become one."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpserve.frontend.errors import ApiError, HeadersTooLarge, InvalidRequest, RequestTooSlow
from tpserve.frontend.http.access import REQUEST_ID, new_request_id

logger = logging.getLogger("tpserve")

MAX_HEADER_BYTES = 64 * 1024
HEADERS_S = 30.0  # for the head of a request to come in
_FAREWELL_S = 2.0  # for a refused client to read its answer
_READ_BYTES = 8 * 1024


class Protocol(H11Protocol):
    """One connection. Its errors have OpenAI's shape; a head that does not come in time ends it.

    One on which nothing was asked at all is only closed: load balancers and browsers open some in advance, and would take
    an error for the answer to what they ask next.
    """

    _is_refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """It is there; the first request has to follow."""
        # What is read at once is parsed at once, be it in chunks of a byte, and meanwhile nobody else is served.
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports, for want of an interface
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some of a request."""
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Let time run while the head of a request is incomplete."""
        if self.conn.their_state is not h11.IDLE and not self._is_refused:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self._on_late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        if not self.conn.trailing_data[0]:  # what has come of a head
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(RequestTooSlow(f"the headers did not come within {HEADERS_S:g} s"))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when h11 has raised."""
        error = sys.exc_info()[1]
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(HeadersTooLarge(f"the request's headers have more than {MAX_HEADER_BYTES} bytes"))
        else:
            self._refuse(InvalidRequest(f"not HTTP: {str(error).partition(':')[0]}"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request, and hang up once the client has read it: what it still sends would lose it the answer."""
        logger.debug("refused a connection: %s", error.message)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way
            self.transport.close()
            return
        body = json.dumps(error.body()).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        head = h11.Response(
            status_code=error.status,
            headers=[*headers.items(), (REQUEST_ID, new_request_id())],
            reason=HTTPStatus(error.status).phrase,
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        self._unwatch()
        self._timer = self.loop.call_later(_FAREWELL_S, self.transport.close)
        self.transport.write_eof()
