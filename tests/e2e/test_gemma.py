"""A real Gemma 3 (270M, base) from its GGUF file, served at TP 1 to 4: float32 gives the reference texts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import gemma
from tests.server import Server

pytestmark = pytest.mark.slow

# From transformers: bfloat16 weights, float32 arithmetic, greedy.
TEXTS = {
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10, 11, 12,",
    "The chemical symbol for gold is": (
        " Au.\n\nThe formula for gold is Au.\n\nAu is a yellow metal.\n\nAu is a metal that is"
    ),
    "def fibonacci(n):\n    ": "if n == 0:\n        return 0\n    elif n == 1:\n        return 1",
}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ("--tp", str(request.param), "--dtype", "float32", "--kv-cache-memory", "128MiB", "--max-model-len", "512")
    with Server("--model", str(gemma.gguf_path()), *flags) as server:
        yield server


def test_texts_are_the_references(server: Server) -> None:
    with server.client() as client:
        body = {"prompt": list(TEXTS), "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in answer["choices"]] == list(TEXTS.values())
        counting = client.post("/v1/completions", json={"prompt": "1, 2, 3, 4, 5,", "max_tokens": 1, "temperature": 0}).json()
        assert counting["usage"]["prompt_tokens"] == 15  # its beginning-of-text id among them
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert chat.status_code == 400
        assert "chat template" in chat.json()["error"]["message"]
