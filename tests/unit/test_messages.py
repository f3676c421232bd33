from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.group import plan
from tpserve.codec import MessageError, Range
from tpserve.messages import (
    MESSAGES,
    NO_FIRST_ROWS,
    NO_SCORES,
    STEP_PARTS,
    Abort,
    FirstRows,
    Row,
    Sampling,
    Scores,
    StepPlan,
    StepResult,
    Submit,
    decode,
    encode,
)

SAMPLING = Sampling(0.5, 3, 0.9, 0.0, 1.1, 0.5, -0.5, 2**64 - 1)
VALUES = {  # fields whose values must fit one another
    "StepPlan": lambda: plan(7, [dict(slot=1, count=2, flags=Row.FIRST, ids=[4, 5], pages=[9])], [(1, 2)]),
}


def strategy(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field's annotation; arrays have one length, since parallel arrays must agree."""
    if get_origin(annotation) is Annotated:
        _, detail = get_args(annotation)
        if isinstance(detail, Range):
            return st.integers(detail.low, detail.high)
        return st.just(np.arange(3).astype(detail))
    if get_origin(annotation) is list:
        return st.lists(strategy(get_args(annotation)[0]), min_size=3, max_size=3)
    simple = {str: st.text(), bool: st.booleans(), float: st.floats(allow_nan=False)}
    return simple[annotation] if annotation in simple else st.builds(annotation, **strategies(annotation))


def strategies(kind: type) -> dict[str, st.SearchStrategy[Any]]:
    return {name: strategy(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type, data: st.DataObject) -> None:
    made = VALUES[kind.__name__]() if kind.__name__ in VALUES else data.draw(st.builds(kind, **strategies(kind)))
    wire = encode(made, 5)
    epoch, back = decode(wire)
    assert epoch == 5
    assert type(back) is kind
    assert encode(back, 5) == wire
    assert_same(made, back)


def assert_same(made: Any, back: Any) -> None:
    """Messages have arrays, which `==` does not compare as one."""
    assert type(made) is type(back)
    if is_dataclass(made):
        for field in fields(made):
            assert_same(getattr(made, field.name), getattr(back, field.name))
    elif isinstance(made, list):
        for a, b in zip(made, back, strict=True):
            assert_same(a, b)
    elif isinstance(made, np.ndarray):
        assert made.dtype == back.dtype
        assert made.tolist() == back.tolist()
    else:
        assert made == back


def parts(message: Any) -> list[Any]:
    unpacked: list[Any] = msgpack.unpackb(encode(message, 1))
    return unpacked


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p[:-1],
        lambda p: [*p, 1],
        lambda p: [99, *p[1:]],
        lambda p: [-1, *p[1:]],
        lambda p: ["0", *p[1:]],
        lambda p: [p[0], -1, *p[2:]],
        lambda p: [*p[:2], -1, p[3]],
        lambda p: [*p[:2], 1.0, p[3]],
        lambda p: [*p[:3], True],
        lambda p: [*p[:3], 2**31],
        lambda p: [],
        lambda p: {"a": 1},
    ],
)
def test_decode_of_a_changed_message_is_refused(change: Any) -> None:
    with pytest.raises(MessageError):
        decode(msgpack.packb(change(parts(Abort(3, -1)))))


def test_decode_of_an_array_with_a_torn_element_is_refused() -> None:
    torn = parts(
        StepResult(1, np.zeros(2, "<i4"), np.empty(0, "<u1"), 0, NO_SCORES, NO_SCORES, np.zeros(len(STEP_PARTS), "<f4"), 0, 0)
    )
    torn[3] = torn[3][:-1]
    with pytest.raises(MessageError, match=r"StepResult\.ids"):
        decode(msgpack.packb(torn))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x00", b"junk" * 99])
def test_decode_of_other_bytes_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


def a_submit() -> Submit:
    ids, values = np.zeros(2, "<i4"), np.zeros(2, "<f4")
    choices = np.zeros(1, "<u2")
    return Submit(1, 1, ids, choices, [ids], 1, 0, ids, SAMPLING, ids, values, -1, -1, "", 0, 0.0, "")


@pytest.mark.parametrize(
    "change",
    [dict(request=-1), dict(prompt=np.zeros(2, "<i8")), dict(prompt=np.zeros((1, 2), "<i4")), dict(priority=2**31)],
    ids=str,
)
def test_encode_of_a_value_out_of_range_or_of_another_dtype_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="Submit"):
        encode(replace(a_submit(), **change), 1)


def test_the_empty_nested_message_takes_a_byte_and_comes_back_as_itself() -> None:
    ids, no_counts, seconds = np.zeros(2, "<i4"), np.empty(0, "<u1"), np.zeros(len(STEP_PARTS), "<f4")
    made = encode(StepResult(1, ids, no_counts, 0, NO_SCORES, NO_SCORES, seconds, 0, 0), 1)
    assert msgpack.unpackb(made)[6:8] == [[], []]
    _, back = decode(made)
    assert isinstance(back, StepResult)
    assert back.scores is back.target_scores is NO_SCORES


@pytest.mark.parametrize("nothing", [[], None, b""])
def test_a_nested_message_with_other_fields_than_arrays_is_never_empty(nothing: Any) -> None:
    unpacked = parts(a_submit())
    place = 2 + [field.name for field in fields(Submit)].index("sampling")
    unpacked[place] = nothing
    with pytest.raises(MessageError):
        decode(msgpack.packb(unpacked))
    with pytest.raises((MessageError, AttributeError)):
        encode(replace(a_submit(), sampling=None), 1)  # type: ignore[arg-type]


def test_a_plan_that_begins_slots_without_saying_what_is_in_them_is_refused() -> None:
    unpacked = parts(plan(7, [dict(slot=1, count=2, flags=Row.FIRST, ids=[4, 5], pages=[9])]))
    unpacked[2 + [field.name for field in fields(StepPlan)].index("first_rows")] = []
    with pytest.raises(MessageError, match="first rows"):
        decode(msgpack.packb(unpacked))


def test_encode_of_what_is_no_message_is_refused() -> None:
    with pytest.raises(MessageError, match="not a message"):
        encode(SAMPLING, 1)  # type: ignore[arg-type]


def test_parallel_arrays_of_different_lengths_are_refused() -> None:
    for change in (dict(choices=np.zeros(2, "<u2")), dict(bias_ids=np.zeros(1, "<i4"))):
        with pytest.raises(MessageError, match="lengths differ"):
            replace(a_submit(), **change)


def test_scores_with_more_or_fewer_entries_than_their_positions_have_are_refused() -> None:
    with pytest.raises(MessageError, match="counts make 3, ids has 2"):
        Scores(np.array([1, 2], "<u2"), np.zeros(2, "<i4"), np.zeros(2, "<f4"))
    with pytest.raises(MessageError, match="lengths differ"):
        Scores(np.array([2], "<u2"), np.zeros(2, "<i4"), np.zeros(3, "<f4"))


@pytest.mark.parametrize("field", ["bias_ids", "stop_ids", "targets"])
def test_plan_with_other_flat_arrays_than_its_rows_have_is_refused(field: str) -> None:
    parameters = dict(bias_ids=[1], bias_values=[0.5], stop_ids=[3], min_len=9, targets=[5], target_top=1)
    right = plan(7, [dict(slot=1, count=2, flags=Row.FIRST | Row.SCORE, ids=[4, 5], pages=[9], **parameters)])
    with pytest.raises(MessageError, match=f"{field} has|lengths differ"):
        replaced(right, field, np.zeros(2, "<i4"))


@pytest.mark.parametrize("past", [[4], [4, 5, 6]])
def test_plan_with_more_or_less_of_the_past_than_it_says_is_refused(past: list[int]) -> None:
    right = plan(7, [dict(slot=1, count=2, flags=Row.FIRST, ids=[4, 5], pages=[9], past=[4, 5], prompt_count=1)])
    with pytest.raises(MessageError, match="past has"):
        replaced(right, "past", np.array(past, "<i4"))


def test_plan_with_more_or_fewer_rows_that_begin_than_it_says_is_refused() -> None:
    begins = plan(7, [dict(slot=1, count=2, flags=Row.FIRST, ids=[4, 5], pages=[9])])
    with pytest.raises(MessageError, match="first rows"):
        replace(begins, first_rows=NO_FIRST_ROWS)
    decodes = plan(7, [dict(slot=1, flags=Row.SAMPLE | Row.FROM_SLOT)])
    for change in (dict(first_rows=begins.first_rows), dict(pages=np.zeros(1, "<i4")), dict(most_drafts=np.ones(1, "<u1"))):
        with pytest.raises(MessageError, match="first rows"):
            replace(decodes, **change)


def replaced(right: StepPlan, field: str, value: np.ndarray) -> StepPlan:
    """The plan with another array, be it of its own or of its first rows."""
    if field in {field.name for field in fields(FirstRows)}:
        return replace(right, first_rows=replace(right.first_rows, **{field: value}))
    return replace(right, **{field: value})


def test_a_plan_of_decode_rows_takes_at_most_16_bytes_a_row() -> None:
    for rows in (1, 8, 256):
        decodes = [dict(slot=i, flags=Row.SAMPLE | Row.FROM_SLOT, pages=[i]) for i in range(rows)]
        assert len(encode(plan(10**6, decodes), 1)) <= 128 + 16 * rows
