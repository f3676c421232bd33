"""Keys of clients: who may use the server, and what their requests are granted."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tpserve import keys
from tpserve.deployment import ApiKey
from tpserve.frontend.errors import Unauthorized

_OPEN = ("/health", "/metrics", "/docs", "/openapi.json")  # with what lies below them: for monitors, and for reading


class Auth:
    """ASGI middleware: without a known key only what is open is served. The key is left in the request's state."""

    def __init__(self, app: ASGIApp, known: Sequence[ApiKey]):
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 401."""
        if not is_open(scope["path"]):
            try:
                scope["state"]["key"] = self._key(Headers(scope=scope).get("authorization"))
            except Unauthorized as error:
                return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)

    def _key(self, authorization: str | None) -> ApiKey:
        if authorization is None:
            raise Unauthorized("no API key: send the header Authorization: Bearer KEY")
        scheme, _, sent = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("the header Authorization must be Bearer and the API key")
        digest, found = keys.digest(sent.strip()), None
        for key in self._known:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthorized("the API key is not known here")
        return found


def is_open(path: str) -> bool:
    """Whether it is served without a key."""
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in _OPEN)


def granted(key: ApiKey | None, asked_priority: int | None, queue_timeout_s: float | None) -> tuple[int, float]:
    """(Priority, seconds that it may wait in the queue or 0 for no limit) of a request.

    The key's are the most that it gets: it can ask to be less urgent.
    """
    asked = [priority for priority in (key.priority if key else None, asked_priority) if priority is not None]
    limits = [limit for limit in (queue_timeout_s, key.max_wait_s if key else None) if limit]
    return max(asked, default=0), min(limits, default=0.0)
