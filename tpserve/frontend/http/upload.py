"""Taking in a request's body: bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from tpserve.frontend.errors import BodyTooLarge, RequestTooSlow, Unavailable

MAX_BODY_BYTES = 8 * 2**20
BODY_S = 60  # for a body to come in


async def read(request: Request) -> bytes:
    """The body, never holding more of it than is allowed. Raises BodyTooLarge, RequestTooSlow, Unavailable."""
    announced = request.headers.get("content-length", "")
    body = bytearray()
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body has {announced} bytes; {MAX_BODY_BYTES} is the most")
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise RequestTooSlow(f"the body did not come within {BODY_S} s") from None
    except asyncio.CancelledError:  # by uvicorn, which waits no longer for uploads when the server ends
        raise Unavailable("the server is shutting down") from None
    return bytes(body)
