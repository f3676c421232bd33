"""Values of settings: what is taken, what is refused and how that reads."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from tpserve.settings import Flag, Section, Settings, explain


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 * 1024**3), ("500MB", 500_000_000), ("1.5 kib", 1536), ("1000", 1000), ("3g", 3_000_000_000), (77, 77)],
)
def test_kv_cache_memory_reads_units(text: object, expected: int) -> None:
    assert Settings.model_validate({"kv_cache_memory": text}).kv_cache_memory == expected


@pytest.mark.parametrize(
    ("values", "field", "wants"),
    [
        ({"kv_cache_memory": "2 parsecs"}, "kv_cache_memory", "wants bytes, such as 2GiB or 500MB"),
        ({"kv_cache_memory": "0"}, "kv_cache_memory", "must be greater than or equal to 1"),
        ({"tp": "two"}, "tp", "must be a valid integer"),
        ({"tp": 1.5}, "tp", "must be a valid integer"),
        ({"tp": 0}, "tp", "must be greater than or equal to 1"),
        ({"port": 99999}, "port", "must be less than or equal to 65535"),
        ({"max_model_len": "long"}, "max_model_len", "must be a valid integer or must be 'auto'"),
        ({"max_model_len": 0}, "max_model_len", "must be greater than or equal to 2 or must be 'auto'"),
        ({"max_num_batched_tokens": -3}, "max_num_batched_tokens", "must be greater"),
        ({"max_num_seqs": 0}, "max_num_seqs", "must be greater"),
        ({"dtype": "int7"}, "dtype", "must be 'auto', 'bfloat16', 'half'"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization", "must be less"),
        ({"gpu_memory_utilization": "nan"}, "gpu_memory_utilization", "must be"),
        ({"drain_timeout": "inf"}, "drain_timeout", "must be"),
        ({"seed": -1}, "seed", "must be greater"),
        ({"seed": 2**64}, "seed", "must be less"),
        ({"model": ""}, "model", "at least 1 character"),
        ({"served_model_name": ("a", "")}, "served_model_name", "at least 1 character"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy", "must be 'fcfs' or 'priority'"),
        ({"max_queue": 0}, "max_queue", "must be greater"),
        ({"queue_timeout": 0}, "queue_timeout", "must be greater"),
        ({"tool_call_parser": "mistral"}, "tool_call_parser", "must be 'auto', 'none', 'hermes' or 'llama3_json'"),
        ({"reasoning_parser": "gpt"}, "reasoning_parser", "must be 'none', 'qwen3' or 'deepseek_r1'"),
        ({"api_key": ["a b"]}, "api_key", "wants printable ASCII"),
        ({"api_key": [""]}, "api_key", "wants printable ASCII"),
        ({"api_key": ["schlüssel"]}, "api_key", "wants printable ASCII"),
        ({"api_key": ["***"]}, "api_key", "how --show-config hides a key"),
        ({"allowed_origins": ["https://a/"]}, "allowed_origins", "without a path"),
        ({"allowed_origins": ["a.example"]}, "allowed_origins", "wants origins"),
        ({"allowed_origins": ['["*"']}, "allowed_origins", "wants a list in JSON"),
        ({"allowed_origins": ["[5]"]}, "allowed_origins", "must be a valid string"),
        ({"no_such": 1}, "no_such", "not permitted"),
    ],
)
def test_refused_value_is_explained_by_its_field(values: dict[str, object], field: str, wants: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Settings.model_validate(values)
    named, text = explain(refusal.value)
    assert named == field
    assert wants in text


@pytest.mark.parametrize(
    "values",
    [{"max_model_len": "4096", "port": "0"}, {"max_model_len": "auto", "seed": "0"}, {"max_num_batched_tokens": "512"}],
)
def test_text_from_the_command_line_is_converted(values: dict[str, str]) -> None:
    settings = Settings.model_validate(values)
    assert {name: str(getattr(settings, name)) for name in values} == values


def test_list_may_hold_lists_in_json() -> None:
    settings = Settings.model_validate({"api_key": ["a", '["b", "c"]'], "allowed_origins": ['["*"]']})
    assert (settings.api_key, settings.allowed_origins) == (("a", "b", "c"), ("*",))


def test_no_reasoning_parser_is_none() -> None:
    assert Settings.model_validate({"reasoning_parser": ""}).reasoning_parser == "none"


def test_key_is_not_in_what_is_printed_of_settings() -> None:
    assert "sesame" not in repr(Settings(api_key=("sesame",)))


def test_settings_come_back_from_json() -> None:
    settings = Settings(tp=3, served_model_name=("a", "b"), max_model_len=7, kv_cache_memory=10, seed=2**64 - 1)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_every_setting_has_one_flag_named_after_it_a_section_and_a_help_text() -> None:
    spellings: list[str] = []
    for name, field in Settings.model_fields.items():
        (flag,) = [detail for detail in field.metadata if isinstance(detail, Flag)]
        assert flag.names[0] == "--" + name.replace("_", "-")
        assert flag.section in get_args(Section)
        assert field.description
        spellings += flag.names
    assert len(set(spellings)) == len(spellings)
