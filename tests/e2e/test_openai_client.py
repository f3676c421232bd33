"""What users of OpenAI's Python client do, with a running server of the demo model at TP 2 in float32."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.server import Server, wait_for

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
COUNT, COUNTED = "1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10, 11, 12,"
STORY = "Once upon a time, in a small village by the sea,"


class Fruit(BaseModel):
    """What an answer is to be."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["apple", "plum"]
    count: Annotated[int, Field(ge=0, le=9)]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(demo_server: Server) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, http_client=DefaultHttpxClient(trust_env=False)
    ) as made:
        yield made


def chat(client: OpenAI, messages: Any = CAPITAL, **more: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{"temperature": 0, "max_tokens": 24, **more})


def complete(client: OpenAI, prompt: Any = COUNT, **more: Any) -> Any:
    return client.completions.create(model="demo", prompt=prompt, **{"temperature": 0, "max_tokens": 24, **more})


# Models


def test_models_are_listed_and_found_by_name(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, client.models.retrieve("demo")) == ("demo", "model", model)
    with pytest.raises(openai.NotFoundError, match="no/such"):
        client.models.retrieve("no/such")


# Texts


def test_completion_whole_and_streamed(client: OpenAI) -> None:
    whole = complete(client)
    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == ("text_completion", COUNTED, "length")
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == COUNTED
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.usage for chunk in chunks} == {None}


def test_chat_whole_and_streamed(client: OpenAI) -> None:
    whole = chat(client)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", PARIS)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    cached = {"prompt_tokens_details"}  # the second time, more of the prompt may be
    assert (last.choices, last.usage.model_dump(exclude=cached)) == ([], whole.usage.model_dump(exclude=cached))


def test_stream_helper_of_the_client_gathers_the_whole_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=CAPITAL, temperature=0, max_tokens=24) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert ("".join(deltas), final.choices[0].message.content) == (PARIS, PARIS)


def test_choices_of_a_batch_are_prompt_by_prompt(client: OpenAI) -> None:
    answer = complete(client, [COUNT, STORY], n=2, temperature=1, seed=5, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = complete(client, STORY, n=2, temperature=1, seed=5, max_tokens=8)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage.completion_tokens == 32


def test_seed_repeats_and_another_gives_another(client: OpenAI) -> None:
    texts = [complete(client, STORY, temperature=1, seed=seed, max_tokens=8).choices[0].text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_ends_the_text_before_it(client: OpenAI) -> None:
    for stop, text in (("8", " 6, 7, "), (["x", ", 9"], " 6, 7, 8")):
        choice = complete(client, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (text, "stop")
        assert "".join(chunk.choices[0].text for chunk in complete(client, stop=stop, stream=True)) == text
    kept = complete(client, stop="8", extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == " 6, 7, 8"


def test_penalties_and_bounds_of_the_answer_change_it(client: OpenAI) -> None:
    assert complete(client, frequency_penalty=2, presence_penalty=2).choices[0].text != COUNTED
    assert chat(client, max_tokens=None, max_completion_tokens=2).usage.completion_tokens == 2
    assert chat(client, extra_body={"min_tokens": 12}).usage.completion_tokens >= 12
    assert chat(client).usage.completion_tokens == 8


# Logprobs and bias


def test_completion_logprobs_are_aligned_with_the_text(client: OpenAI) -> None:
    answer = complete(client, "The capital of France is", max_tokens=8, logprobs=3)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert "".join(found.tokens) == choice.text
    assert [at - found.text_offset[0] for at in found.text_offset] == [len("".join(found.tokens[:place])) for place in range(8)]
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert value == top[token] == max(top.values()) <= 0
    chunks = list(complete(client, "The capital of France is", max_tokens=8, logprobs=3, stream=True))
    assert [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens
    ] == found.tokens


def test_echo_gives_the_prompts_logprobs_too(client: OpenAI) -> None:
    echoed = complete(client, echo=True, logprobs=1, max_tokens=0)
    choice, found = echoed.choices[0], echoed.choices[0].logprobs
    assert choice.text == "".join(found.tokens) == COUNT
    assert len(found.tokens) == echoed.usage.prompt_tokens
    assert (found.token_logprobs[0], found.top_logprobs[0], echoed.usage.completion_tokens) == (None, None, 0)
    assert all(value < 0 for value in found.token_logprobs[1:])
    longer = complete(client, echo=True, logprobs=1, max_tokens=4).choices[0]
    assert longer.text == COUNT + COUNTED[: len(longer.text) - len(COUNT)]
    assert longer.logprobs.token_logprobs[1 : len(found.tokens)] == pytest.approx(found.token_logprobs[1:], abs=1e-4)


def test_chat_logprobs_have_bytes_and_alternatives(client: OpenAI) -> None:
    entries = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(PARIS)
    for entry in entries[:-1]:  # the last is the end of the turn, which is not shown
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
    assert [entry.top_logprobs for entry in chat(client, logprobs=True).choices[0].logprobs.content] == [[]] * len(entries)
    assert chat(client).choices[0].logprobs is None
    streamed = [entry for chunk in chat(client, logprobs=True, stream=True) for entry in _entries(chunk)]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def _entries(chunk: Any) -> list[Any]:
    found = chunk.choices[0].logprobs
    return found.content if found else []


def test_bias_forces_and_bans_ids_and_leaves_logprobs_raw(client: OpenAI, demo_server: Server) -> None:
    with demo_server.client() as http:
        seven, six = (http.post("/tokenize", json={"prompt": text}).json()["tokens"][-1] for text in (" 7", " 6"))
    plain = complete(client, max_tokens=2, logprobs=1).choices[0]
    banned = complete(client, max_tokens=2, logit_bias={str(six): -100}).choices[0]
    assert banned.text != plain.text == COUNTED[: len(plain.text)]
    forced = complete(client, max_tokens=4, logit_bias={str(seven): 100}, logprobs=1).choices[0]
    assert len(set(forced.logprobs.tokens)) == 1
    assert forced.logprobs.top_logprobs[0] == pytest.approx(
        plain.logprobs.top_logprobs[0] | forced.logprobs.top_logprobs[0], abs=1e-4
    )


# Structured output


def test_answer_is_parsed_into_the_type_that_was_asked_for(client: OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Name a fruit."}]
    answer = client.chat.completions.parse(model="demo", messages=question, response_format=Fruit, seed=1, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Fruit)
    assert answer.choices[0].finish_reason == "stop"


def test_json_schema_streamed_joins_to_the_whole(client: OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "fruit", "strict": True, "schema": Fruit.model_json_schema()}}
    whole = chat(client, response_format=schema, max_tokens=60).choices[0].message.content
    assert Fruit.model_validate_json(whole)
    chunks = chat(client, response_format=schema, max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_json_object_is_one_and_has_no_run_of_blanks(client: OpenAI) -> None:
    question = [{"role": "user", "content": "Give me a JSON object with one key."}]
    choice = chat(client, question, response_format={"type": "json_object"}, max_tokens=60).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    assert not re.search(r"\s{40}", choice.message.content)
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["blue", "green"]}, "blue|green"),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'}, "<[a-z]{2,5}>"),
    ],
)
def test_structured_outputs_hold_at_any_temperature(client: OpenAI, constraint: dict[str, Any], pattern: str) -> None:
    answer = complete(client, STORY, n=2, temperature=1.5, seed=1, extra_body={"structured_outputs": constraint})
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
        ("structured_outputs", {"regex": "(unclosed"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"grammar": "start: missing"}),
    ],
)
def test_constraint_that_cannot_be_is_refused_by_its_field(client: OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={field: value})
    assert refused.value.param == field


# Tools


def test_required_tool_is_called_with_valid_arguments_streamed_as_whole(client: OpenAI) -> None:
    asked: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    choice = chat(client, **asked).choices[0]
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls) > 0
    for call in calls:
        assert (call.type, call.function.name in ("weather", "time")) == ("function", True)
        assert set(json.loads(call.function.arguments)) in ({"city", "days"}, {"zone"})
    chunks = list(chat(client, stream=True, **asked))
    streamed: dict[int, list[str]] = {}
    for delta in [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]:
        name, arguments = streamed.setdefault(delta.index, ["", ""])
        streamed[delta.index] = [name + (delta.function.name or ""), arguments + (delta.function.arguments or "")]
    assert [*streamed.values()] == [[call.function.name, call.function.arguments] for call in calls]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_named_tool_is_the_one_called_and_its_result_goes_on(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    choice = chat(client, tools=[WEATHER, TIME], tool_choice=named, max_tokens=60).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)["zone"] in ("UTC", "CET")) == ("time", True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
    talk = [*CAPITAL, choice.message.model_dump(exclude_none=True), result]
    assert chat(client, talk, tools=[WEATHER, TIME], tool_choice="none", max_tokens=4).choices[0].message.content


def test_tool_choice_none_calls_none(client: OpenAI) -> None:
    message = chat(client, tools=[WEATHER], tool_choice="none", max_tokens=4).choices[0].message
    assert message.content
    assert not message.tool_calls


def test_tool_choice_auto_is_refused_where_it_is_not_known_how_the_model_writes_calls(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        chat(client, tools=[WEATHER])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", {"type": "function", "function": {"name": "nothing"}}),
        ("tool_choice", "sometimes"),
        ("tools", [{"type": "function", "function": {}}]),
        ("tools", [WEATHER, WEATHER]),
        ("tools", [{"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}]),
    ],
)
def test_tools_that_cannot_be_are_refused_by_their_field(client: OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **{"tools": [WEATHER], "tool_choice": "required", field: value})
    assert refused.value.param == field


# Errors and headers


def test_errors_are_the_clients_exceptions_with_param_and_code(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="x")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    for field, value in (("temperature", -1), ("n", 0), ("top_logprobs", 99), ("logit_bias", {"a": 1}), ("stop", [""])):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, **{"logprobs": True, field: value})
        assert (wrong.value.param, wrong.value.type) == (field, "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, [5] * 100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        complete(client, stream=True, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model="demo", input="x")


def test_requests_have_an_id_of_their_own_or_the_clients(client: OpenAI) -> None:
    first, second = (client.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=1) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    named = client.completions.with_raw_response.create(
        model="demo", prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert (named.headers["x-request-id"], named.parse().choices[0].finish_reason) == ("mine-1", "length")
    with pytest.raises(openai.BadRequestError) as wrong:
        complete(client, n=0)
    assert wrong.value.request_id


def test_fields_that_nobody_knows_are_named_in_a_header(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=1, extra_body={"my_field": 1})
    assert raw.headers["x-ignored-fields"] == "my_field"
    assert "x-ignored-fields" not in client.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=1).headers


# Async


def test_async_clients_run_at_once_and_a_cancelled_one_is_aborted(demo_server: Server) -> None:
    aborted = demo_server.metric("tpserve_requests_total", finish_reason="abort")

    async def run() -> list[str]:
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:

            async def ask(**more: Any) -> Any:
                return await client.completions.create(model="demo", prompt=COUNT, temperature=0, **more)

            endless = asyncio.create_task(ask(max_tokens=4000, extra_body={"ignore_eos": True}))
            stream = await ask(max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
            async for _ in stream:
                await stream.close()
                break
            texts = [answer.choices[0].text for answer in await asyncio.gather(*(ask(max_tokens=24) for _ in range(4)))]
            endless.cancel()
            await asyncio.gather(endless, return_exceptions=True)
            return texts

    assert asyncio.run(run()) == [COUNTED] * 4
    wait_for(lambda: demo_server.metric("tpserve_requests_total", finish_reason="abort") == aborted + 2, 10, "both aborts")
    wait_for(lambda: demo_server.metric("tpserve_requests_running") == 0, 10, "an idle engine")
