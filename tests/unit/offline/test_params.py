"""SamplingParams: vLLM's names and defaults, checked as an HTTP body is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tpserve import SamplingParams
from tpserve.frontend import schema


def request(params: SamplingParams) -> schema.GenerateRequest:
    return schema.completion_request({"prompt": "x", **params.body()}, 5, 100)


def test_defaults_are_those_of_vllm_users() -> None:
    made = request(SamplingParams())
    assert (made.n, made.max_tokens, made.sampling.temperature, made.sampling.top_k, made.stop) == (1, 16, 1.0, 0, ())
    assert made.skip_special_tokens
    assert not made.ignore_eos


def test_values_reach_the_request() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1, stop=["a", "b"], max_tokens=None, ignore_eos=True,
        skip_special_tokens=False,
    )  # fmt: skip
    made, sampling = request(params), request(params).sampling
    assert (made.n, made.stop, made.max_tokens, made.ignore_eos, made.skip_special_tokens) == (2, ("a", "b"), None, True, False)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert sampling.seed == 2**64 - 1


def test_numbers_of_numpy_and_torch_are_taken() -> None:
    made = request(
        SamplingParams(
            n=np.int64(2), temperature=np.float32(0.5), top_p=torch.tensor(0.25), seed=np.uint32(7), ignore_eos=np.bool_(True)
        )  # type: ignore[arg-type]
    )
    assert (made.n, made.ignore_eos) == (2, True)
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.seed) == (0.5, 0.25, 7)


def test_values_about_tokens_reach_the_request() -> None:
    made = request(
        SamplingParams(
            logprobs=3, prompt_logprobs=0, logit_bias={np.int64(5): np.float32(0.5)}, stop_token_ids=np.array([7, 8]),
            min_tokens=2, include_stop_str_in_output=True,
        )  # type: ignore[arg-type, dict-item]
    )  # fmt: skip
    assert (made.logprobs, made.prompt_logprobs, made.logit_bias) == (3, 0, {5: 0.5})
    assert (made.stop_token_ids, made.min_tokens, made.include_stop) == ((7, 8), 2, True)


def test_penalties_reach_the_request() -> None:
    sampling = request(SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-1)).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.5, -1)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"temperature": -1}, "temperature: "),
        ({"n": 0}, "n: "),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"min_tokens": 17}, "min_tokens: 17 is more than max_tokens, 16"),
        ({"logprobs": 21}, "logprobs: "),
        ({"prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"logit_bias": {5: 101.0}}, "logit_bias: "),
        ({"stop_token_ids": [-1]}, "stop_token_ids: "),
        ({"top_k": -2}, "top_k: "),
        ({"stop": [1]}, "stop: "),
        ({"top_p": float("nan")}, "top_p: "),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs is not supported yet"),
        ({"detokenize": False}, "detokenize is not supported yet"),
    ],
)
def test_value_that_is_wrong_or_not_built_is_refused_by_name(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**keywords)


@pytest.mark.parametrize(
    "keywords", [{"logprobs": None}, {"presence_penalty": 0.0}, {"repetition_penalty": 1.0}, {"top_k": -1}, {"bad_words": []}]
)
def test_value_that_asks_for_nothing_is_accepted(keywords: dict[str, Any]) -> None:
    SamplingParams(**keywords)


@pytest.mark.parametrize("name", ["stream", "prompt", "temprature"])
def test_unknown_keyword_is_a_type_error_with_its_name(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: True})


def test_parameters_can_be_changed_after_they_were_made() -> None:
    params = SamplingParams()
    params.max_tokens = 3
    assert request(params).max_tokens == 3
    assert params == SamplingParams(max_tokens=3)
