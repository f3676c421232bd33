"""Every error an HTTP client can get, and OpenAI's shape for it.

ApiError
├── InvalidRequest    400  the body is wrong; `param` names the field
├── Unauthorized      401  no key, or a wrong one
├── UnknownModel      404
├── RequestTooSlow    408
├── BodyTooLarge      413
├── HeadersTooLarge   431
├── TooManyRequests   429  the queue is full: try again later
├── Unavailable       503  not now: try again, or elsewhere
└── EngineFault       500  the request failed through no fault of the client
"""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

RETRY_AFTER_S = 5.0
_MOST_SHOWN = 100  # characters


class ApiError(Exception):
    """An answer that is an error. `message` is for the client: what is wrong, with names and numbers."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.message, self.type, self.param, self.code)

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        return JSONResponse(self.body(), self.status, self.headers)


class InvalidRequest(ApiError):
    """The client must change the request."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    """The request has no key that the server knows."""

    status = 401
    type = "invalid_request_error"

    def __init__(self, message: str):
        super().__init__(message, code="invalid_api_key")
        self.headers = {"WWW-Authenticate": "Bearer"}


class UnknownModel(ApiError):
    """The model of the request is not served here."""

    status = 404
    type = "invalid_request_error"


class RequestTooSlow(ApiError):
    """The request's head, or its body, did not come in time."""

    status = 408
    type = "invalid_request_error"


class BodyTooLarge(ApiError):
    """The body has more bytes than any request needs."""

    status = 413
    type = "invalid_request_error"


class HeadersTooLarge(ApiError):
    """The request's head has more bytes than any request needs."""

    status = 431
    type = "invalid_request_error"


class _Later(ApiError):
    """It may go well in some seconds."""

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = RETRY_AFTER_S):
        super().__init__(message, code=code)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class TooManyRequests(_Later):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"


class Unavailable(_Later):
    """The server takes no requests now, since it is loading or ending; or the request has waited too long."""

    status = 503


class EngineFault(ApiError):
    """The request could not be computed."""


def shown(text: str) -> str:
    """What a client sent, cut to a length that an error message can repeat."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}
