"""From a body's bytes to its fields, and what is known of it before it is parsed."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.http import json_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[{,é', max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def counts(value: Any) -> tuple[int, int, int]:
    """(Strings, lists and objects, commas) in the value's JSON."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    below = [counts(part) for part in parts]
    strings, groups, commas = (sum(column) for column in zip(*below)) if below else (0, 0, 0)
    return strings, groups + 1, commas + max(0, len(value) - 1)


@given(JSON, st.booleans())
def test_counts_are_those_of_the_parsed_text(value: Any, is_ascii: bool) -> None:
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_bound", lambda count, _, __: found.append(count))
        with contextlib.suppress(InvalidRequest):  # of what is no object
            json_body.parse(json.dumps(value, ensure_ascii=is_ascii).encode())
    assert tuple(found[:3]) == counts(value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * (json_body.MAX_GROUPS + 1), "lists and objects"),
        (b"{1:" * (json_body.MAX_GROUPS + 1), "lists and objects"),
        (b"[" + b"1," * (json_body.MAX_VALUES + 1), "values"),
        (b'["' + b'","' * json_body.MAX_STRINGS + b'"]', "strings"),
        (json.dumps({f"field{i}": None for i in range(json_body.MAX_FIELDS + 1)}).encode(), "fields"),
    ],
)
def test_body_of_too_many_parts_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"the body has \d+ {says}; \d+ are the most"):
        json_body.parse(body)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": 1,}', b"{'a': 1}", b'{"a":"\\ud800"}']
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        json_body.parse(body)


def test_long_text_is_one_string_whatever_is_in_it() -> None:
    json_body.parse(json.dumps({"prompt": '[{"a": 1},\\' * json_body.MAX_VALUES}).encode())
