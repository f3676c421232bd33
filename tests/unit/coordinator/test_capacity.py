from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.coordinator.model_worker import make_submit
from tpserve.coordinator.capacity import Capacity

CAPACITY = Capacity(
    num_pages=4,
    page_size=4,
    max_model_len=16,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    chunked_prefill=True,
    prefix_caching=True,
    by_priority=False,
    max_queue=None,
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_model_len": 17}, "17 tokens take 5 pages of 4; there are 4"),
        ({"max_num_seqs": 9}, "max_num_batched_tokens is 8; at least 9"),
        ({"chunked_prefill": False}, "max_num_batched_tokens is 8; at least 16"),
    ],
)
def test_sizes_under_which_a_request_would_wait_for_ever_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(CAPACITY, **change)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_generated", "says"),
    [
        (0, 4, 0, "empty"),
        (15, 4, 0, ""),
        (16, 4, 0, "the prompt has 16 tokens; with one of answer that is over the limit of 16"),
        (17, 4, 0, "over the limit of 16"),
        (4, 0, 0, "max_tokens is 0"),
        (4, 3, 2, ""),
        (4, 3, 3, "3 generated tokens; at 3 it is over"),
        (12, 30, 4, "4 generated tokens; at 4 it is over"),
    ],
)
def test_refusal_depends_on_what_can_ever_fit(num_prompt: int, max_tokens: int, num_generated: int, says: str) -> None:
    submit = make_submit(1, [1] * num_prompt, max_tokens, {0: [2] * num_generated})
    reason = CAPACITY.refusal(submit)
    assert says in reason
    assert bool(says) == bool(reason)


def test_max_len_is_clamped_to_the_room_left() -> None:
    assert CAPACITY.max_len(make_submit(1, [1] * 10, max_tokens=3)) == 13
    assert CAPACITY.max_len(make_submit(1, [1] * 10, max_tokens=7)) == 16
