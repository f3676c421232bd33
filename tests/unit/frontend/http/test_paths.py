"""What is told of paths that are not served."""

from __future__ import annotations

import pytest

from tpserve.frontend.http.paths import alternative

SERVED = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/version", "/health", "/docs", "/metrics"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/completions/", "use /v1/completions"),
        ("//v1//completions", "use /v1/completions"),
        ("/chat/completions", "use /v1/chat/completions"),
        ("/models/", "use /v1/models"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/v1/tokenize", "use /tokenize"),
        ("/v1/engines/davinci/completions", "use /v1/completions"),
        ("/v1/responses", "use /v1/chat/completions"),
        ("/v1/responses/resp_1", "use /v1/chat/completions"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/api/tags", "use /v1/models"),
        ("/generate", "use /v1/completions"),
        ("/generate_stream", "use /v1/completions"),
        ("/completion", "use /v1/completions"),
        ("/v1/embeddings", "this server generates text only, at /v1/chat/completions and /v1/completions"),
        ("/v1/audio/speech", "this server generates text only, at /v1/chat/completions and /v1/completions"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/tokenise", "did you mean /tokenize?"),
        ("/healthz", "use /health"),
        ("/", "/docs lists what there is"),
        ("/nothing", "/docs lists what there is"),
        ("/" + "x" * 100_000, "/docs lists what there is"),
    ],
)
def test_path_that_is_not_served_names_what_is(path: str, says: str) -> None:
    assert alternative(path, SERVED) == says
