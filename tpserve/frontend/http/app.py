"""The HTTP routes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from tpserve import __version__
from tpserve.deployment import Deployment
from tpserve.frontend import schema
from tpserve.frontend.answers import Answer, ChatAnswer, CompletionAnswer, model_list
from tpserve.frontend.body import ChatBody, CompletionBody
from tpserve.frontend.errors import ApiError, EngineFault, error_body, shown
from tpserve.frontend.http import auth, json_body, openapi, paths, upload
from tpserve.frontend.http.access import IGNORED_FIELDS, REQUEST_ID, Access
from tpserve.frontend.http.responses import GenerationResponse
from tpserve.frontend.http.service import Service
from tpserve.frontend.http.tokenize import DetokenizeBody, TextMaker, TokenizeBody
from tpserve.frontend.http.understand import ToRequest, Understood, check_ignored, model_name, understand
from tpserve.frontend.records import Generation

_ToAnswer = Callable[[Understood, Generation], Answer]
_Convert = Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]


def create_app(service: Service) -> ASGIApp:
    """The application. It keeps no state of its own."""
    app = openapi.new_app(bool(service.deployment.keys), auth.is_open)
    _add_generation(app, service)
    _add_conversions(app, service)
    _add_models(app, service.deployment)
    _add_monitoring(app, service)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    return _wrapped(app, service.deployment)


def _wrapped(app: ASGIApp, deployment: Deployment) -> ASGIApp:
    """With what concerns every request, the innermost first: browsers ask for CORS without a key, and want its headers
    on errors too.
    """
    if deployment.keys:
        app = auth.Auth(app, deployment.keys)
    if origins := deployment.settings.allowed_origins:
        shown_headers = [REQUEST_ID, IGNORED_FIELDS, "Retry-After"]
        app = CORSMiddleware(app, origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=shown_headers)
    return Access(app)


def _add_generation(app: FastAPI, service: Service) -> None:
    tokenizer = service.engine.tokenizer

    def completion(understood: Understood, generation: Generation) -> Answer:
        return CompletionAnswer(understood.model, generation, tokenizer)

    def chat(understood: Understood, generation: Generation) -> Answer:
        return ChatAnswer(understood.model, generation, tokenizer, understood.new_parser)

    @app.post("/v1/completions", **openapi.generates(CompletionBody, openapi.Completion))
    async def completions(request: Request) -> Response:
        """Continue prompts, be they texts or token ids."""
        return await _generate(service, request, schema.completion_request, completion)

    @app.post("/v1/chat/completions", **openapi.generates(ChatBody, openapi.ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer the last message of a chat."""
        return await _generate(service, request, schema.chat_request, chat)


def _add_conversions(app: FastAPI, service: Service) -> None:
    deployment = service.deployment
    texts = TextMaker(service.engine.tokenizer, service.prompts, deployment.spec.vocab_size, deployment.max_model_len)

    @app.post("/tokenize", **openapi.converts(TokenizeBody, openapi.Tokenized))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or a chat."""
        return await _convert(service, request, texts.tokenize)

    @app.post("/detokenize", **openapi.converts(DetokenizeBody, openapi.Detokenized))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await _convert(service, request, texts.detokenize)


def _add_models(app: FastAPI, deployment: Deployment) -> None:
    started = int(time.time())

    def listing(names: tuple[str, ...]) -> dict[str, Any]:
        return model_list(names, started, deployment.max_model_len, deployment.spec.vocab_size)

    @_get(app, "/v1/models", **openapi.reads(openapi.Models))
    async def models() -> Response:
        """The model, under each name that it is served by."""
        return JSONResponse(listing(deployment.served_names))

    @_get(app, "/v1/models/{name:path}", openapi_extra=openapi.NAME, **openapi.reads(openapi.Model, 404))
    async def model(request: Request) -> Response:
        """The model under one of its names."""
        name = model_name(request.path_params["name"], deployment.served_names)
        return JSONResponse(listing((name,))["data"][0])

    @_get(app, "/version", **openapi.reads(openapi.Version))
    async def version() -> Response:
        """The version of tpserve."""
        return JSONResponse({"version": __version__})


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @_get(app, "/health/live", **openapi.reads(openapi.Live))
    async def live() -> Response:
        """Whether the server answers at all."""
        return JSONResponse({"status": "live"})

    ready_operation = openapi.reads(openapi.HealthBody)
    ready_operation["responses"][503] = {"model": openapi.HealthBody, "description": "Not ready."}

    @_get(app, "/health", **ready_operation)
    @_get(app, "/health/ready", **ready_operation)
    async def ready() -> Response:
        """Whether every rank advances or idles, computed from what they show."""
        state = service.health()
        return JSONResponse(asdict(state), 200 if state.is_ready else 503)

    @_get(app, "/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters and timings in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _get(app: FastAPI, path: str, **operation: Any) -> Callable[[Any], Any]:
    """A route for reading. HEAD is answered, too, but not documented."""
    return lambda handler: app.head(path, include_in_schema=False)(app.get(path, **operation)(handler))


async def _generate(service: Service, request: Request, to_request: ToRequest, to_answer: _ToAnswer) -> Response:
    """Both endpoints: the body becomes a request and its prompts, off the event loop; the response then generates."""
    arrived = time.monotonic()
    service.engine.check_open()
    body = await upload.read(request)
    understood = await service.threads.run(body, lambda body: understand(service, body, to_request))
    wanted, state = understood.request, request.scope["state"]
    if wanted.grammar:
        await service.grammars.check(wanted.grammar, wanted.constraint)
    priority, max_wait_s = auth.granted(state.get("key"), wanted.priority, service.deployment.settings.queue_timeout)
    generation = Generation(wanted, understood.prompts, arrived, priority, max_wait_s, understood.echoes)
    state |= {"generation": generation, "ignored": wanted.ignored}
    return GenerationResponse(service.engine, generation, to_answer(understood, generation))


async def _convert(service: Service, request: Request, convert: _Convert) -> Response:
    """Both endpoints for text and ids."""

    def answer(body: bytes) -> tuple[bytes, list[str]]:
        fields = json_body.parse(body)
        model_name(fields.get("model"), service.deployment.served_names)
        made, ignored = convert(fields)
        check_ignored(ignored, service.deployment.settings.strict)
        return json.dumps(made, ensure_ascii=False).encode(), ignored

    made, request.scope["state"]["ignored"] = await service.threads.run(await upload.read(request), answer)
    return Response(made, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router says: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    what, code = f"{request.method} {shown(request.url.path)}", None
    message, served = error.detail, {route.path for route in request.app.routes if isinstance(route, Route)}
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            message, code = f"{what}: no such endpoint; {paths.alternative(request.url.path, served)}", "unknown_url"
        case 405:
            headers["Allow"] = _allowed(request)
            message, code = f"{what}: wrong method; allowed: {headers['Allow']}", "method_not_allowed"
    return JSONResponse(error_body(message, "invalid_request_error", None, code), error.status_code, headers)


def _allowed(request: Request) -> str:
    """The methods of all routes of the request's path: the router names those of the first."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in fitting for method in route.methods or ()})) or "GET, HEAD"  # of a file


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client went before it had sent its body; nobody reads this."""
    return Response(status_code=400)


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault in one request's work. The traceback goes to the log, not to the client."""
    return EngineFault(f"the server failed on this request ({type(error).__name__})").response()
