from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tpserve.frontend import neutral
from tpserve.frontend.body import MAX_N, ChatBody, CompletionBody
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.http import json_body
from tpserve.frontend.schema import GenerateRequest, chat_request, completion_request
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
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_number_that_is_not_finite_is_refused_by_its_field(field: str, number: str) -> None:
    body = json_body.parse(f'{{"prompt": "x", "{field}": {number}}}'.encode())
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
    "best_of": (2, "x", True),
    "max_tokens": (-1, 1.5, "ten", [], True),
    "max_completion_tokens": (-1, "x"),
    "min_tokens": (-1, 1.5, "x", True),
    "logit_bias": (
        *("x", [], {"a": 1}, {"-1": 1}, {"1.0": 1}, {"01": 1}, {"310": 1}, {"99999999999": 1}),
        *({"1": bias} for bias in ("x", True, None, 100.1, -101, float("nan"))),
        dict.fromkeys(map(str, range(1025)), 0),
    ),
    "prompt_logprobs": (-1, 21, 10**6, True, "x"),
    "stop_token_ids": (5, "x", [-1], [310], [2**70], [True], [1.0], ["1"], [None], [5] * 65),
    "include_stop_str_in_output": ("x", 1),
    "add_special_tokens": ("x", 1),
    "priority": (-101, 101, 1.5, "x", True, 10**30),
    "cache_salt": ("", "x" * 257, 5),
    "stream": ("maybe", 1, 0, "true"),
    "stream_options": (True, [], "x", {"include_usage": 1}, {"include_usage": True}),  # the last without stream
    "response_format": ("json", {"type": "xml"}),
    "structured_outputs": ("x", {}),
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
    "best_of": (1,),
    "max_tokens": (1, 10**9, 10**30),
    "max_completion_tokens": (1,),
    "min_tokens": (0, 1),
    "logit_bias": ({}, {"0": 1, "309": -100}, {"7": 0.5}, dict.fromkeys(map(str, range(310)), 100)),
    "stop_token_ids": ([], [0, 309], [5] * 64),
    "include_stop_str_in_output": (True, False),
    "add_special_tokens": (True, False),
    "priority": (-100, 0, 100),
    "cache_salt": ("x", "ü" * 256),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "structured_outputs": ({"choice": ["a", "b"]},),
    "stream": (True, False),
    "stream_options": ({}, {"include_usage": False, "include_obfuscation": False}, {"continuous_usage_stats": True}),
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


OF_ONE = {  # endpoint: (refused, accepted)
    completion: (
        {"logprobs": (-1, 21, 10**6, True, "x"), "echo": (1, "x"), "suffix": ("x",)},
        {"logprobs": (0, 20), "echo": (True, False), "max_tokens": (0,), "suffix": ("",)},
    ),
    chat: (
        {
            "logprobs": (1, "x", 5), "top_logprobs": (-1, 21, 10**6, True, 3), "max_tokens": (0,),  # 3 without logprobs
            "max_completion_tokens": (0,), "echo": (True,), "parallel_tool_calls": (1,), "tool_choice": ("required", 5),
            "tools": ("x", [5], [{"type": "noise"}]), "chat_template_kwargs": ("x", {"messages": []}),
        },
        {
            "logprobs": (True, False), "top_logprobs": (0,), "echo": (False,), "parallel_tool_calls": (True, False),
            "tools": ([], [{"type": "function", "function": {"name": "f"}}]), "tool_choice": ("auto", "none"),
            "chat_template_kwargs": ({}, {"enable_thinking": False}), "add_generation_prompt": (True, False),
        },
    ),
}  # fmt: skip


def cases_of_one(place: int) -> list[Any]:
    return [pytest.param(make, *case.values) for make, tables in OF_ONE.items() for case in cases(tables[place])]


@pytest.mark.parametrize(("make", "field", "value"), cases_of_one(0))
def test_value_that_one_endpoint_does_not_have_is_refused_by_its_field(make: Any, field: str, value: Any) -> None:
    error = refusal(make, **{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(("make", "field", "value"), cases_of_one(1))
def test_value_of_one_endpoint_is_accepted(make: Any, field: str, value: Any) -> None:
    make(**{field: value})


FIELDS = [(completion, neutral.COMPLETION, CompletionBody), (chat, neutral.CHAT, ChatBody)]
NULLABLE = [
    pytest.param(make, field, id=f"{make.__name__}-{field}")
    for make, table, body in FIELDS
    for field in (*table, *body.model_fields, "nobody_knows")
    if field not in ("prompt", "messages")
]


@pytest.mark.parametrize(("make", "field"), NULLABLE)
def test_null_is_as_if_the_field_were_absent(make: Any, field: str) -> None:
    assert repr(replace(make(**{field: None}), ignored=())) == repr(make())


# Fields that are not built

TABLES = [(completion, neutral.COMPLETION), (chat, neutral.CHAT)]


@pytest.mark.parametrize(("make", "field"), [pytest.param(make, field) for make, table in TABLES for field in table])
def test_field_that_is_not_built_is_refused_by_name(make: Any, field: str) -> None:
    error = refusal(make, **{field: {"some": "value"}})
    instead = {"functions": "; give tools", "function_call": "; give tool_choice"}.get(field, "")
    assert error.message == f"{field} is not supported yet{instead}"
    assert error.param == field


@pytest.mark.parametrize(
    ("make", "field", "value"), [pytest.param(make, f, v) for make, table in TABLES for f, vs in table.items() for v in vs]
)
def test_neutral_value_is_accepted(make: Any, field: str, value: Any) -> None:
    make(**{field: value})


@pytest.mark.parametrize("table", [neutral.COMPLETION, neutral.CHAT])
def test_what_is_built_is_not_among_what_is_not(table: neutral.Table) -> None:
    body = CompletionBody if table is neutral.COMPLETION else ChatBody
    assert not table.keys() & body.model_fields.keys()


def test_best_of_is_only_what_n_is() -> None:
    assert completion(n=3, best_of=3).n == 3
    assert refusal(completion, n=2, best_of=3).param == refusal(completion, n=3, best_of=1).param == "best_of"


def test_fields_that_nobody_knows_are_kept_by_name() -> None:
    assert completion(temprature=1).ignored == ("temprature",)
    assert chat(stream=True, stream_options={"colour": 1}, x=1).ignored == ("x", "stream_options.colour")
    assert chat(messages=[*HI, {"role": "user", "content": "", "a": 1}]).ignored == ("messages[1].a",)


# Fields that go together


@pytest.mark.parametrize("make", [completion, chat])
def test_min_tokens_is_at_most_the_limit(make: Any) -> None:
    assert make(min_tokens=5, max_tokens=5).min_tokens == 5
    assert make(min_tokens=5).min_tokens == 5
    error = refusal(make, min_tokens=6, max_completion_tokens=5)
    assert (error.param, error.message) == ("min_tokens", "min_tokens: 6 is more than max_tokens, 5")


@pytest.mark.parametrize("make", [completion, chat])
def test_prompt_logprobs_are_not_streamed(make: Any) -> None:
    assert refusal(make, prompt_logprobs=0, stream=True).param == "prompt_logprobs"


def test_alternatives_of_a_chats_tokens_come_with_logprobs_only() -> None:
    asked = [chat(**fields).logprobs for fields in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3})]
    assert asked == [None, 0, 3]
    assert "only with logprobs true" in refusal(chat, top_logprobs=3, logprobs=False).message


@pytest.mark.parametrize(
    ("fields", "scores"),
    [({}, -1), ({"logprobs": 3}, -1), ({"echo": True}, -1), ({"echo": True, "logprobs": 0}, 0), ({"prompt_logprobs": 2}, 2),
     ({"echo": True, "logprobs": 3, "prompt_logprobs": 2}, 3), ({"logprobs": 3, "prompt_logprobs": 2}, 2)],
)  # fmt: skip
def test_prompts_logprobs_are_those_asked_for_and_those_echoed(fields: dict[str, Any], scores: int) -> None:
    assert completion(**fields).prompt_likeliest == scores


def test_special_tokens_are_added_to_prompts_and_not_to_chats_unless_asked() -> None:
    assert (completion().add_special_tokens, chat().add_special_tokens) == (True, False)
    assert not completion(add_special_tokens=False).add_special_tokens
    assert chat(add_special_tokens=True).add_special_tokens


# What the prompts' ids tell


@pytest.mark.parametrize("fields", [{"max_tokens": 2**20}, {"max_tokens": 2**18, "n": 4}, {}])
def test_logprobs_of_a_whole_answer_are_bounded(fields: dict[str, Any]) -> None:
    prompts = [np.array([5], "<i4")]
    completion(**fields, logprobs=3).check(prompts, 2**20 + 1)
    with pytest.raises(InvalidRequest, match=f"^logprobs: the answer may have {5 * 2**20}; {2**22} is the most") as caught:
        completion(**fields, logprobs=4).check(prompts, 2**20 + 1)
    assert caught.value.param == "logprobs"
    completion(**fields, logprobs=4, stream=True).check(prompts, 2**20 + 1)  # a client takes them as they come


def test_min_tokens_must_fit_behind_the_longest_prompt() -> None:
    prompts = [np.array([5] * length, "<i4") for length in (3, 10)]
    completion(min_tokens=90).check(prompts, 100)
    with pytest.raises(InvalidRequest, match="min_tokens: 91 do not fit"):
        completion(min_tokens=91).check(prompts, 100)


def test_grammar_says_alone_when_the_answer_may_end() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens: not with a grammar"):
        completion(min_tokens=1, structured_outputs={"regex": "a+"}).check([np.array([5], "<i4")], 100)


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
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}], [{"role": "tool", "content": "x"}],
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any) -> None:
    assert refusal(chat, messages=messages).param == "messages"


def test_refused_message_is_named_by_its_place() -> None:
    assert refusal(chat, messages=[*HI, {"role": "user", "content": 5}]).message.startswith("messages[1].content: ")


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
    assert MAX_N <= 2**16
