from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tpserve.frontend import neutral, schema
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest, chat_request, completion_request, parse_json
from tpserve.messages import Sampling
from tpserve.sampling import SamplingDefaults

VOCAB = 310
HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> GenerateRequest:
    return completion_request({"prompt": "x", **fields}, None, VOCAB)


def chat(**fields: Any) -> GenerateRequest:
    return chat_request({"messages": HI, **fields}, None, VOCAB)


def refusal(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return caught.value


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": 1,}', b"{'a': 1}", b'{"a":"\\ud800"}']
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        parse_json(body)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_number_that_is_not_finite_is_refused_by_its_field(field: str, number: str) -> None:
    body = parse_json(f'{{"prompt": "x", "{field}": {number}}}'.encode())
    assert refusal(lambda: completion_request(body, None, VOCAB)).param == field


# Values that are refused and accepted, field by field

BAD = {
    "temperature": (-1, -1e-9, 100.1, "hot", True, [], 1e300),
    "top_p": (-0.5, 1.5, "x", True),
    "top_k": (-5, -2, 1.5, "x", True),
    "min_p": (-1, 2, "x"),
    "repetition_penalty": (0, -1, 1e-9, 101, "x", True),
    "presence_penalty": (-2.1, 2.1, "x", False),
    "frequency_penalty": (-2.1, 100, [], True),
    "seed": ("x", 1.5, True, []),
    "stop": (5, [1], [None], "", [""], ["a"] * 17, "x" * 513, {"a": 1}, True),
    "n": (0, -1, 129, 10**6, "two", 1.5, True),
    "max_tokens": (0, -1, 1.5, "ten", [], True),
    "max_completion_tokens": (0, -1, "x"),
    "stream": ("maybe", 1, 0, "true"),
    "stream_options": (True, [], "x", {"include_usage": 1}, {"include_usage": True}),  # the last without stream
    "ignore_eos": ("x", 1),
    "skip_special_tokens": ("x", 0),
    "user": (5, []),
    "metadata": ("x", []),
}
GOOD = {
    "temperature": (0, 1, 0.5, 100, 1e-9),
    "top_p": (0, 1, 0.5, 1e-6),
    "top_k": (-1, 0, 1, 10**30),
    "min_p": (0, 1, 0.1),
    "repetition_penalty": (1, 1.1, 0.01, 100),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0.5, 2),
    "seed": (0, -1, 2**70),
    "stop": ("a", ["a", "b"], [], ["a"] * 16, "x" * 512),
    "n": (1, 128),
    "max_tokens": (1, 10**9, 10**30),
    "max_completion_tokens": (1,),
    "stream": (True, False),
    "stream_options": ({}, {"include_usage": False, "include_obfuscation": False}),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "user": ("u",),
    "safety_identifier": ("s",),
    "prompt_cache_key": ("k",),
    "metadata": ({}, {"a": "b"}),
}


def cases(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(f, v, id=f"{f}={json.dumps(v)[:20]}") for f, values in table.items() for v in values]


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("field", "value"), cases(BAD))
def test_value_out_of_range_or_of_wrong_type_is_refused_by_its_field(make: Any, field: str, value: Any) -> None:
    error = refusal(make, **{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("field", "value"), cases(GOOD))
def test_value_in_range_is_accepted(make: Any, field: str, value: Any) -> None:
    make(**{"stream": True, field: value})


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("field", [*GOOD, *neutral.CHAT, *neutral.COMPLETION, "nobody_knows"])
def test_null_is_as_if_the_field_were_absent(make: Any, field: str) -> None:
    def without_seed(request: GenerateRequest) -> GenerateRequest:
        return replace(request, sampling=replace(request.sampling, seed=0))

    assert repr(without_seed(make(**{field: None}))) == repr(without_seed(make()))


# Fields that are not built

TABLES = [(completion, neutral.COMPLETION), (chat, neutral.CHAT)]


@pytest.mark.parametrize(("make", "field"), [pytest.param(make, field) for make, table in TABLES for field in table])
def test_field_that_is_not_built_is_refused_by_name(make: Any, field: str) -> None:
    error = refusal(make, **{field: {"some": "value"}})
    assert error.message == f"{field} is not supported yet"
    assert error.param == field


@pytest.mark.parametrize(
    ("make", "field", "value"), [pytest.param(make, f, v) for make, table in TABLES for f, vs in table.items() for v in vs]
)
def test_neutral_value_is_accepted(make: Any, field: str, value: Any) -> None:
    make(**{field: value})


NOT_NEUTRAL = {
    "logit_bias": ({"1": 100}, "x"),
    "logprobs": (0, 3, True, -5),
    "best_of": (2, True, 10**6),
    "echo": (True,),
    "stop_token_ids": ([0],),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {}}),
    "min_tokens": (1,),
}


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("field", "value"), cases(NOT_NEUTRAL))
def test_value_that_asks_for_something_is_refused(make: Any, field: str, value: Any) -> None:
    assert "is not supported yet" in refusal(make, **{field: value}).message


def test_tools_are_refused_and_their_absence_is_not() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert refusal(chat, tools=[tool], tool_choice="auto").message == "tools is not supported yet"
    assert refusal(chat, tool_choice="required").param == "tool_choice"
    chat(tools=[], tool_choice="auto", parallel_tool_calls=True)


def test_best_of_is_neutral_when_it_is_n() -> None:
    assert completion(n=3, best_of=3).n == 3
    assert refusal(completion, n=2, best_of=3).param == "best_of"


def test_unknown_field_is_refused_by_name() -> None:
    assert refusal(completion, temprature=1).message == "temprature: unknown field"
    assert refusal(chat, stream=True, stream_options={"colour": 1}).message == "stream_options.colour: unknown field"


# Prompts and messages


@pytest.mark.parametrize(
    "prompt",
    [
        "", ["", ""], ["a", ""], [], [[]], [[], []], None, 5, True, {"a": 1}, [1, "a"], [["a"]], [None], [1.5], [[1], "a"],
        [[[1]]], [{"text": "x"}], [True],
    ],
)  # fmt: skip
def test_prompt_that_is_empty_or_of_wrong_type_is_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_absent_prompt_and_messages_are_named() -> None:
    for make, field in ((completion_request, "prompt"), (chat_request, "messages")):
        with pytest.raises(InvalidRequest, match=f"^{field}:"):
            make({}, None, VOCAB)


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))]
)
def test_prompt_may_be_text_or_ids_one_or_many(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_choices_of_all_prompts_together_are_bounded() -> None:
    assert completion(prompt=["a"] * 8, n=128).n == 128
    assert "9 prompts x n 128" in refusal(completion, prompt=["a"] * 9, n=128).message


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", [5], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": 5, "content": "x"}], [{"role": "", "content": ""}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": None}], [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "noise", "text": "x"}]}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": "x", "colour": "red"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}], [{"role": "tool", "content": "x"}],
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any) -> None:
    assert refusal(chat, messages=messages).param == "messages"


def test_refused_message_is_named_by_its_place() -> None:
    assert refusal(chat, messages=[*HI, {"role": "user", "content": 5}]).message.startswith("messages[1].content: ")
    assert refusal(chat, messages=[*HI, {"role": "user", "content": "", "a": 1}]).message == "messages[1].a: unknown field"


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == ({"role": "user", "content": "one\ntwo"},)


def test_message_as_the_openai_client_returns_it_is_accepted() -> None:
    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert chat(messages=[*HI, {"role": "assistant", "content": "ok", **nothing}]).messages[1] == {
        "role": "assistant",
        "content": "ok",
    }


def test_name_of_a_speaker_reaches_the_template() -> None:
    assert chat(messages=[{"role": "user", "content": "x", "name": "ann"}]).messages[0]["name"] == "ann"


# What values come to mean


def test_defaults_are_plain_sampling_up_to_the_room_left() -> None:
    request = completion()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert not sampling.looks_back
    assert (request.n, request.max_tokens, request.stop, request.stream) == (1, None, (), False)
    assert (request.ignore_eos, request.skip_special_tokens) == (False, True)


DEFAULTS = SamplingDefaults(temperature=0.3, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.2)


@pytest.mark.parametrize("name", SamplingDefaults.model_fields)
def test_models_default_holds_where_a_field_is_absent_or_null_and_yields_to_a_value(name: str) -> None:
    def made(**fields: Any) -> Sampling:
        return chat_request({"messages": HI, **fields}, 0, VOCAB, DEFAULTS).sampling

    assert getattr(made(), name) == getattr(made(**{name: None}), name) == getattr(DEFAULTS, name)
    off = getattr(SamplingDefaults(), name)
    assert made(**{name: off}) != made()
    assert getattr(made(**{name: off}), name) == off


@pytest.mark.parametrize(
    ("fields", "looks_back"),
    [({"repetition_penalty": 1.1}, True), ({"presence_penalty": -1}, True), ({"frequency_penalty": 0.1}, True),
     ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}, False)],
)  # fmt: skip
def test_penalties_look_back_unless_all_are_off(fields: dict[str, float], looks_back: bool) -> None:
    assert completion(**fields).sampling.looks_back is looks_back


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1e-6}, {"top_p": 0}, {"top_p": 1e-12}])
def test_next_to_no_temperature_or_mass_is_greedy(fields: dict[str, float]) -> None:
    assert completion(**fields).sampling.temperature == 0.0


@pytest.mark.parametrize(("top_k", "means"), [(-1, 0), (0, 0), (7, 7), (VOCAB, 0), (10**30, 0)])
def test_top_k_of_nothing_or_everything_is_off(top_k: int, means: int) -> None:
    assert completion(top_k=top_k).sampling.top_k == means


@pytest.mark.parametrize(("seed", "means"), [(7, 7), (-1, 2**64 - 1), (2**70 + 3, 3)])
def test_seed_is_taken_modulo_two_to_the_64(seed: int, means: int) -> None:
    assert completion_request({"prompt": "x", "seed": seed}, 5, VOCAB).sampling.seed == means


def test_request_without_a_seed_gets_the_servers_else_is_left_without() -> None:
    assert completion_request({"prompt": "x"}, 5, VOCAB).sampling.seed == 5
    assert completion_request({"prompt": "x"}, 5, VOCAB).has_seed
    assert not completion().has_seed


def test_one_limit_may_be_given_under_both_names_but_not_two() -> None:
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=4).max_tokens == 4
    assert "differ" in refusal(chat, max_tokens=3, max_completion_tokens=4).message


def test_usage_of_a_stream_is_included_only_when_asked() -> None:
    assert not chat(stream=True).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_bound_of_choices_fits_a_submit() -> None:
    assert schema.MAX_N <= 2**16
