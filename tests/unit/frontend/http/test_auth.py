"""Keys: who is served, what their requests are granted, and browsers that ask first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.frontend.rig import Rig, in_loop, rig
from tpserve import keys
from tpserve.deployment import ApiKey, Deployment
from tpserve.frontend.http.auth import granted
from tpserve.messages import Submit

ALICE = ApiKey(digest=keys.digest("sk-alice"), name="alice", priority=2, max_wait_s=30.0)
BOB = ApiKey(digest=keys.digest("sk-bob"), name="bob", priority=0, max_wait_s=0.0)
ORIGIN = {"Origin": "https://chat.example"}
PREFLIGHT = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def guarded(deployment: Deployment, **settings: Any) -> Deployment:
    changed = deployment.settings.model_copy(update={"scheduling_policy": "priority", **settings})
    return deployment.model_copy(update={"keys": (ALICE, BOB), "settings": changed})


async def status(r: Rig, path: str, authorization: str | None, method: str = "POST") -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    return (await r.client.request(method, path, headers=headers, json={"prompt": 5})).status_code


@in_loop
async def test_without_a_known_key_nothing_is_served_but_what_is_open(deployment: Deployment) -> None:
    async with rig(guarded(deployment)) as r:
        for wrong in (None, "", "Bearer", "Bearer x", "sk-alice", "Basic sk-alice", "Bearer sk-alicex", "Bearer sk-bob sk-bob"):
            for path in ("/v1/completions", "/v1//completions", "/v1/completions/", "/tokenize", "/nothing"):
                assert await status(r, path, wrong) == 401, (wrong, path)
        for path in ("/health", "/health/live", "/metrics", "/docs", "/openapi.json"):
            assert await status(r, path, None, "GET") == 200, path
        assert await status(r, "/v1/models", None, "GET") == 401


@in_loop
@pytest.mark.parametrize("sent", ["Bearer sk-bob", "bearer  sk-bob", "BEARER sk-bob"])
async def test_known_key_is_served_however_its_scheme_is_written(deployment: Deployment, sent: str) -> None:
    async with rig(guarded(deployment)) as r:
        assert await status(r, "/v1/completions", sent) == 400


@in_loop
async def test_refusal_has_openais_shape_and_says_how(deployment: Deployment) -> None:
    async with rig(guarded(deployment)) as r:
        response = await r.client.post("/v1/completions", content=b"x")
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert "Authorization: Bearer KEY" in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert response.headers["x-request-id"]


@in_loop
async def test_any_key_is_accepted_where_none_is_asked_for(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        assert await status(r, "/v1/completions", "Bearer anything") == 400


@pytest.mark.parametrize(
    ("key", "asked", "timeout", "expected"),
    [
        (None, None, None, (0, 0.0)),
        (None, 0, None, (0, 0.0)),
        (None, -7, 5.0, (-7, 5.0)),
        (BOB, 0, None, (0, 0.0)),
        (BOB, -7, None, (0, 0.0)),
        (BOB, 7, 5.0, (7, 5.0)),
        (ALICE, None, None, (2, 30.0)),
        (ALICE, 0, None, (2, 30.0)),
        (ALICE, 1, 5.0, (2, 5.0)),
        (ALICE, 3, 60.0, (3, 30.0)),
        (ALICE.model_copy(update={"priority": -5}), None, None, (-5, 30.0)),
        (ALICE.model_copy(update={"priority": -5}), 0, None, (0, 30.0)),
        (ALICE.model_copy(update={"priority": -5}), -9, None, (-5, 30.0)),
        (ALICE.model_copy(update={"priority": -5}), -3, None, (-3, 30.0)),
    ],
)
def test_key_bounds_what_a_request_asks_for(
    key: ApiKey | None, asked: int | None, timeout: float | None, expected: tuple[int, float]
) -> None:
    assert granted(key, asked, timeout) == expected


@in_loop
async def test_what_is_granted_reaches_the_engine(deployment: Deployment) -> None:
    async with rig(guarded(deployment, queue_timeout=10.0)) as r:
        r.client.headers["Authorization"] = "Bearer sk-alice"
        for asked, priority in ((None, 2), (1, 2), (5, 5)):
            sent = r.complete(priority=asked)
            submit = await r.coordinator.next(Submit)
            assert (submit.priority, submit.max_wait_s) == (priority, 10.0)
            await r.coordinator.generate(submit, [5])
            assert (await sent).status_code == 200


@in_loop
async def test_priority_is_refused_where_it_would_have_no_effect(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        response = await r.complete(priority=1)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "priority"
        assert "--scheduling-policy priority" in response.json()["error"]["message"]
        assert (await r.answer(r.complete(priority=0), "ok")).status_code == 200


@in_loop
async def test_browser_may_ask_without_a_key_and_reads_errors(deployment: Deployment) -> None:
    async with rig(guarded(deployment, allowed_origins=("https://chat.example",))) as r:
        asked = await r.client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://chat.example"
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        key = {"Authorization": "Bearer sk-bob"}
        for headers, content, code in (({}, b"", 401), (key, b"{", 400), (key, b"x" * (9 * 2**20), 413)):
            refused = await r.client.post("/v1/completions", headers={**ORIGIN, **headers}, content=content)
            assert refused.status_code == code
            assert refused.headers["access-control-allow-origin"] == "https://chat.example"
            assert "X-Request-Id" in refused.headers["access-control-expose-headers"]


@in_loop
async def test_browser_reads_that_the_server_failed(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(guarded(deployment, allowed_origins=("*",))) as r:
        monkeypatch.setattr(r.tokenizer, "encode", lambda *_: 1 / 0)
        failed = await r.client.post(
            "/v1/completions", headers={**ORIGIN, "Authorization": "Bearer sk-bob"}, json={"prompt": "a"}
        )
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (500, "*")
        assert failed.headers["x-request-id"]


@in_loop
async def test_browser_of_another_origin_is_not_let_in(deployment: Deployment) -> None:
    for origins in ((), ("https://other.example",)):
        async with rig(guarded(deployment, allowed_origins=origins)) as r:
            asked = await r.client.options("/v1/chat/completions", headers=PREFLIGHT)
            assert asked.status_code >= 400
            assert "access-control-allow-origin" not in asked.headers
