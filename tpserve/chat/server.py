"""A running server as a client sees it: the models that it serves, and one streamed answer at a time."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from tpserve.settings import UserError

_CONNECT_S = 10.0  # an answer itself may take any time: a long prompt, a full queue
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters but tab and line end


def harmless(text: str) -> str:
    """What a server says, without what would steer a terminal."""
    return _STEERING.sub("", text)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


class AnswerError(Exception):
    """The answer was refused or broke off; the text says why, in one line."""


class Server:
    """An OpenAI-compatible server at `url`, with or without its /v1."""

    def __init__(self, url: str, key: str | None):
        self.url = _address(url)
        self._http = httpx2.Client(
            base_url=f"{self.url}/v1/",
            headers=_authorization(key),
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            trust_env=httpx2.URL(self.url).host not in _LOOPBACK,  # no proxy leads back to this machine
        )

    def models(self) -> list[str]:
        """The names of what it serves. Raises UserError if it cannot be used."""
        try:
            answer = self._http.get("models", timeout=_CONNECT_S)
        except httpx2.TransportError as error:
            remedy = "start one with tpserve launch, or say where it is with --url"
            raise UserError(f"no server answers at {self.url} ({_reason(error)}); {remedy}") from None
        if answer.status_code in (401, 403):
            raise UserError(f"the server at {self.url} wants a key in --api-key or TPSERVE_API_KEY: {_message(answer)}")
        try:
            return [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, LookupError, TypeError):
            what = f"GET /v1/models answers with status {answer.status_code}"
            raise UserError(f"--url {self.url}: no OpenAI-compatible server: {what}") from None

    def choose(self, wanted: str | None) -> str:
        """The model to talk to: the one that is wanted, else the first. Raises UserError."""
        served = self.models()
        if not served or (wanted is not None and wanted not in served):
            raise UserError(
                f"the model {wanted or ''} is not served at {self.url}; served: {harmless(', '.join(served)) or 'none'}"
            )
        return wanted or served[0]

    def answer(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The answer to a body of /v1/chat/completions, as it comes. Raises AnswerError."""
        try:
            with self._http.stream("POST", "chat/completions", json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise AnswerError(_message(response))
                yield from _pieces(httpx2.EventSource(response))
        except httpx2.TransportError as error:
            raise AnswerError(f"the connection broke: {_reason(error)}") from None


def _authorization(key: str | None) -> dict[str, str]:
    """The header that carries the first of the keys, which TPSERVE_API_KEY may hold several of."""
    first, *_ = (key or "").split() or [""]
    if not (first.isascii() and first.isprintable()):
        raise UserError("--api-key: wants printable ASCII characters")
    return {"Authorization": f"Bearer {first}"} if first else {}


def _address(url: str) -> str:
    """The server's root, such as http://127.0.0.1:8000."""
    try:
        parsed = httpx2.URL(url if "://" in url else f"http://{url}")
    except httpx2.InvalidURL as error:
        raise UserError(f"--url {url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise UserError(f"--url {url}: wants an address such as http://127.0.0.1:8000")
    return str(parsed).rstrip("/").removesuffix("/v1")


def _pieces(events: httpx2.EventSource) -> Iterator[Piece]:
    for event in events:
        if event.data == "[DONE]":
            return
        try:
            chunk = event.json()
            error = chunk.get("error")  # type: ignore[attr-defined]
            pieces = [_piece(choice) for choice in chunk.get("choices") or []]  # type: ignore[attr-defined]
        except (ValueError, AttributeError, TypeError):
            raise AnswerError(f"the server sent what is no chunk of an answer: {event.data[:100]!r}") from None
        if error:
            raise AnswerError(_error_text(error))
        yield from pieces
    raise AnswerError("the answer broke off before its end")


def _piece(choice: Any) -> Piece:
    """Of a chunk's choice. Raises AttributeError or TypeError for what is none."""
    delta = choice.get("delta") or {}
    text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
    if not (isinstance(text, str) and isinstance(reasoning, str)):
        raise TypeError("a text is no string")
    return Piece(text, reasoning, choice.get("finish_reason"))


def _message(response: httpx2.Response) -> str:
    """What an answer with an error says, in one line."""
    try:
        return _error_text(response.json()["error"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}"


def _error_text(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return harmless(" ".join(str(text).split()))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
