"""The engine through HTTP, in float32: what is scheduled beside a request never changes its text."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.reference import penalized
from tests.server import Server, wait_for

FLOAT32 = ("--dtype", "float32")
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


def random_prompts(count: int, low: int, high: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 200) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def texts(server: Server, prompts: list[list[int]], **body: Any) -> list[str]:
    """All prompts at once, each as a request of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.text(prompt, **{"ignore_eos": True, **body}), prompts))


@pytest.mark.slow
def test_small_pool_with_preemptions_gives_the_texts_of_a_big_pool(tiny_model: Path, tiny_server: Server) -> None:
    prompts = random_prompts(12, 10, 60)
    expected = [tiny_server.text(prompt, max_tokens=60, temperature=0, ignore_eos=True) for prompt in prompts]
    seeded = [tiny_server.text(prompt, max_tokens=60, seed=i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    distinct = [tiny_server.text(prompt, max_tokens=60, temperature=0, ignore_eos=True, **PENALTIES) for prompt in prompts]
    small = ("--kv-cache-memory", "200KB", "--max-model-len", "128", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
    with Server("--model", tiny_model, "--tp", "2", *FLOAT32, *small) as server:
        assert server.metric("tpserve_kv_pages_total") < 40
        assert texts(server, prompts, max_tokens=60, temperature=0) == expected
        assert server.metric("tpserve_preemptions_total") > 0
        preemptions = server.metric("tpserve_preemptions_total")
        with ThreadPoolExecutor(len(prompts)) as pool:
            again = pool.map(lambda job: server.text(job[1], max_tokens=60, seed=job[0], ignore_eos=True), enumerate(prompts))
            assert list(again) == seeded
        assert server.metric("tpserve_preemptions_total") > preemptions
        preemptions = server.metric("tpserve_preemptions_total")
        assert texts(server, prompts, max_tokens=60, temperature=0, **PENALTIES) == distinct
        assert server.metric("tpserve_preemptions_total") > preemptions
        wait_for(lambda: server.metric("tpserve_kv_pages_used") == 0, 5, "release of all pages")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--no-enable-prefix-caching",), ("--no-enable-chunked-prefill",), ("--block-size", "5")])
def test_texts_do_not_depend_on_caching_chunking_or_page_size(
    tiny_model: Path, tiny_server: Server, flags: tuple[str, ...]
) -> None:
    shared = random_prompts(1, 90, 91, seed=2)[0]
    prompts = [shared + tail for tail in random_prompts(6, 1, 40, seed=3)]
    kinds: list[dict[str, Any]] = [{}, PENALTIES]
    expected = [texts(tiny_server, prompts, max_tokens=20, temperature=0, **kind) for kind in kinds]
    again = [texts(tiny_server, prompts, max_tokens=20, temperature=0, **kind) for kind in kinds]
    assert again == expected  # now from the cache
    with Server("--model", tiny_model, "--tp", "2", *FLOAT32, *flags) as server:
        for _ in range(2):
            assert [texts(server, prompts, max_tokens=20, temperature=0, **kind) for kind in kinds] == expected


def test_cached_prefix_is_counted_in_usage_and_metrics(tiny_server: Server) -> None:
    prompt = random_prompts(1, 70, 71, seed=9)[0]
    first = tiny_server.complete(prompt, max_tokens=1)["usage"]
    hits = tiny_server.metric("tpserve_prefix_cache_hit_tokens_total")
    second = tiny_server.complete(prompt, max_tokens=1)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 64  # whole pages of 16 below the last token
    wait_for(lambda: tiny_server.metric("tpserve_prefix_cache_hit_tokens_total") == hits + 64, 5, "metric")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_seeded_text_is_the_same_alone_beside_others_and_at_every_size(
    tiny_model: Path, tiny_server: Server, size: int
) -> None:
    prompt, *others = random_prompts(9, 20, 50, seed=4)
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02, "temperature": 1.3}]
    filters += [PENALTIES, {**PENALTIES, "top_k": 20}]
    alone = [tiny_server.text(prompt, max_tokens=24, seed=11, ignore_eos=True, **more) for more in filters]
    assert len(set(alone)) == len(filters)
    with Server("--model", tiny_model, "--tp", str(size), *FLOAT32) as server, ThreadPoolExecutor(16) as pool:
        noise = [pool.submit(server.text, other, max_tokens=400, temperature=1, ignore_eos=True) for other in others]
        wait_for(lambda: server.metric("tpserve_requests_running") == len(others), 20, "company")
        together = [pool.submit(server.text, prompt, max_tokens=24, seed=11, ignore_eos=True, **more) for more in filters]
        assert [future.result() for future in together] == alone
        assert not any(future.done() for future in noise)  # they were beside it all the time
        for future in noise:
            future.result()


def test_three_choices_differ_and_come_again(tiny_server: Server) -> None:
    prompt = random_prompts(1, 37, 38, seed=5)[0]

    def three() -> list[str]:
        choices = tiny_server.complete(prompt, max_tokens=16, temperature=1, seed=5, n=3, ignore_eos=True)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        return [choice["text"] for choice in choices]

    first = three()
    assert len(set(first)) == 3
    assert three() == first
    assert tiny_server.text(prompt, max_tokens=16, temperature=1, seed=5, ignore_eos=True) == first[0]


def test_penalized_text_is_that_of_transformers(tiny_model: Path, tiny_server: Server) -> None:
    prompt = random_prompts(1, 30, 31, seed=12)[0]
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for penalties in ((1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.8, 0.0, 0.0), (1.2, 1.0, 0.5)):
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        expected = tokenizer.decode(penalized(tiny_model, prompt, 24, *penalties), skip_special_tokens=False)
        assert tiny_server.text(prompt, **body, **dict(zip(names, penalties))) == expected


def test_choices_are_penalized_each_by_its_own_answer(tiny_server: Server) -> None:
    prompt = random_prompts(1, 37, 38, seed=5)[0]
    body = {"max_tokens": 16, "ignore_eos": True, **PENALTIES}
    choices = tiny_server.complete(prompt, seed=5, n=3, temperature=1, **body)["choices"]
    assert len({choice["text"] for choice in choices}) == 3
    assert choices[0]["text"] == tiny_server.text(prompt, seed=5, temperature=1, **body)
    greedy = tiny_server.complete(prompt, n=3, temperature=0, **body)["choices"]
    assert {choice["text"] for choice in greedy} == {tiny_server.text(prompt, temperature=0, **body)}


@pytest.mark.slow
def test_256_streams_at_once_all_finish(tiny_server: Server) -> None:
    prompts = random_prompts(256, 5, 30, seed=6)

    def stream(prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "stream": True, "ignore_eos": True}
        with tiny_server.client() as client:
            return client.post("/v1/completions", json=body).text

    with ThreadPoolExecutor(256) as pool:
        bodies = list(pool.map(stream, prompts))
    assert all(body.rstrip().endswith("data: [DONE]") and body.count('"finish_reason":"length"') == 1 for body in bodies)


@pytest.mark.slow
def test_prompt_lengths_around_the_pool_and_the_limit_answer_or_are_refused(tiny_model: Path) -> None:
    with (
        Server("--model", tiny_model, "--tp", "2", *FLOAT32, "--kv-cache-memory", "200KB") as server,
        server.client() as client,
    ):
        longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert longest == server.metric("tpserve_kv_pages_total") * 16
        for tokens, status in ((longest - 2, 200), (longest - 1, 200), (longest, 400), (longest + 1, 400)):
            answer = client.post("/v1/completions", json={"prompt": [5] * tokens, "max_tokens": 50}, timeout=30)
            assert answer.status_code == status, (tokens, answer.text)
            if status == 200:
                assert answer.json()["usage"]["completion_tokens"] <= longest - tokens
            else:
                assert str(longest) in answer.json()["error"]["message"]


def test_greedy_step_makes_two_collectives_a_layer_and_one(tiny_server: Server, tiny_layers: int) -> None:
    prompt = random_prompts(1, 8, 9, seed=8)[0]

    def counts() -> tuple[float, float, float]:
        names = ("tpserve_step_seconds_count", "tpserve_collectives_total", "tpserve_plan_bytes_total")
        wait_for(lambda: tiny_server.metric("tpserve_requests_running") == 0, 5, "idleness")
        steps = tiny_server.metric(names[0], part="linear")
        return steps, tiny_server.metric(names[1]), tiny_server.metric(names[2])

    tiny_server.complete(prompt, max_tokens=1, temperature=0)
    before = counts()
    tiny_server.complete(prompt, max_tokens=40, temperature=0, ignore_eos=True)
    wait_for(lambda: counts()[0] - before[0] == 40, 5, "40 steps")
    steps, collectives, plan_bytes = (now - then for now, then in zip(counts(), before))
    assert collectives == steps * (2 * tiny_layers + 1)
    assert plan_bytes <= steps * (128 + 16) + 200  # the first plan also brings the slot's parameters


def hang_up(server: Server, body: dict[str, Any]) -> None:
    """Leave after the first event of a stream, or while a whole answer is being made."""
    with server.client() as client:
        if body["stream"]:
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.3)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_hangs_up_frees_its_pages(tiny_server: Server, stream: bool) -> None:
    body = {"prompt": random_prompts(1, 20, 21, seed=10)[0], "max_tokens": 900, "ignore_eos": True, "stream": stream}
    aborted = tiny_server.metric("tpserve_requests_total", finish_reason="abort")
    hang_up(tiny_server, body)
    wait_for(lambda: tiny_server.metric("tpserve_kv_pages_used") == 0, 5, "release of the pages")
    wait_for(lambda: tiny_server.metric("tpserve_requests_total", finish_reason="abort") == aborted + 1, 5, "count")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "named"), [(2, "ranks 0 and 1"), (3, "rank 1 ")])
def test_corrupted_id_is_found_at_the_next_step_and_named(tiny_model: Path, tiny_server: Server, size: int, named: str) -> None:
    body = {"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0}
    until_then = tiny_server.text(**body, max_tokens=5)
    with Server("--model", tiny_model, "--tp", str(size), *FLOAT32, "--corrupt-id", "1:5") as server:
        with server.client() as client:
            events = client.post("/v1/completions", json={**body, "max_tokens": 50, "stream": True}).text.split("\n\n")
        assert server.process.wait(10) == 1
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event]
        assert [list(chunk) == ["error"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        assert until_then.startswith(text)
        assert text  # the steps before the wrong id were delivered
        errors = [line for line in server.stderr if " ERROR " in line]
        assert len(errors) == 1
        assert "step 5" in errors[0]
        assert named in errors[0]


def test_client_that_sends_more_after_its_body_and_hangs_up_frees_its_pages(tiny_server: Server) -> None:
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = ("127.0.0.1", int(tiny_server.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as connection:
        connection.sendall(head + body)
        wait_for(lambda: tiny_server.metric("tpserve_requests_running") == 8, 10, "start")
        connection.sendall(b"\r\n")
    wait_for(lambda: tiny_server.metric("tpserve_kv_pages_used") == 0, 5, "release of the pages")


def test_equal_prompts_without_a_seed_are_answered_differently(tiny_server: Server) -> None:
    choices = tiny_server.complete([[5, 6, 7]] * 3, max_tokens=16, temperature=1, ignore_eos=True)["choices"]
    assert len({choice["text"] for choice in choices}) == 3


METRICS = (
    "requests_running",
    "requests_waiting",
    "kv_pages_used",
    "kv_pages_total",
    "kv_cache_usage_ratio",
    "request_wait_seconds_count",
    "time_to_first_token_seconds_count",
    "time_per_output_token_seconds_count",
    "request_latency_seconds_count",
    "requests_total",
    "prompt_tokens_total",
    "generated_tokens_total",
    "prefix_cache_hit_tokens_total",
    "preemptions_total",
    "step_seconds_count",
    "collectives_total",
    "plan_bytes_total",
)


def test_every_metric_that_is_promised_is_served(tiny_server: Server) -> None:
    tiny_server.complete([5, 6, 7], max_tokens=3, ignore_eos=True)
    values = {name: tiny_server.metric(f"tpserve_{name}") for name in METRICS}
    finished = values["request_latency_seconds_count"]
    assert finished > 0
    assert values["request_wait_seconds_count"] >= finished
    assert values["time_to_first_token_seconds_count"] >= finished
