"""The demo model answers with the reference texts at every TP size: real processes, real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import Server

# Greedy ids of transformers on the same bfloat16 weights with float32 arithmetic.
CAPITAL = "The capital of France is Paris."
GRAVITY = (
    "Gravity is a fundamental concept in physics that describes the force of gravity, "
    "which is a result of the curvature of spacetime"
)
COUNTING = " 6, 7, 8, 9, 10, 11, 12,"
SUN = " sky, casting a golden glow over the horizon. The sound of the wind is a soothing melody, a gentle reminder of"
SUN_IDS = [504, 2388, 13685, 281, 260]


def chat(server: Server, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 24, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def demo(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server("--model", "demo", "--tp", str(request.param), "--dtype", "float32", "--kv-cache-memory", "256MiB") as server:
        yield server


def test_demo_in_float32_gives_the_reference_texts(demo: Server) -> None:
    capital = chat(demo, "What is the capital of France?")
    assert capital["choices"][0]["message"]["content"] == CAPITAL
    assert capital["choices"][0]["finish_reason"] == "stop"
    assert capital["usage"]["prompt_tokens"] == 37
    assert capital["usage"]["completion_tokens"] == 8
    gravity = chat(demo, "Explain gravity in one sentence.")
    assert gravity["choices"][0]["message"]["content"] == GRAVITY
    assert gravity["choices"][0]["finish_reason"] == "length"
    assert gravity["usage"]["prompt_tokens"] == 36
    assert demo.text("1, 2, 3, 4, 5,", max_tokens=24, temperature=0) == COUNTING
    assert demo.text("The sun rises in the", max_tokens=24, temperature=0) == SUN
    assert demo.text(SUN_IDS, max_tokens=24, temperature=0) == SUN


def test_demo_sampled_with_a_seed_gives_the_same_text_at_every_size(demo: Server) -> None:
    filters: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_p": 0.8, "top_k": 100, "min_p": 0.01},
    ]
    texts = [demo.text("The sun rises in the", max_tokens=16, temperature=0.8, seed=7, **more) for more in filters]
    assert all(SEEDED.setdefault(i, text) == text for i, text in enumerate(texts))
    assert len(set(texts)) > 1


SEEDED: dict[int, str] = {}  # by filter; filled at the first TP size, compared at the others


@pytest.mark.slow
def test_demo_default_dtype_is_the_checkpoints_and_answers() -> None:
    with Server("--model", "demo", "--tp", "2", "--kv-cache-memory", "256MiB") as server:
        assert chat(server, "Explain gravity in one sentence.")["choices"][0]["message"]["content"] == GRAVITY
        assert server.text("1, 2, 3, 4, 5,", max_tokens=24, temperature=0) == COUNTING


@pytest.mark.slow
def test_the_flags_that_vllm_users_type_run_as_they_are() -> None:
    flags = "--tensor-parallel-size 2 --dtype half --max-num-seqs 256 --max-model-len 4096 --gpu-memory-utilization 0.9"
    with Server("--model", "demo", *flags.split(), "--kv-cache-memory", "256MiB") as server:
        assert "--gpu-memory-utilization" in server.log
        with server.client() as client:
            assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
        assert chat(server, "What is the capital of France?")["choices"][0]["message"]["content"] == CAPITAL
