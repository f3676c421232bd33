"""The two endpoints that generate: what they ask of the engine, and what they make of its ids."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import numpy as np
import openai
import pytest

from tests.unit.frontend.rig import EPOCH, LIMIT_S, events, in_loop, rig, scores
from tpserve.deployment import Deployment
from tpserve.frontend.http.threads import LARGE_BYTES
from tpserve.frontend.http.upload import MAX_BODY_BYTES
from tpserve.messages import Abort, Finish, PromptScores, Refusal, Refused, Scores, Stop, Submit
from tpserve.sampling import SamplingDefaults
from tpserve.tokenizer import Tokenizer

TEXTS = ["the 😀 🎉 👩‍👩‍👧‍👦", "你好世界。", "e\u0301 नमस्ते", " leading", "  two   three    ", "a\n\n\nb", "a \ufffd"]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def finishes(chunks: list[dict[str, Any]], index: int = 0) -> list[str | None]:
    return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]


# What the engine is asked


@in_loop
async def test_completion_asks_for_what_its_body_says(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        penalties = {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        sent = r.complete(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=7, max_tokens=2, **penalties)
        submit = await r.coordinator.next(Submit)
        assert submit.prompt.tolist() == r.ids("the fox")
        assert (submit.choices.tolist(), [ids.tolist() for ids in submit.generated]) == ([0], [[]])
        assert (submit.max_tokens, submit.stop_ids.tolist()) == (2, [0])
        sampling = submit.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 3, 0.25, 0.125, 7)
        assert {name: getattr(sampling, name) for name in penalties} == penalties
        await r.coordinator.generate(submit, r.ids("a"))
        assert (await sent).status_code == 200


@in_loop
@pytest.mark.parametrize(
    ("asked", "granted"), [({}, 97), ({"max_tokens": None}, 97), ({"max_tokens": 10**30}, 97), ({"max_tokens": 5}, 5)]
)
async def test_limit_is_the_room_left_at_most(deployment: Deployment, asked: dict[str, Any], granted: int) -> None:
    async with rig(deployment) as r:
        sent = r.complete(prompt=[5, 6, 7], **asked)
        submit = await r.coordinator.next(Submit)
        assert submit.max_tokens == granted
        await r.coordinator.generate(submit, [5])
        await sent


@in_loop
async def test_end_of_sequence_is_not_a_stop_with_ignore_eos(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.complete(ignore_eos=True)
        submit = await r.coordinator.next(Submit)
        assert submit.stop_ids.tolist() == []
        await r.coordinator.generate(submit, [*r.ids("a"), 0, *r.ids("b")])
        assert (await sent).json()["choices"][0]["text"] == "ab"


@in_loop
async def test_seed_of_the_server_is_the_default(deployment: Deployment) -> None:
    seeded = deployment.model_copy(update={"settings": deployment.settings.model_copy(update={"seed": 11})})
    async with rig(seeded) as r:
        sent = r.complete()
        submit = await r.coordinator.next(Submit)
        assert submit.sampling.seed == 11
        await r.coordinator.generate(submit, [5])
        await sent


@in_loop
async def test_models_defaults_are_those_of_both_endpoints(deployment: Deployment) -> None:
    async with rig(deployment.model_copy(update={"sampling": SamplingDefaults(top_k=20)})) as r:
        for send in (r.complete, r.chat):
            for fields, top_k in (({}, 20), ({"top_k": None}, 20), ({"top_k": 5}, 5)):
                sent = send(**fields)
                submit = await r.coordinator.next(Submit)
                assert submit.sampling.top_k == top_k
                await r.coordinator.generate(submit, [5])
                await sent


# Whole answers


@in_loop
async def test_whole_completion_has_text_and_usage(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.complete()
        submit = await r.coordinator.next(Submit)
        ids = [*r.ids(" jumps"), 0]
        for id_ in ids:
            await r.coordinator.tokens((submit.request, 0, id_, Finish.STOP if id_ == 0 else Finish.NONE), cached=1)
        body = (await sent).json()
        assert body["object"] == "text_completion"
        assert body["model"] == "small"
        end = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
        assert body["choices"] == [{"index": 0, "text": " jumps", **end}]
        prompt = len(r.ids("the fox"))
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "total_tokens": prompt + len(ids),
            "prompt_tokens_details": {"cached_tokens": 1},
        }


@in_loop
async def test_whole_chat_answer_is_a_message(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        body = (await r.answer(r.chat(model="also-small"), "the dog")).json()
        assert (body["object"], body["model"]) == ("chat.completion", "also-small")
        message = {"role": "assistant", "content": "the dog", "refusal": None}
        end = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
        assert body["choices"] == [{"index": 0, "message": message, **end}]


@in_loop
async def test_choices_are_indexed_prompt_by_prompt(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.complete(prompt=["the", "fox"], n=2, seed=3)
        first, second = await r.coordinator.next(Submit), await r.coordinator.next(Submit)
        assert [s.prompt.tolist() for s in (first, second)] == [r.ids("the"), r.ids("fox")]
        assert [s.choices.tolist() for s in (first, second)] == [[0, 1], [0, 1]]
        assert first.request != second.request
        for submit, choice, text in ((second, 1, "d"), (first, 0, "a"), (second, 0, "c"), (first, 1, "b")):
            await r.coordinator.generate(submit, r.ids(text), choice=choice)
        body = (await sent).json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
        assert body["usage"]["prompt_tokens"] == len(r.ids("the")) + len(r.ids("fox"))
        assert body["usage"]["completion_tokens"] == 4


# Streams


@in_loop
@pytest.mark.parametrize("text", TEXTS)
async def test_stream_joined_is_the_whole_text(deployment: Deployment, text: str) -> None:
    async with rig(deployment) as r:
        for send in (r.complete, r.chat):
            whole = (await r.answer(send(), text)).json()["choices"][0]
            chunks = events((await r.answer(send(stream=True), text)).text)
            assert joined(chunks) == (whole["text"] if "text" in whole else whole["message"]["content"]) == text


@in_loop
async def test_stream_has_one_id_and_one_finish_on_its_last_chunk(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        response = await r.answer(r.complete(stream=True), "the dog sleeps", Finish.LENGTH)
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
        assert finishes(chunks) == [None] * (len(chunks) - 1) + ["length"]
        assert not any("usage" in chunk for chunk in chunks)


@in_loop
async def test_chat_stream_begins_with_the_role(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.chat(stream=True, n=2)
        submit = await r.coordinator.next(Submit)
        await r.coordinator.generate(submit, [*r.ids("b"), 0], Finish.STOP, choice=1)
        await r.coordinator.generate(submit, [0], Finish.STOP, choice=0)
        chunks = events((await sent).text)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for index, text in ((0, ""), (1, "b")):
            deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in c["delta"] for c in deltas[1:])
            assert joined(chunks, index) == text
            assert finishes(chunks, index)[-1] == "stop"


@in_loop
async def test_usage_comes_last_and_only_when_asked(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        whole = (await r.answer(r.complete(), "the dog")).json()["usage"]
        asked = r.complete(stream=True, stream_options={"include_usage": True})
        *chunks, last = events((await r.answer(asked, "the dog")).text)
        assert (last["choices"], last["usage"]) == ([], whole)
        assert all(chunk["usage"] is None for chunk in chunks)


@in_loop
async def test_text_reaches_the_client_as_it_comes(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        request = r.client.build_request("POST", "/v1/completions", json={"prompt": "x", "stream": True})
        sent = asyncio.create_task(r.client.send(request, stream=True))
        submit = await r.coordinator.next(Submit)
        await r.coordinator.tokens((submit.request, 0, r.ids("a")[0], Finish.NONE))
        lines = (await sent).aiter_lines()
        assert '"text":"a"' in await anext(lines)
        await r.coordinator.generate(submit, r.ids("b"))
        assert '"text":"b"' in "".join([line async for line in lines])


# Stop strings


@in_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_choice_and_frees_it(deployment: Deployment, stream: bool) -> None:
    async with rig(deployment) as r:
        sent = r.complete(
            stop=["fox j", "never"], stream=stream, n=2, stream_options={"include_usage": True} if stream else None
        )
        submit = await r.coordinator.next(Submit)
        ids = r.ids("the fox jumps")
        await r.coordinator.generate(submit, ids, choice=0)
        abort = await r.coordinator.next(Abort)
        assert (abort.request, abort.choice) == (submit.request, 0)
        await r.coordinator.generate(submit, r.ids("fox"), choice=1)
        response = await sent
        if stream:
            chunks = events(response.text)
            assert ([joined(chunks, i) for i in (0, 1)], finishes(chunks)[-1]) == (["the ", "fox"], "stop")
            usage = chunks[-1]["usage"]
        else:
            body = response.json()
            assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [("the ", "stop"), ("fox", "length")]
            usage = body["usage"]
        matched = next(n for n in range(len(ids) + 1) if "fox j" in "".join(map(r.tokenizer.text_of, ids[:n])))
        assert usage["completion_tokens"] == matched + len(r.ids("fox"))
        assert await r.coordinator.is_told_nothing()


@in_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_a_choice_that_come_at_once_are_taken_in_order(deployment: Deployment, stream: bool) -> None:
    """As of rows with drafts, which go on behind a stop string."""
    async with rig(deployment) as r:
        sent = r.complete(stop=" fox", n=2, stream=stream, stream_options={"include_usage": True} if stream else None)
        submit = await r.coordinator.next(Submit)
        stopped, ended = r.ids("the quick fox runs away"), [*r.ids("the lazy dog"), 0]
        rows = [(submit.request, 0, id_, Finish.NONE) for id_ in stopped]
        rows += [(submit.request, 1, id_, Finish.STOP if id_ == 0 else Finish.NONE) for id_ in ended]
        await r.coordinator.tokens(*rows)
        abort = await r.coordinator.next(Abort)
        assert (abort.request, abort.choice) == (submit.request, 0)
        answer = await sent
        assert await r.coordinator.is_told_nothing()
        chunks = events(answer.text) if stream else [answer.json()]
        assert [joined(chunks, index) for index in (0, 1)] == ["the quick", "the lazy dog"]
        used = len(r.ids("the quick fox")) + len(ended)
        assert chunks[-1]["usage"]["completion_tokens"] == r.metric("generated_tokens_total") == used


@in_loop
async def test_stop_string_may_be_a_special_token_that_is_not_shown(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.chat(stop="<|end|>", ignore_eos=True)
        submit = await r.coordinator.next(Submit)
        await r.coordinator.generate(submit, [*r.ids("ok"), 0, *r.ids("more")])
        choice = (await sent).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "stop")
        await r.coordinator.next(Abort)


# Errors


@in_loop
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "type_", "code"),
    [
        (Refusal.NEVER, 400, "invalid_request_error", None),
        (Refusal.QUEUE_FULL, 429, "rate_limit_error", "queue_full"),
        (Refusal.WAITED, 503, "server_error", "queue_timeout"),
    ],
)
async def test_refusal_of_the_engine_is_an_error_of_its_kind(
    deployment: Deployment, stream: bool, kind: Refusal, status: int, type_: str, code: str | None
) -> None:
    async with rig(deployment) as r:
        sent = r.complete(stream=stream)
        submit = await r.coordinator.next(Submit)
        await r.coordinator.say(Refused(submit.request, kind, "the reason"))
        response = await sent
        assert response.status_code == status
        assert response.json() == {"error": {"message": "the reason", "type": type_, "param": None, "code": code}}
        assert ("retry-after" in response.headers) == (status != 400)
        assert r.metric("requests_total", finish_reason="error") == 1


@in_loop
async def test_grammar_that_takes_too_much_work_fails_its_request_alone(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        bad = r.complete(prompt="a", structured_outputs={"regex": "a+"})
        submit = await r.coordinator.next(Submit)
        assert submit.grammar
        good = r.complete(prompt="b")
        await r.coordinator.tokens((submit.request, 0, -1, Finish.TOO_COMPLEX))
        response = await bad
        assert response.status_code == 400
        assert "grammar" in response.json()["error"]["message"]
        await r.coordinator.next(Abort)
        assert (await r.answer(good, "ok")).status_code == 200


@in_loop
async def test_answer_that_is_not_finite_is_a_servers_error_of_that_request_alone(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        bad, good = r.complete(prompt=["a", "b"]), r.complete()
        submits = [await r.coordinator.next(Submit) for _ in range(3)]
        by_prompt = {tuple(s.prompt.tolist()): s for s in submits}
        await r.coordinator.tokens((by_prompt[tuple(r.ids("a"))].request, 0, -1, Finish.ERROR))
        assert (await bad).status_code == 500
        assert {(await r.coordinator.next(Abort)).request for _ in range(2)} == {
            by_prompt[tuple(r.ids(text))].request for text in "ab"
        }
        await r.coordinator.generate(by_prompt[tuple(r.ids("the fox"))], [5])
        assert (await good).status_code == 200


@in_loop
async def test_error_in_mid_stream_is_one_event_and_the_end(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.complete(stream=True)
        submit = await r.coordinator.next(Submit)
        await r.coordinator.tokens((submit.request, 0, r.ids("a")[0], Finish.NONE))
        async with r.client.stream("POST", "/v1/models"):  # a round trip, after which the first event is out
            pass
        await r.coordinator.tokens((submit.request, 0, -1, Finish.ERROR))
        body = (await sent).text
        assert '"text":"a"' in body
        assert body.count('data: {"error":{') == 1
        assert "[DONE]" not in body
        assert body.rstrip().endswith('"type":"server_error","param":null,"code":null}}')


@in_loop
async def test_fault_in_one_requests_text_fails_it_alone(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(deployment) as r:
        bad, good = r.complete(prompt="a"), r.complete(prompt="b")
        submits = {tuple(s.prompt.tolist()): s for s in [await r.coordinator.next(Submit), await r.coordinator.next(Submit)]}
        first = submits[tuple(r.ids("a"))]
        record = r.engine._records[first.request]
        monkeypatch.setattr(record.choices[0].text, "add", lambda *_: 1 / 0)
        await r.coordinator.tokens(*((submit.request, 0, 5, Finish.LENGTH) for submit in submits.values()))
        assert (await bad).status_code == 500
        assert (await bad).json()["error"]["message"] == "the answer could not be decoded"
        assert (await good).status_code == 200


@in_loop
async def test_small_request_is_answered_while_any_number_of_large_ones_is_worked_on(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, go_on = threading.Semaphore(0), threading.Event()
    least_tokens = Tokenizer.least_tokens

    def slow(tokenizer: Tokenizer, text: str) -> int:
        if len(text) > LARGE_BYTES:
            working.release()
            assert go_on.wait(LIMIT_S)
        return least_tokens(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "least_tokens", slow)
    async with rig(deployment) as r:
        large = "x" * LARGE_BYTES + "x"
        sent = [r.complete(prompt=large) for _ in range(8)] + [
            r.chat(messages=[{"role": "user", "content": large}]) for _ in range(8)
        ]
        for _ in range(2):  # as many as are worked on at once; the others wait
            assert await asyncio.to_thread(working.acquire, timeout=LIMIT_S)
        assert (await r.answer(r.complete(), "ok")).status_code == 200
        assert not any(one.done() for one in sent)
        go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*sent)} == {400}


@in_loop
async def test_fault_in_making_a_prompt_fails_that_request_alone(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(deployment) as r:
        monkeypatch.setattr(r.tokenizer, "encode", lambda *_: 1 / 0)
        response = await r.complete()
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        monkeypatch.undo()
        assert (await r.answer(r.complete(), "ok")).status_code == 200


@in_loop
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_unknown_model_is_404_whatever_else_the_body_holds(deployment: Deployment, path: str) -> None:
    async with rig(deployment) as r:
        for name in ("no/such", deployment.model_path):
            response = await r.post(path, model=name, prompt="x", messages=[])
            assert response.status_code == 404
            assert name in response.json()["error"]["message"]
            assert response.json()["error"]["code"] == "model_not_found"
        assert (await r.post(path, model=5)).json()["error"]["param"] == "model"


@in_loop
async def test_body_with_an_error_is_400_with_its_field_and_the_next_is_served(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        response = await r.complete(temperature=-1)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "temperature"
        assert (await r.client.post("/v1/completions", content=b'{"prompt": "x", "top_p": NaN}')).json()["error"][
            "param"
        ] == "top_p"
        assert (await r.client.post("/v1/completions", content=b"{")).status_code == 400
        assert (await r.complete(prompt=[310])).status_code == 400
        assert (await r.complete(prompt=[5] * 100)).json()["error"]["code"] == "context_length_exceeded"
        assert (await r.answer(r.complete(), "ok")).status_code == 200


@in_loop
async def test_body_beyond_the_bound_is_413_announced_or_not(deployment: Deployment) -> None:
    async def parts() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"x" * 2**20

    async with rig(deployment) as r:
        assert (await r.client.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))).status_code == 413
        assert (await r.client.post("/v1/completions", content=parts())).status_code == 413
        assert (await r.answer(r.complete(), "ok")).status_code == 200


@in_loop
@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/nothing", 404, "/docs lists what there is"),
        ("GET", "/", 404, "/docs lists what there is"),
        ("POST", "/v1/completions/", 404, "use /v1/completions"),
        ("POST", "/v1/embeddings", 404, "this server generates text only"),
        ("GET", "/docs/assets/nothing", 404, "no such endpoint"),
        ("GET", "/v1/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/docs/assets/swagger-ui.css", 405, "GET, HEAD"),
    ],
)
async def test_unknown_path_and_wrong_method_are_errors_that_name_what_is_right(
    deployment: Deployment, method: str, path: str, status: int, says: str
) -> None:
    async with rig(deployment) as r:
        response = await r.client.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]
        assert says in response.json()["error"]["message"]
        assert response.headers.get("allow") == (says if status == 405 else None)


# The rest


@in_loop
async def test_models_are_listed_under_their_names_alone(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        response = await r.client.get("/v1/models")
        assert [(m["id"], m["max_model_len"], m["vocab_size"]) for m in response.json()["data"]] == [
            ("small", 100, 310),
            ("also-small", 100, 310),
        ]
        assert deployment.model_path not in response.text


@in_loop
async def test_messages_of_another_epoch_are_dropped(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.complete()
        submit = await r.coordinator.next(Submit)
        await r.coordinator.tokens((submit.request, 0, 5, Finish.LENGTH), epoch=EPOCH - 1)
        await r.coordinator.say(Stop(True, ""), EPOCH + 1)
        await r.coordinator.generate(submit, r.ids("ok"))
        assert (await sent).json()["choices"][0]["text"] == "ok"


@in_loop
async def test_prompts_logprobs_are_asked_for_and_answered(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        for fields, of_prompt in (({"echo": True, "logprobs": 2, "max_tokens": 0}, 2), ({"prompt_logprobs": 1}, 1)):
            sent = r.complete(**fields)
            submit = await r.coordinator.next(Submit)
            assert submit.prompt_logprobs == of_prompt
            for id_ in submit.prompt.tolist()[1:]:  # a chunk each
                await r.coordinator.say(PromptScores(submit.request, scores([id_], of_prompt)))
            await r.coordinator.generate(submit, [5])
            choice = (await sent).json()["choices"][0]
            listed = choice.get("prompt_logprobs") or choice["logprobs"]["token_logprobs"]
            assert [entry is None for entry in listed] == [True] + [False] * (len(submit.prompt) - 1)


@in_loop
async def test_logprobs_that_are_not_finite_are_a_servers_error_of_that_request_alone(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        sent = r.complete(prompt=[5, 6], prompt_logprobs=0)
        submit = await r.coordinator.next(Submit)
        broken = Scores(np.array([1], "<u2"), np.array([6], "<i4"), np.array([np.nan], "<f4"))
        await r.coordinator.say(PromptScores(submit.request, broken))
        assert (await sent).status_code == 500
        await r.coordinator.next(Abort)
        assert (await r.answer(r.complete(), "ok")).status_code == 200


@in_loop
async def test_answer_of_no_tokens_is_not_counted(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        response = await r.answer(r.complete(max_tokens=0, echo=True), "a")
        assert (response.json()["choices"][0]["text"], response.json()["usage"]["completion_tokens"]) == ("the fox", 0)
        assert r.metric("generated_tokens_total") == 0


@in_loop
async def test_fields_of_a_body_reach_the_engine(deployment: Deployment) -> None:
    settings = deployment.settings.model_copy(update={"scheduling_policy": "priority"})
    async with rig(deployment.model_copy(update={"settings": settings})) as r:
        sent = r.complete(
            logit_bias={"7": 1.5, "9": -100}, min_tokens=2, logprobs=3, cache_salt="mine", stop_token_ids=[7], priority=-3
        )
        submit = await r.coordinator.next(Submit)
        assert (submit.bias_ids.tolist(), submit.bias_values.tolist()) == ([7, 9], [1.5, -100])
        assert (submit.min_tokens, submit.logprobs, submit.prompt_logprobs) == (2, 3, -1)
        assert (submit.cache_salt, submit.stop_ids.tolist(), submit.priority) == ("mine", [0, 7], -3)
        await r.coordinator.generate(submit, r.ids("ok"))
        assert (await sent).status_code == 200


@in_loop
async def test_openai_client_reads_answers_streams_and_errors(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        client = openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="none", http_client=r.client, max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]

        async def asked(**more: Any) -> Any:
            return await client.chat.completions.create(model="small", messages=messages, **more)

        async def answered(sent: Any, text: str = "the dog") -> Any:
            task = asyncio.create_task(sent)
            await r.coordinator.generate(await r.coordinator.next(Submit), r.ids(text))
            return await task

        sent = asked(temperature=0, max_completion_tokens=5, user="me", logprobs=True, top_logprobs=2)
        whole = (await answered(sent)).choices[0]
        assert whole.message.content == "the dog"
        content = whole.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in content) == b"the dog"
        assert {len(entry.top_logprobs) for entry in content} == {2}

        chunks = [c async for c in await answered(asked(stream=True, logprobs=True))]
        assert "".join([c.choices[0].delta.content or "" for c in chunks]) == "the dog"
        assert [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content] == [
            entry.token for entry in content
        ]

        completion = await answered(client.completions.create(model="small", prompt="x", logprobs=1, echo=True, max_tokens=9))
        listed = completion.choices[0].logprobs
        assert (completion.choices[0].text, "".join(listed.tokens)) == ("xthe dog", "xthe dog")
        assert listed.token_logprobs[0] is None

        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await asked(logprobs=True, top_logprobs=21)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nothing")
        r.engine.stop_taking("the server is shutting down")
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await asked()


def test_records_can_be_asked_for_again_from_where_they_are(deployment: Deployment) -> None:
    """What a new engine would be asked: open choices only, with the ids that they have."""

    @in_loop
    async def run() -> None:
        async with rig(deployment) as r:
            sent = r.complete(n=3, seed=9)
            submit = await r.coordinator.next(Submit)
            await r.coordinator.tokens(
                *((submit.request, c, 5 + c, Finish.LENGTH if c == 1 else Finish.NONE) for c in range(3))
            )
            record = r.engine._records[submit.request]
            while record.open_choices == 3:
                await asyncio.sleep(0)
            again = record.submit()
            assert (again.choices.tolist(), [ids.tolist() for ids in again.generated]) == ([0, 2], [[5], [7]])
            assert (
                dataclasses.replace(again, choices=submit.choices, generated=submit.generated).max_tokens == submit.max_tokens
            )
            await r.coordinator.tokens(*((submit.request, c, 9, Finish.LENGTH) for c in (0, 2)))
            await sent

    run()
