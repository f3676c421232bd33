"""Every error an HTTP client can get, and OpenAI's shape for it.

ApiError
├── InvalidRequest   400  the body is wrong; `param` names the field
├── UnknownModel     404
├── BodyTooSlow      408
├── BodyTooLarge     413
├── Unavailable      503  not now: try again, or elsewhere
└── EngineFault      500  the request failed through no fault of the client
"""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.responses import JSONResponse

_RETRY_AFTER_S = 5
_MOST_SHOWN = 100  # characters


class ApiError(Exception):
    """An answer that is an error. `message` is for the client: what is wrong, with names and numbers."""

    status = 500
    type = "server_error"
    headers: ClassVar[dict[str, str] | None] = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

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


class UnknownModel(ApiError):
    """The model of the request is not served here."""

    status = 404
    type = "invalid_request_error"


class BodyTooSlow(ApiError):
    """The body did not come in time."""

    status = 408
    type = "invalid_request_error"


class BodyTooLarge(ApiError):
    """The body has more bytes than any request needs."""

    status = 413
    type = "invalid_request_error"


class Unavailable(ApiError):
    """The server takes no requests now: it is loading or ending."""

    status = 503
    headers: ClassVar[dict[str, str] | None] = {"Retry-After": str(_RETRY_AFTER_S)}


class EngineFault(ApiError):
    """The request could not be computed."""


def shown(text: str) -> str:
    """What a client sent, cut to a length that an error message can repeat."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}
