"""Between which requests prefixes are shared."""

from __future__ import annotations

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.coordinator.rig import answer, planned, scheduler


def test_prefixes_are_shared_only_between_equal_salts() -> None:
    prompt = list(range(9))
    made = scheduler(max_num_batched_tokens=32)
    starts = []
    for request, salt in enumerate(["", "a", "b", "a", "", "b"]):
        made.submit(make_submit(request, prompt, max_tokens=1, cache_salt=salt))
        plan = planned(made)
        starts += plan.first_rows.starts.tolist()
        answer(made, plan, 0)
    assert starts == [0, 0, 0, 8, 8, 8]


def test_page_that_generated_ids_complete_is_shared_only_between_equal_salts() -> None:
    made = scheduler(make_submit(1, [1, 2], max_tokens=3, cache_salt="a"))
    for token in (3, 4, 5):
        answer(made, planned(made), token)
    starts = []
    for request, salt in ((2, ""), (3, "a")):
        made.submit(make_submit(request, [1, 2, 3, 4, 5], max_tokens=1, cache_salt=salt))
        starts += planned(made).first_rows.starts.tolist()
    assert starts == [0, 4]


def test_salt_cannot_stand_for_a_page_of_ids() -> None:
    made = scheduler()
    page = [0x61, 0x62, 0x63, 0x64]  # as bytes, a text that a client may send
    made.submit(make_submit(1, [*page, 1, 2, 3, 4, 5], max_tokens=1))
    answer(made, planned(made), 0)
    salt = b"".join(id_.to_bytes(4, "little") for id_ in page).decode()
    made.submit(make_submit(2, [1, 2, 3, 4, 5], max_tokens=1, cache_salt=salt))
    assert planned(made).first_rows.starts.tolist() == [0]
