from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.group import plan
from tpserve.messages import Row
from tpserve.worker.slots import Slots

FIRST, SAMPLE, FROM_SLOT = Row.FIRST, Row.SAMPLE, Row.FROM_SLOT


def make() -> Slots:
    return Slots(slots=4, pages=5, page_size=4, device=torch.device("cpu"))


def test_begin_of_a_first_chunk_places_its_tokens_behind_the_prefix_hit() -> None:
    slots = make()
    tokens = slots.begin(
        plan(1, [dict(slot=2, count=3, flags=FIRST | SAMPLE, pages=[7, 9], ids=[11, 12, 13], start=4, seed=2**64 - 1, top_k=5)])
    )
    assert tokens.positions.tolist() == [4, 5, 6]
    assert tokens.kv_slots.tolist() == [36, 37, 38]
    assert tokens.ids.tolist() == [11, 12, 13]
    assert tokens.last.tolist() == [2]
    assert slots.seeds[2] == 2**64 - 1
    assert slots.top_ks[2] == 5


def test_mixed_rows_take_ids_from_plan_and_slot_and_grow_page_tables() -> None:
    slots = make()
    slots.end(slots.begin(plan(1, [dict(slot=0, count=4, flags=FIRST | SAMPLE, pages=[3], ids=[1, 2, 3, 4])])))
    tokens = slots.begin(
        plan(
            2,
            [
                dict(slot=0, flags=SAMPLE | FROM_SLOT, pages=[1]),
                dict(slot=3, count=2, flags=FIRST, pages=[4], ids=[8, 9]),
            ],
        )
    )
    assert tokens.positions.tolist() == [4, 0, 1]
    assert tokens.kv_slots.tolist() == [4, 16, 17]
    assert tokens.ids.tolist() == [0, 8, 9]
    assert tokens.fed.tolist() == [0]
    assert tokens.fed_slots.tolist() == [0]
    slots.end(tokens)
    assert slots.lengths.tolist() == [5, 0, 0, 2]
    assert slots.tables[0, :2].tolist() == [3, 1]


def test_reuse_of_a_slot_drops_its_old_pages() -> None:
    slots = make()
    slots.end(slots.begin(plan(1, [dict(slot=1, count=6, flags=FIRST, pages=[3, 2], ids=range(6))])))
    tokens = slots.begin(plan(2, [dict(slot=1, count=1, flags=FIRST, pages=[0], ids=[5])]))
    assert tokens.kv_slots.tolist() == [0]
    assert slots.page_counts[1] == 1


@pytest.mark.parametrize(
    "row",
    [
        dict(slot=9, flags=FIRST, ids=[1], pages=[0]),
        dict(slot=0, flags=FIRST, ids=[1, 2], pages=[0]),
        dict(slot=0, flags=FIRST, count=2, ids=[1], pages=[0]),
        dict(slot=0, flags=FIRST, ids=[1], pages=[0] * 6),
    ],
)
def test_plan_that_cannot_be_right_is_refused(row: dict[str, object]) -> None:
    with pytest.raises((IndexError, ValueError)):  # MessageError is a ValueError
        make().begin(plan(1, [row]))


def test_begin_over_many_rows_equals_one_row_at_a_time() -> None:
    rng = np.random.default_rng(1)
    together, alone = Slots(64, 8, 4, torch.device("cpu")), Slots(64, 8, 4, torch.device("cpu"))
    counts = rng.integers(1, 9, 20)
    rows = [
        dict(
            slot=slot,
            count=int(count),
            flags=FIRST,
            start=int(rng.integers(0, 9)),
            ids=rng.integers(0, 99, count),
            pages=rng.integers(0, 50, 5),
        )
        for slot, count in zip(rng.permutation(64), counts, strict=False)
    ]
    joined = together.begin(plan(1, rows))
    single = [alone.begin(plan(1, [row])) for row in rows]
    for name in ("positions", "kv_slots", "ids"):
        assert getattr(joined, name).tolist() == np.concatenate([getattr(part, name) for part in single]).tolist()


def test_tails_are_the_unused_places_of_pages_that_rows_enter() -> None:
    slots = make()
    tokens = slots.begin(
        plan(
            1,
            [
                dict(slot=0, count=2, flags=FIRST, pages=[7], ids=[1, 2]),
                dict(slot=1, count=4, flags=FIRST, pages=[3], ids=[1, 2, 3, 4]),
                dict(slot=2, count=1, flags=FIRST, pages=[5, 6], ids=[9], start=5),  # its second page is a copy
            ],
        )
    )
    assert tokens.tails.tolist() == [30, 31, 26, 27]
    slots.end(tokens)
    decode = SAMPLE | FROM_SLOT
    rows = [dict(slot=0, flags=decode), dict(slot=1, flags=decode, pages=[2]), dict(slot=2, flags=decode)]
    assert slots.begin(plan(2, rows)).tails.tolist() == [9, 10, 11]
