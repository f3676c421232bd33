"""The forms of prompts, conversations and parameters."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch

from tpserve import SamplingParams
from tpserve.offline import inputs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([(1, 2), np.array([3, 4])], [[1, 2], [3, 4]]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt_token_ids": [1]}, [[1]]),
        ({"prompt": "a", "prompt_token_ids": [1]}, [[1]]),
        ([{"prompt": "a", "multi_modal_data": None}, "b", {"prompt_token_ids": [1]}], ["a", "b", [1]]),
        ((text for text in "ab"), ["a", "b"]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        ([torch.tensor(1), torch.tensor(2)], [[1, 2]]),
        (array.array("i", [1, 2]), [[1, 2]]),
        (range(1, 3), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([[np.int64(1)], (torch.tensor(2), 3), torch.tensor([4])], [[1], [2, 3], [4]]),
        (np.array(["a", "b"]), ["a", "b"]),
        ({"prompt_token_ids": np.array([1, 2])}, [[1, 2]]),
        ({"prompt_token_ids": [torch.tensor(1)]}, [[1]]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_prompts_in_every_form_become_a_list(given: Any, expected: list[Any]) -> None:
    assert inputs.prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (["a", 7], 1),
        ([["a", "b"]], 0),
        ([[1, 2.0]], 0),
        ([True], 0),
        (["a", {}], 1),
        (["a", None], 1),
        ([[[1]]], 0),
        (7, 0),
        (b"abc", 0),
        (np.array([1.5]), 0),
        (np.array([True]), 0),
        (np.zeros((1, 1, 1), int), 0),
        (torch.tensor(7), 0),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(given: Any, place: int) -> None:
    with pytest.raises(ValueError, match=rf"^prompts\[{place}\]: must be"):
        inputs.prompts(given)


def test_field_of_a_prompt_that_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: 'multi_modal_data' is not supported"):
        inputs.prompts({"prompt": "a", "multi_modal_data": {"image": 1}})


def test_one_conversation_and_many_are_told_apart() -> None:
    one = [{"role": "user", "content": "x"}]
    assert inputs.conversations(one) == [one]
    assert inputs.conversations([one, one]) == [one, one]
    assert inputs.conversations(one[0]) == [one]
    assert inputs.conversations(list(one) for _ in "ab") == [one, one]
    assert inputs.conversations([]) == []


@pytest.mark.parametrize(("given", "place"), [("hi", 0), (None, 0), ([[], "hi"], 1), (["hi"], 0), ([7], 0)])
def test_what_is_no_conversation_is_refused_with_its_place(given: Any, place: int) -> None:
    with pytest.raises(ValueError, match=rf"^messages\[{place}\]: must be a list of messages"):
        inputs.conversations(given)


def test_parameters_are_for_all_or_for_each() -> None:
    short = SamplingParams(max_tokens=1)
    assert inputs.params(SamplingParams(n=3), 2) == [SamplingParams(n=3)] * 2
    assert inputs.params(short, 2) == [short, short]
    assert inputs.params([short, SamplingParams()], 2) == [short, SamplingParams()]
    with pytest.raises(ValueError, match="3 prompts, but 1 SamplingParams"):
        inputs.params([short], 3)
    with pytest.raises(TypeError, match="not dict"):
        inputs.params([{"max_tokens": 1}], 1)  # type: ignore[list-item]
