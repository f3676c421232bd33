"""The names of settings: ours, those of other engines that do nothing here, those that are refused."""

from __future__ import annotations

import pytest

from tests.unit import vllm
from tpserve import spellings
from tpserve.settings import UserError

KINDS = (
    spellings.SWITCHES_WITHOUT_EFFECT, spellings.WITHOUT_EFFECT, spellings.NEUTRAL.keys(), spellings.SWITCHES_NOT_BUILT,
    spellings.NOT_BUILT,
)  # fmt: skip


def test_foreign_names_are_no_settings_and_of_one_kind() -> None:
    assert sum(map(len, KINDS)) == len(spellings.FOREIGN)
    assert not spellings.FOREIGN & spellings.FIELDS.keys()
    assert all(map(spellings.is_foreign, spellings.FOREIGN))
    assert not spellings.is_foreign("tp")


def test_everything_that_vllm_has_is_known() -> None:
    known = spellings.FOREIGN | spellings.FIELDS.keys() | {"hf_token"}
    assert not {*vllm.LLM, *vllm.SERVE} - known


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
        ("cpu_offload_gb", 0.0, None),
        ("--cpu-offload-gb", "0", None),
        ("distributed_executor_backend", "uni", None),
        ("rope_scaling", {}, None),
        ("enable_lora", "no", None),
        ("--skip-tokenizer-init", False, None),
        ("-O", "3", "-O has no effect here"),
        ("quantization", None, None),
        ("enable_lora", False, None),
        ("allowed_methods", ["*"], None),
        ("--allowed-headers", '["*"]', None),
        ("enable_auto_tool_choice", True, "enable_auto_tool_choice has no effect here"),
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
        ("-q", "awq", "-q is not supported yet"),
        ("enable_lora", True, "enable_lora is not supported yet"),
        ("enable_lora", "yes", "enable_lora is not supported yet"),
        ("cpu_offload_gb", "0.5", "cpu_offload_gb 0.5 is not supported yet, only 0"),
        ("distributed_executor_backend", "ray", "distributed_executor_backend ray is not supported yet, only mp or uni"),
        ("tokenizer", "other", "tokenizer is not supported yet"),
        ("allowed_methods", ["GET"], """allowed_methods ['GET'] is not supported yet, only ["*"] or ['*'] or *"""),
        ("disable_fastapi_docs", True, "disable_fastapi_docs is not supported yet"),
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
        ("--num-speculative-tokens", "--num-speculative-tokens is not supported yet, only speculative ngram is"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(name: str, says: str) -> None:
    assert str(spellings.unknown(name)) == says


def test_tokenizer_may_be_that_of_the_model() -> None:
    assert spellings.foreign_note("--tokenizer", "a/b", "a/b") is None
    with pytest.raises(UserError, match="--tokenizer is not supported yet"):
        spellings.foreign_note("--tokenizer", "a/b", None)
