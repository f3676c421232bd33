"""A small endpoint that speaks the Hub's API over HTTP, for the real client to talk to.

It answers what a model consists of (`/api/models/ID/revision/REV`), and files (`/ID/resolve/REV/FILE`): small ones
itself, weights by a redirect to another host, with ranges, as the Hub's storage does.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf", ".pt", ".onnx")


def commit_of(number: int) -> str:
    return f"{number:040x}"


@dataclass
class Repository:
    """Files by commit, and the commit of each branch or tag."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    access: str = "public"  # or gated, private

    @classmethod
    def of_folder(cls, folder: Path, **more: bytes) -> Repository:
        """A repository of one commit on main: the folder's files and more of them."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return cls({commit_of(1): files | more}, {"main": commit_of(1)})

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.revisions.get(revision)


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Endpoint:
    """The running endpoint. Tests change what it has and does between requests, and read what it was asked."""

    url: str
    storage: str  # where weights are redirected to
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)  # the files whose content was asked for, in order
    token: str = "hf_right"
    status: int = 0  # answer every request with this
    page: bytes = b""  # answer every request with this page
    cut_bytes: int = 0  # break off the next body of the storage after so many bytes
    missing_bytes: int = 0  # leave out so many at the end of what the storage has
    before_body: Callable[[], object] = lambda: None  # called before the storage sends a body
    after_listing: Callable[[], object] = lambda: None  # called when files have been listed


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """An endpoint on a free port of loopback."""
    server = _Server(("127.0.0.1", 0), _Handler)
    port = server.server_address[1]
    running = Endpoint(f"http://127.0.0.1:{port}", f"http://localhost:{port}")
    server.endpoint = running  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may hang up
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet: else each waits for the client's delayed acknowledgement

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        here = self._endpoint()
        here.requests.append(Request(self.command, path, {name.lower(): value for name, value in self.headers.items()}))
        if here.status:
            return self._send(here.status, b"{}")
        if here.page:
            return self._send(200, here.page)
        if match := re.fullmatch(r"/storage/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            return self._storage(match[3], here.repositories[match[1]].commits[match[2]][match[3]])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._model(match[1], match[2] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[2], match[3])
        return self._send(404, b"no such page")

    def _endpoint(self) -> Endpoint:
        found: Endpoint = self.server.endpoint  # type: ignore[attr-defined]
        return found

    def _model(self, name: str, revision: str) -> None:
        if (found := self._look_up(name, revision, files=False)) is None:
            return None
        repository, commit = found
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": _git_hash(content)} | _large(name, content)
            for name, content in repository.commits[commit].items()
        ]
        self._send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
        self._endpoint().after_listing()

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (found := self._look_up(name, revision, files=True)) is None:
            return None
        repository, commit = found
        content = repository.commits[commit].get(file)
        if content is None:
            return self._send(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_hash(content)}"'}
        if not file.endswith(LARGE):
            self._note(file)
            return self._send(200, content, headers)
        headers |= {
            "X-Linked-ETag": f'"{_sha256(content)}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self._endpoint().storage}/storage/{name}/{commit}/{file}",
        }
        return self._send(302, b"", headers)

    def _look_up(self, name: str, revision: str, files: bool) -> tuple[Repository, str] | None:
        """The repository and the commit, or None after an answer that says what is wrong, as the Hub says it."""
        repository = self._endpoint().repositories.get(name)
        authorization = self.headers.get("Authorization")
        allowed = authorization == f"Bearer {self._endpoint().token}"
        if authorization and not allowed:
            message = "Invalid credentials in Authorization header"
            return self._send(401, b"", {"X-Error-Message": message})
        if repository is None or (repository.access == "private" and not allowed):
            code = 404 if allowed else 401  # who is not known is not told more
            return self._send(code, b"", {"X-Error-Code": "RepoNotFound"} if allowed else {})
        if files and repository.access == "gated" and not allowed:
            return self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        commit = repository.commit(revision)
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return repository, commit

    def _storage(self, file: str, content: bytes) -> None:
        here = self._endpoint()
        self._note(file)
        here.before_body()
        content = content[: len(content) - here.missing_bytes]
        start = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        most, here.cut_bytes = here.cut_bytes or None, 0
        self.close_connection = most is not None
        self._send(206 if start else 200, content[start:], headers, most)

    def _note(self, file: str) -> None:
        if self.command == "GET":
            self._endpoint().sent.append(file)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, most: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:most])


def _large(name: str, content: bytes) -> dict[str, Any]:
    return {"lfs": {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}} if name.endswith(LARGE) else {}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
