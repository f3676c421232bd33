"""The HTTP routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from tpserve.board import Board
from tpserve.deployment import Deployment
from tpserve.frontend import health, schema
from tpserve.frontend.answers import Answer, ChatAnswer, CompletionAnswer, model_list
from tpserve.frontend.engine import Engine
from tpserve.frontend.errors import (
    ApiError,
    BodyTooLarge,
    BodyTooSlow,
    EngineFault,
    InvalidRequest,
    Unavailable,
    UnknownModel,
    error_body,
    shown,
)
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.prompts import PromptMaker
from tpserve.frontend.records import Generation
from tpserve.frontend.responses import GenerationResponse
from tpserve.sampling import SamplingDefaults

logger = logging.getLogger("tpserve")

MAX_BODY_BYTES = 8 * 2**20
BODY_S = 60  # for a body to come in


@dataclass(frozen=True)
class Service:
    """What the routes need."""

    deployment: Deployment
    board: Board
    engine: Engine
    metrics: Metrics
    prompts: PromptMaker
    executor: Executor  # where bodies become prompts

    def health(self) -> health.Health:
        """The state now."""
        return health.check(self.board, self.engine, self.deployment.settings.step_timeout)


_ToRequest = Callable[[dict[str, Any], int | None, int, SamplingDefaults], schema.GenerateRequest]


def create_app(service: Service) -> FastAPI:
    """The application. It keeps no state of its own."""
    app = FastAPI(title="tpserve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    started = int(time.time())
    deployment = service.deployment

    def listing(names: tuple[str, ...]) -> dict[str, Any]:
        return model_list(names, started, deployment.max_model_len, deployment.spec.vocab_size)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(service, request, schema.completion_request, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, schema.chat_request, ChatAnswer)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(listing(deployment.served_names))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(listing((_model(name, deployment.served_names),))["data"][0])

    @app.head("/health/live")
    @app.get("/health/live")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @app.head("/health")
    @app.head("/health/ready")
    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        state = service.health()
        return JSONResponse(asdict(state), 200 if state.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    return app


async def _generate(service: Service, request: Request, to_request: _ToRequest, answer: type[Answer]) -> Response:
    """Both endpoints: the body becomes a request and its prompts, off the event loop; the response then generates."""
    arrived = time.monotonic()
    service.engine.check_open()
    body = await _read_body(request)
    loop = asyncio.get_running_loop()
    model, wanted, prompts = await loop.run_in_executor(service.executor, _understand, service, body, to_request)
    generation = Generation(wanted, prompts, arrived)
    return GenerationResponse(service.engine, generation, answer(model, wanted.include_usage))


def _understand(service: Service, body: bytes, to_request: _ToRequest) -> tuple[str, schema.GenerateRequest, list[np.ndarray]]:
    """The name to answer under, the request, and the ids of its prompts. Raises ApiError."""
    deployment = service.deployment
    fields = schema.parse_json(body)
    model = _model(fields.get("model"), deployment.served_names)  # before all else: it may be another server's request
    wanted = to_request(fields, deployment.settings.seed, deployment.spec.vocab_size, deployment.sampling)
    return model, wanted, service.prompts.prompts(wanted)


async def _read_body(request: Request) -> bytes:
    """The body, never holding more of it than is allowed. Raises BodyTooLarge, BodyTooSlow, Unavailable."""
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
        raise BodyTooSlow(f"the body did not come within {BODY_S} s") from None
    except asyncio.CancelledError:  # by uvicorn, which waits no longer for uploads when the server ends
        raise Unavailable("the server is shutting down") from None
    return bytes(body)


def _model(asked: object, served_names: tuple[str, ...]) -> str:
    """The name to answer under; the first when none is asked for."""
    if asked is None:
        return served_names[0]
    if not isinstance(asked, str):
        raise InvalidRequest("model: must be a string", "model")
    if asked in served_names:
        return asked
    served = ", ".join(served_names)
    raise UnknownModel(f"the model {shown(asked)!r} is not served here; served: {served}", "model", "model_not_found")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router says: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {shown(request.url.path)}"
    message = {404: f"{what}: no such endpoint", 405: f"{what}: wrong method"}.get(error.status_code, error.detail)
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client went before it had sent its body; nobody reads this."""
    return Response(status_code=400)


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault in one request's work. The traceback goes to the log, not to the client."""
    return EngineFault(f"the server failed on this request ({type(error).__name__})").response()
