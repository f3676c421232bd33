"""The HTTP contract, kind by kind, as raw bytes show it: a tiny model at TP 2 in float32, which writes bytes at random."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import references
from tests.server import Server, wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time, in a small village by the sea, there lived a man who"
MIXED = [
    "😀 🎉 👩‍👩‍👧‍👦 🇩🇪\n" * 4,
    "你好世界。今天天气很好。\n" * 4,
    "e\u0301 n\u0303 नमस्ते สวัสดี\n" * 4,
    "שלום مرحبا Привет\n" * 4,
]
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOKENS = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass
class Stream:
    """A stream as it came: `data` is of each event but the last, which must be [DONE]."""

    data: list[dict[str, Any]]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """A choice's deltas."""
        return [choice for chunk in self.data for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """A choice's text."""
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.choices(index))

    def finishes(self, index: int = 0) -> list[str | None]:
        """What each delta says of the end."""
        return [choice["finish_reason"] for choice in self.choices(index)]


def stream(server: Server, path: str = COMPLETIONS, **body: Any) -> Stream:
    """Read a stream to its end and check its form, byte by byte."""
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read()
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    return Stream([json.loads(event.removeprefix(b"data: ")) for event in events])


def complete(server: Server, prompt: Any = STORY, **body: Any) -> dict[str, Any]:
    return server.complete(prompt, **{"temperature": 0, "max_tokens": 16, **body})


def text(server: Server, prompt: Any = STORY, **body: Any) -> str:
    whole: str = complete(server, prompt, **{"ignore_eos": True, **body})["choices"][0]["text"]
    return whole


def refusals(server: Server, path: str, bodies: list[Any], allowed: tuple[int, ...] = (400,)) -> list[Any]:
    """Send each body. Every answer must be one of the allowed ones, errors in OpenAI's shape; returns the errors' `param`s."""
    params = []
    with server.client() as client:
        for body in bodies:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code in allowed, f"{body!r}: {answer.status_code} {answer.text[:200]}"
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert sorted(error) == ["code", "message", "param", "type"]
                assert error["message"].strip()
                assert "Traceback" not in error["message"]
                params.append(error["param"])
    return params


# What is refused


def test_body_that_is_no_json_object_is_400(tiny_server: Server) -> None:
    bodies = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "x",}', b"{'model': 1}", b"[" * 100_000]
    for path in (COMPLETIONS, CHAT):
        assert refusals(tiny_server, path, bodies) == [None] * len(bodies)


def test_prompt_of_a_wrong_form_is_400(tiny_server: Server) -> None:
    wrong = [
        [], [[]], [[], []], 5, True, {"a": 1}, [1, "a"], [["a"]], [None], [1.5], [[1], "a"], [[[1]]], [{"text": "x"}],
        [-1], [2**31], [2**63], [10**30], [1, -5], [[1], [10**9]], [257], "", ["", ""],
    ]  # fmt: skip
    params = refusals(tiny_server, COMPLETIONS, [{"prompt": prompt, "max_tokens": 1} for prompt in wrong])
    assert set(params) == {"prompt"}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, "hot"]),
        ("top_p", [-0.5, 1.5, "x"]),
        ("top_k", [-5, 1.5]),
        ("min_p", [-1, 2]),
        ("repetition_penalty", [0, -1]),
        ("presence_penalty", ["x"]),
        ("seed", ["x", 1.5]),
        ("stop", [5, [1], ["x"] * 100, "x" * 100_000]),
        ("stop_token_ids", [5, ["x"], [-1], [10**9], list(range(10_000))]),
        ("logprobs", [-5, 10**6, "x"]),
        ("prompt_logprobs", [-5, 10**6, "x"]),
        ("stream", ["maybe"]),
        ("logit_bias", ["x", {"a": 1}, {"1": "x"}, {"1": 1000}, {"-1": 1}, {"99999999": 1}]),
        ("n", [0, -1, 10**6, "two", 1.5]),
        ("best_of", [10**6, 5]),
        ("suffix", ["the end"]),
        ("max_tokens", [-1, 1.5, "ten", []]),
        ("min_tokens", [-1, 10**6, "x"]),
        ("structured_outputs", [5, {}, {"regex": 5}, {"nothing": 1}]),
        ("priority", ["high"]),
        ("stream_options", [{"include_usage": True}]),  # without stream
    ],
)
def test_value_out_of_range_or_of_wrong_type_is_400_with_its_field(tiny_server: Server, field: str, values: list[Any]) -> None:
    params = refusals(tiny_server, COMPLETIONS, [{"prompt": "x", "max_tokens": 1, field: value} for value in values])
    assert set(params) == {field}


def test_malformed_messages_are_400(tiny_server: Server) -> None:
    wrong: list[Any] = [
        [], None, "hi", [5], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "noise", "text": "x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        [{"role": "tool", "content": "12:00"}], [{"role": "user", "content": []}], [{"role": "assistant", "content": None}],
    ]  # fmt: skip
    params = refusals(tiny_server, CHAT, [{"messages": messages, "max_tokens": 1} for messages in wrong])
    assert set(params) == {"messages"}


def test_messages_that_the_template_takes_are_answered(tiny_server: Server) -> None:
    odd: list[Any] = [[{"role": "alien", "content": "x"}], [{"role": "user", "content": ""}], [*HELLO, *HELLO]]
    assert refusals(tiny_server, CHAT, [{"messages": messages, "max_tokens": 1} for messages in odd], (200,)) == []


def test_chat_fields_that_cannot_be_are_400(tiny_server: Server) -> None:
    fields: list[dict[str, Any]] = [
        {"top_logprobs": 2},  # without logprobs
        {"logprobs": True, "top_logprobs": 10**6},
        {"chat_template_kwargs": {"x": "y" * 1_000_000}},
        {"chat_template_kwargs": 5},
        {"structured_outputs": {"regex": "(a|a)*" * 2000 + "(?=x)"}},
        {"tool_choice": "required"},  # without tools
        {"tools": [{"type": "code_interpreter"}]},
    ]
    params = refusals(tiny_server, CHAT, [{"messages": HELLO, "max_tokens": 1, **more} for more in fields])
    for more, param in zip(fields, params, strict=True):
        assert param in more


def test_unknown_path_names_what_is_there_and_wrong_method_is_an_error(tiny_server: Server) -> None:
    with tiny_server.client() as client:
        for path in ("/v1/embeddings", "/v1/responses", "/v1/audio/speech", "/v1/edits", "/nothing"):
            answer = client.post(path, json={})
            assert answer.status_code == 404
            assert path in answer.json()["error"]["message"]
        assert "/v1/chat/completions" in client.post("/v1/responses", json={}).json()["error"]["message"]
        assert client.get(COMPLETIONS).status_code == 405
        assert client.post(COMPLETIONS, content=b"x" * 9 * 2**20).status_code == 413


# Texts and streams


@pytest.mark.parametrize("prompt", MIXED[:2], ids=["emoji", "cjk"])
def test_streamed_text_is_the_whole_text_of_characters_of_several_ids(demo_server: Server, prompt: str) -> None:
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    whole = text(demo_server, prompt, **body)
    assert not whole.isascii()
    assert stream(demo_server, prompt=prompt, **body).text() == whole


@pytest.mark.parametrize("prompt", MIXED[2:], ids=["marks", "scripts"])
def test_streamed_text_is_the_whole_text_of_bytes_at_random(tiny_server: Server, prompt: str) -> None:
    body = {"max_tokens": 60, "temperature": 1, "seed": 1, "ignore_eos": True}
    assert stream(tiny_server, prompt=prompt, **body).text() == text(tiny_server, prompt, **body)


def test_stream_has_one_head_one_end_and_usage_only_when_asked(tiny_server: Server) -> None:
    whole = complete(tiny_server, max_tokens=6)["usage"]
    plain = stream(tiny_server, prompt=STORY, max_tokens=6, temperature=0)
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in plain.data}) == 1
    assert plain.data[0]["object"] == "text_completion"
    assert plain.finishes() == [None] * (len(plain.data) - 1) + ["length"]
    assert not any(chunk.get("usage") for chunk in plain.data)
    asked = stream(tiny_server, prompt=STORY, max_tokens=6, temperature=0, stream_options={"include_usage": True})
    *chunks, last = asked.data
    assert (last["choices"], [last["usage"][name] for name in TOKENS]) == ([], [whole[name] for name in TOKENS])
    assert not any(chunk["usage"] for chunk in chunks)


def test_batch_comes_back_in_order_streamed_or_not(tiny_server: Server) -> None:
    prompts = [f"Tell me about {word}" for word in ("gold", "bread", "rain", "violins")]
    alone = [text(tiny_server, prompt, max_tokens=6) for prompt in prompts]
    whole = complete(tiny_server, prompts, max_tokens=6)
    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(alone))
    streamed = stream(tiny_server, prompt=prompts, max_tokens=6, temperature=0)
    assert [streamed.text(index) for index in range(4)] == alone
    assert all(streamed.finishes(index).count("length") == 1 for index in range(4))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stop_inside_across_and_almost(tiny_server: Server, path: str) -> None:
    asked: dict[str, Any] = {"prompt": STORY} if path == COMPLETIONS else {"messages": HELLO}
    asked |= {"max_tokens": 40, "temperature": 1, "seed": 3, "ignore_eos": True}

    def both(stop: Any) -> set[tuple[str, str | None]]:
        with tiny_server.client() as client:
            choice = client.post(path, json={**asked, "stop": stop}).json()["choices"][0]
        streamed = stream(tiny_server, path, stop=stop, **asked)
        shown = choice["text"] if "text" in choice else choice["message"]["content"]
        return {(shown, choice["finish_reason"]), (streamed.text(), streamed.finishes()[-1])}

    ((base, reason),) = both(None)
    assert reason == "length"
    for stop in (base[9], base[12:25], [base[30:33], base[20:23]]):  # of one token, and across several
        place = min(base.find(one) for one in ([stop] if isinstance(stop, str) else stop))
        assert both(stop) == {(base[:place], "stop")}
    assert both([base[12:25] + "\x00", "never"]) == both(None)


def test_narrow_sampling_is_greedy_and_wide_is_not(tiny_server: Server) -> None:
    greedy = text(tiny_server)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text(tiny_server, temperature=1.5, seed=3, **narrow) == greedy
    assert text(tiny_server, temperature=1.5, seed=3, top_k=0) == text(tiny_server, temperature=1.5, seed=3, top_k=-1) != greedy


def test_null_is_the_room_left_and_too_much_is_cut_to_it(tiny_server: Server) -> None:
    for wanted in (None, 10**9, 10**30):
        seen = 0
        with tiny_server.client() as client:
            body = {"prompt": STORY, "max_tokens": wanted, "ignore_eos": True, "stream": True}
            with client.stream("POST", COMPLETIONS, json=body) as response:
                assert response.status_code == 200
                for _ in itertools.islice(response.iter_raw(), 20):  # of at most a token each
                    seen += 1
        assert seen == 20
    assert complete(tiny_server, [5] * 1000, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 24


def test_zero_tokens_are_an_empty_answer(tiny_server: Server) -> None:
    assert complete(tiny_server, max_tokens=0)["choices"][0]["text"] == ""
    assert complete(tiny_server, max_tokens=0, echo=True)["choices"][0]["text"] == STORY


def test_parts_of_a_message_are_one_text(tiny_server: Server) -> None:
    def tokens(content: Any) -> int:
        with tiny_server.client() as client:
            answer = client.post(CHAT, json={"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    assert tokens("Tell me a joke.") == tokens(parts("Tell me a joke."))
    assert tokens(parts("Tell me a joke.", "About whales and the sea.")) >= tokens("Tell me a joke.") + 4


# Logprobs


def test_logprobs_of_prompt_and_answer_are_those_of_a_plain_forward(tiny_model: Path, tiny_server: Server) -> None:
    for reference in references(tiny_model, [(40, 6), (150, 2)]):
        body = {"max_tokens": len(reference.continuation), "temperature": 0, "ignore_eos": True, "repetition_penalty": 1.0}
        ids = [*reference.prompt, *reference.continuation]
        logits = reference.logits[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[range(len(ids) - 1), ids[1:]]
        for _ in range(2):  # the second time there are prefixes in the cache
            found = tiny_server.complete(reference.prompt, echo=True, logprobs=2, **body)["choices"][0]["logprobs"]
            assert found["token_logprobs"][0] is None
            np.testing.assert_allclose(found["token_logprobs"][1:], expected, atol=1e-4)
        alone = tiny_server.complete(reference.prompt, logprobs=0, **body)["choices"][0]["logprobs"]
        np.testing.assert_allclose(alone["token_logprobs"], expected[len(reference.prompt) - 1 :], atol=1e-4)


def test_logprobs_are_raw_whatever_shapes_the_choice(tiny_server: Server) -> None:
    plain = tiny_server.complete([5, 6, 7], max_tokens=1, logprobs=5, temperature=0)["choices"][0]["logprobs"]["top_logprobs"]
    shaping = {"temperature": 1.7, "seed": 1, "repetition_penalty": 1.5, "logit_bias": {"9": 5}, "top_k": 3}
    shaped = tiny_server.complete([5, 6, 7], max_tokens=1, logprobs=5, **shaping)["choices"][0]["logprobs"]["top_logprobs"]
    assert {key: shaped[0][key] for key in plain[0]} == pytest.approx(plain[0], abs=1e-4)


# Counts


def test_usage_and_metrics_and_tokenize_agree(tiny_server: Server) -> None:
    def counted() -> tuple[float, float]:
        wait_for(lambda: tiny_server.metric("tpserve_requests_running") == 0, 10, "an idle engine")
        return tiny_server.metric("tpserve_prompt_tokens_total"), tiny_server.metric("tpserve_generated_tokens_total")

    before = counted()
    usages = [
        complete(tiny_server, prompt, max_tokens=2)["usage"]
        for prompt in (STORY, MIXED[0], "  two  spaces", "<|end|>", [STORY, "Hi"])
    ]
    usages.append(complete(tiny_server, max_tokens=2, n=3, temperature=1)["usage"])
    after = counted()
    assert after[0] - before[0] == sum(usage["prompt_tokens"] for usage in usages)
    assert after[1] - before[1] == sum(usage["completion_tokens"] for usage in usages)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    with tiny_server.client() as client:
        for prompt, usage in zip((STORY, MIXED[0], "  two  spaces", "<|end|>"), usages):
            answer = client.post("/tokenize", json={"prompt": prompt}).json()
            assert (answer["count"], len(answer["tokens"])) == (usage["prompt_tokens"],) * 2
            assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == prompt
    assert usages[-1]["prompt_tokens"] == usages[0]["prompt_tokens"]


# Many clients, and those that leave


def test_hung_up_streams_are_aborted_and_counted(tiny_server: Server) -> None:
    aborted = tiny_server.metric("tpserve_requests_total", finish_reason="abort")

    def leave(number: int) -> None:
        body = {"prompt": f"{number} {STORY}", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with tiny_server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
            next(response.iter_raw())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(4)))
    wait_for(lambda: tiny_server.metric("tpserve_requests_running") == 0, 10, "an idle engine")
    wait_for(lambda: tiny_server.metric("tpserve_requests_total", finish_reason="abort") == aborted + 4, 10, "four aborts")
    wait_for(lambda: tiny_server.metric("tpserve_kv_pages_used") == 0, 10, "release of all pages")


def test_64_streams_at_once_all_finish(tiny_server: Server) -> None:
    with ThreadPoolExecutor(64) as pool:
        asked = {"max_tokens": 6, "temperature": 1, "ignore_eos": True}
        streams = list(pool.map(lambda number: stream(tiny_server, prompt=f"{number} {STORY}", **asked), range(64)))
    assert {s.finishes()[-1] for s in streams} == {"length"}


def test_prompt_that_cannot_be_decoded_harms_nobody(tiny_server: Server) -> None:
    refusals(tiny_server, COMPLETIONS, [b'{"prompt": "\\ud800", "max_tokens": 1}'])
    assert text(tiny_server)


# The rest


def test_documents_of_the_api_are_served_without_another_host(tiny_server: Server) -> None:
    with tiny_server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        page = client.get("/docs")
        version = client.get("/version").json()["version"]
    assert {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/detokenize"} <= set(paths)
    assert page.status_code == 200
    assert not re.search(r"(src|href)=\"(https?:)?//", page.text)
    with tiny_server.client() as client:
        for asset in re.findall(r"(?:src|href)=\"(/[^\"]+)\"", page.text):
            assert client.get(asset).status_code == 200, asset
    assert re.fullmatch(r"\d+\.\d+.*", version)


def test_chat_command_answers_a_pipe(demo_server: Server) -> None:
    command = [
        sys.executable,
        "-m",
        "tpserve.cli",
        "chat",
        "--url",
        demo_server.url,
        "--temperature",
        "0",
        "--max-tokens",
        "24",
    ]
    question = "What is the capital of France?"
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")
