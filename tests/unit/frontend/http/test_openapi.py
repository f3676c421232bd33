"""The document of what is served, and its page."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from tests.unit.frontend.http.test_auth import guarded
from tests.unit.frontend.rig import Rig, in_loop, rig
from tpserve.deployment import Deployment


async def document(r: Rig) -> dict[str, Any]:
    response = await r.client.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def conforms(document: dict[str, Any], path: str, method: str, status: int, body: Any) -> None:
    """Whether an answer is as the document has it."""
    schema = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)


@in_loop
async def test_every_path_is_in_the_document_and_answers_its_methods(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        paths = (await document(r))["paths"]
        assert set(paths) == {
            "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
            "/version", "/health", "/health/live", "/health/ready", "/metrics",
        }  # fmt: skip
        for path, operations in paths.items():
            for method, operation in operations.items():
                assert operation["description"]
                status = (await r.client.request(method, path.replace("{name}", "small"))).status_code
                assert str(status) in operation["responses"], path


@in_loop
async def test_answers_are_as_the_document_says(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        doc = await document(r)
        for path, name in (
            ("/v1/models", "/v1/models"),
            ("/v1/models/small", "/v1/models/{name}"),
            ("/version", "/version"),
            ("/health", "/health"),
            ("/health/live", "/health/live"),
        ):
            conforms(doc, name, "get", 200, (await r.client.get(path)).json())
        conforms(doc, "/v1/models/{name}", "get", 404, (await r.client.get("/v1/models/none")).json())
        conforms(doc, "/v1/completions", "post", 200, (await r.answer(r.complete(logprobs=1), "a")).json())
        conforms(doc, "/v1/chat/completions", "post", 200, (await r.answer(r.chat(), "a")).json())
        conforms(doc, "/v1/chat/completions", "post", 400, (await r.chat(n=0)).json())
        conforms(doc, "/tokenize", "post", 200, (await r.post("/tokenize", prompt="a", return_token_strs=True)).json())
        conforms(doc, "/detokenize", "post", 200, (await r.post("/detokenize", tokens=[5])).json())
        r.engine.stop_taking("ending")
        conforms(doc, "/v1/completions", "post", 503, (await r.complete()).json())
        conforms(doc, "/health", "get", 503, (await r.client.get("/health")).json())


@in_loop
@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        (
            "/v1/completions",
            [{"prompt": "a"}, {"prompt": ["a"], "stop": "x"}, {"prompt": [5]}, {"prompt": [[5]], "n": None, "unknown": 1}],
            [{}, {"prompt": 5}, {"prompt": "a", "n": 0}, {"prompt": "a", "temperature": "hot"}],
        ),
        (
            "/v1/chat/completions",
            [
                {"messages": [{"role": "user", "content": "a"}]},
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            ],
            [{}, {"messages": []}, {"messages": [{"content": "a"}]}, {"messages": [{"role": "user", "content": 5}]}],
        ),
        ("/tokenize", [{"prompt": "a"}, {"content": "a"}], [{"prompt": 5}]),
        ("/detokenize", [{"tokens": []}], [{}, {"tokens": [-1]}]),
    ],
)
async def test_bodies_are_as_the_document_says(
    deployment: Deployment, path: str, good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    async with rig(deployment) as r:
        doc = await document(r)
        schema = doc["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": doc["components"]})
        assert [body for body in good if not validator.is_valid(body)] == []
        assert [body for body in bad if validator.is_valid(body)] == []


@in_loop
async def test_document_asks_for_keys_where_the_server_does(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        assert "securitySchemes" not in (await document(r))["components"]
    async with rig(guarded(deployment)) as r:
        doc = await document(r)
        assert doc["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        assert doc["paths"]["/tokenize"]["post"]["security"] == [{"key": []}]
        assert "security" not in doc["paths"]["/health"]["get"]
        conforms(doc, "/v1/models", "get", 401, (await r.client.get("/v1/models")).json())


@in_loop
async def test_page_needs_nothing_from_elsewhere(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        page = (await r.client.get("/docs")).text
        assert not re.search(r"//\w", re.sub(r"<!--.*?-->", "", page))
        needed = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(needed) == 3
        for path in needed:
            assert (await r.client.get(path)).status_code == 200
