"""The OpenAPI document of what is served, and the page that shows it, with all that it needs from this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from tpserve import __version__
from tpserve.frontend.body import ChatBody, CompletionBody
from tpserve.frontend.http.tokenize import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_ABOUT = """One language model behind OpenAI's API.

Each answer has the header `X-Request-Id`: the request's own, or a new one. Where a request has fields that nobody
knows, `X-Ignored-Fields` lists them."""
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or one that is not known.",
    404: "The model is not served here.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` tells for how many seconds.",
    500: "The server failed on this request.",
    503: "Not now: the server is loading or ending, or the request has waited too long.",
}
_GENERATE = (400, 404, 408, 413, 429, 500, 503)


class Error(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: Error


class Usage(BaseModel):
    """Tokens of prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class Completion(_Answer):
    """Answer of /v1/completions: each choice has index, text, logprobs and finish_reason."""

    object: Literal["text_completion"]


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions: each choice has index, message, logprobs and finish_reason."""

    object: Literal["chat.completion"]


class Model(BaseModel):
    """A name that the model is served under."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class Models(BaseModel):
    """All names."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(BaseModel):
    """A prompt's ids, and their spellings if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of ids."""

    prompt: str


class Version(BaseModel):
    """The server's version."""

    version: str


class Live(BaseModel):
    """The server answers."""

    status: Literal["live"]


class HealthBody(BaseModel):
    """What every rank shows."""

    status: Literal["ready", "loading", "stalled", "stopping"]
    epoch: int
    ranks: list[dict[str, Any]] = Field(description="rank, pid, last_step, age_s of each")


Operation = dict[str, Any]  # keywords of FastAPI's decorators


def generates(body: type[BaseModel], answer: type[BaseModel]) -> Operation:
    """An operation that answers whole, or with `stream` as server-sent events."""
    return _posts(body, {200: {"model": answer, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}, _GENERATE)


def converts(body: type[BaseModel], answer: type[BaseModel]) -> Operation:
    """An operation that computes something of its body."""
    return _posts(body, {200: {"model": answer}}, (400, 404, 408, 413, 500))


def reads(answer: type[BaseModel], *errors: int) -> Operation:
    """An operation without a body."""
    return {"responses": {200: {"model": answer}, **_errors(errors)}}


def _posts(body: type[BaseModel], answers: dict[int, Any], errors: Iterable[int]) -> Operation:
    schema = {"$ref": _REF.format(model=body.__name__)}
    request = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"openapi_extra": {"requestBody": request}, "responses": {**answers, **_errors(errors)}}


def _errors(statuses: Iterable[int]) -> dict[int, Any]:
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}


NAME: dict[str, Any] = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}


def new_app(has_keys: bool, is_open: Callable[[str], bool]) -> FastAPI:
    """An application without routes but for /docs and /openapi.json, which will show those that it gets."""
    app = FastAPIOffline(
        title="tpserve",
        redoc_url=None,
        static_url="/docs/assets",
        redirect_slashes=False,
        swagger_ui_parameters={"validatorUrl": None, "persistAuthorization": True},
    )
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app, is_open if has_keys else None))
        return made

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI has it done
    return app


def _document(app: FastAPI, is_open: Callable[[str], bool] | None) -> dict[str, Any]:
    document = get_openapi(title="tpserve", version=__version__, description=_ABOUT, routes=app.routes)
    bodies = [(body, "validation") for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]  # its list is invariant
    document["components"]["schemas"].update(definitions["$defs"])
    if is_open is not None:
        _ask_for_keys(document, is_open)
    return document


def _ask_for_keys(document: dict[str, Any], is_open: Callable[[str], bool]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    refusal = {
        "description": _ERRORS[401],
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="ErrorBody")}}},
    }
    for path, operations in document["paths"].items():
        for operation in operations.values() if not is_open(path) else ():
            operation["security"] = [{"key": []}]
            operation["responses"]["401"] = refusal
