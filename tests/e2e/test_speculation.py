"""Drafts behind the real server: the answers are those of a server without, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import Server, wait_for

PROMPT = [40, 41, 42, 43, 44] * 6
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "seed": 3, "n": 3, "logit_bias": {"40": 30, "41": 30, "42": 30}},
    "penalties": {"temperature": 0, "repetition_penalty": 0.8, "presence_penalty": 0.3},
    "logprobs": {"temperature": 0, "logprobs": 1},
    "choice": {"temperature": 0, "structured_outputs": {"choice": ["yes yes yes yes", "no"]}, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    flags = ("--tp", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB", "--speculative", "ngram")
    with Server("--model", tiny_model, *flags) as running:
        yield running


def body(kind: str) -> dict[str, Any]:
    return {"max_tokens": 48, "ignore_eos": True, **KINDS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_usage_are_those_without_drafts(server: Server, tiny_server: Server, kind: str) -> None:
    before = server.metric("tpserve_spec_decode_num_accepted_tokens_total")
    found, expected = (each.complete(PROMPT, **body(kind)) for each in (server, tiny_server))
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in expected["choices"]]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    if kind in ("greedy", "sampled", "penalties"):
        wait_for(lambda: server.metric("tpserve_spec_decode_num_accepted_tokens_total") > before, 5, "accepted drafts")


def test_streamed_answer_ends_at_a_stop_string_among_drafts(server: Server) -> None:
    whole = server.text(PROMPT, **body("sampled") | {"n": 1})
    stop = whole[20:23]
    end = whole.index(stop)
    with server.client() as client:
        streamed = client.post(
            "/v1/completions", json=body("sampled") | {"n": 1, "prompt": PROMPT, "stop": stop, "stream": True}
        )
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole[:end]
    assert choices[-1]["finish_reason"] == "stop"
    wait_for(lambda: server.metric("tpserve_kv_pages_used") == 0, 5, "release of all pages")
