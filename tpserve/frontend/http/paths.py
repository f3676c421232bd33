"""What to tell of paths that are not served: where clients of other servers find here what they look for."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_CHAT, _COMPLETIONS = "use /v1/chat/completions", "use /v1/completions"
_TEXT_ONLY = "this server generates text only, at /v1/chat/completions and /v1/completions"

# By path, with all that lies below it; the first that fits.
_ELSEWHERE = {
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/threads": _CHAT,
    "/v1/assistants": _CHAT,
    "/v1/conversations": _CHAT,
    "/api/chat": _CHAT,
    "/v1/edits": _COMPLETIONS,
    "/v1/completion": _COMPLETIONS,
    "/completion": _COMPLETIONS,
    "/infill": _COMPLETIONS,
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/api/generate": _COMPLETIONS,
    "/inference": _COMPLETIONS,
    "/invocations": f"{_CHAT}, or /v1/completions",
    "/v1/batches": "send lists of prompts to /v1/completions",
    "/api/tags": "use /v1/models",
    "/api/show": "use /v1/models",
    "/api/version": "use /version",
    "/props": "use /v1/models",
    "/get_model_info": "use /v1/models",
    "/info": "use /v1/models",
    "/slots": "use /metrics",
    "/load": "use /metrics",
    "/server_info": "use /version",
    "/ping": "use /health",
    "/healthz": "use /health",
    "/readyz": "use /health/ready",
    "/livez": "use /health/live",
    "/redoc": "use /docs",
    "/v1/embeddings": _TEXT_ONLY,
    "/embeddings": _TEXT_ONLY,
    "/embedding": _TEXT_ONLY,
    "/api/embed": _TEXT_ONLY,
    "/api/embeddings": _TEXT_ONLY,
    "/pooling": _TEXT_ONLY,
    "/classify": _TEXT_ONLY,
    "/score": _TEXT_ONLY,
    "/v1/score": _TEXT_ONLY,
    "/rerank": _TEXT_ONLY,
    "/v1/rerank": _TEXT_ONLY,
    "/v2/rerank": _TEXT_ONLY,
    "/v1/moderations": _TEXT_ONLY,
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/files": _TEXT_ONLY,
    "/v1/uploads": _TEXT_ONLY,
    "/v1/vector_stores": _TEXT_ONLY,
    "/v1/fine_tuning": _TEXT_ONLY,
}


def alternative(path: str, served: Collection[str]) -> str:
    """What to use in place of a path that is not one of those served."""
    tidy = "/" + "/".join(filter(None, path.split("/")))  # without doubled slashes, nor one at the end
    without_engine = "/" + "/".join(tidy.split("/")[4:]) if tidy.startswith("/v1/engines/") else tidy
    for right in (tidy, f"/v1{tidy}", f"/v1{without_engine}", tidy.removeprefix("/v1"), tidy.replace("/v1/v1", "/v1")):
        if right in served:
            return f"use {right}"
    for prefix, instead in _ELSEWHERE.items():
        if f"{tidy}/".startswith(f"{prefix}/"):
            return instead
    nearest = get_close_matches(tidy[:100], served, 1, 0.8)
    return f"did you mean {nearest[0]}?" if nearest else "/docs lists what there is"
