"""A server that answers chats as the test says, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIMIT_S = 20.0
HOLD = b""  # in a script: send nothing more until the client hangs up


def delta(**fields: Any) -> bytes:
    """A chunk of an answer."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def event(data: Any) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
CUT = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})


def error(message: str) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


class Stub:
    """`script` is what a stream sends, part by part."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.key = ""
        self.models: tuple[int, Any] = (200, {"data": [{"id": "one"}, {"id": "two"}]})
        self.refusal: tuple[int, Any] | None = None
        self.script = [delta(content="Hello"), delta(content=" there."), FINISH, DONE]
        self.bodies: list[Any] = []
        self.hung_up = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        self._send(*self.stub.models)

    def do_POST(self) -> None:
        self.stub.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.stub.refusal is not None:
            return self._send(*self.stub.refusal)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for part in self.stub.script:
            if part is not HOLD:
                self.wfile.write(part)
                continue
            self.connection.settimeout(LIMIT_S)
            assert self.connection.recv(1) == b""
            self.stub.hung_up.set()
        return None

    def _send(self, status: int, content: Any) -> None:
        if self.stub.key and self.headers["Authorization"] != f"Bearer {self.stub.key}":
            status, content = 401, error("this key is not known")
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """No lines on stderr."""


@contextmanager
def serve() -> Iterator[Stub]:
    """A stub on a free port."""
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.stub = Stub(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield handler.stub
        finally:
            server.shutdown()
            thread.join()
