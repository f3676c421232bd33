"""The names of settings: ours, those of other engines that do nothing here, those that are refused."""

from __future__ import annotations

import pytest

from tpserve import spellings
from tpserve.settings import UserError


def test_foreign_names_are_no_settings() -> None:
    neutral = {spellings.key(name) for names in spellings.NEUTRAL for name in names}
    assert not (neutral | spellings.NOT_BUILT) & set(spellings.FIELDS)
    assert not neutral & spellings.NOT_BUILT
    assert all(map(spellings.is_foreign, neutral | spellings.NOT_BUILT))
    assert not spellings.is_foreign("tp")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("enforce_eager", True, "enforce_eager has no effect here"),
        ("--enforce-eager", True, "--enforce-eager has no effect here"),
        ("enforce_eager", False, None),
        ("enforce_eager", "false", None),
        ("swap_space", 4, "swap_space has no effect here"),
        ("pipeline_parallel_size", 1, None),
        ("-pp", "1", None),
        ("tokenizer_mode", "auto", None),
        ("quantization", None, None),
        ("enable_lora", False, None),
    ],
)
def test_foreign_setting_that_changes_nothing_is_taken(name: str, value: object, expected: str | None) -> None:
    assert spellings.foreign_note(name, value) == expected


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel_size 2 is not supported yet, only 1"),
        ("tokenizer_mode", "slow", "tokenizer_mode slow is not supported yet, only auto"),
        ("quantization", "awq", "quantization is not supported yet"),
    ],
)
def test_foreign_setting_that_would_change_something_is_refused(name: str, value: object, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        spellings.foreign_note(name, value)
    assert str(refusal.value) == says


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensor_paralel_size", "no such setting: tensor_paralel_size; did you mean tensor_parallel_size?"),
        ("qqqq", "no such setting: qqqq; tpserve launch --help lists the settings"),
        ("quantization", "quantization is not supported yet"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(name: str, says: str) -> None:
    assert str(spellings.unknown(name)) == says
