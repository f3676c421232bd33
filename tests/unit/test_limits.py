"""Limits that follow from settings, model and pool together."""

from __future__ import annotations

import pytest

from tpserve.limits import limits
from tpserve.model.families import llama
from tpserve.settings import Settings, UserError

CONFIG = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SPEC = llama.spec(CONFIG | {"max_position_embeddings": 4096})


@pytest.mark.parametrize(("pool", "expected"), [(100_000, 4096), (4095, 4095), (None, 4096)])
def test_automatic_length_is_what_model_and_pool_allow(pool: int | None, expected: int) -> None:
    assert limits(Settings(), SPEC, pool, "cpu").max_model_len == expected


@pytest.mark.parametrize(("pool", "asked"), [(1600, 1600), (None, 4096)])
def test_length_that_just_fits_is_taken(pool: int | None, asked: int) -> None:
    assert limits(Settings(max_model_len=asked), SPEC, pool, "cpu").max_model_len == asked


def test_length_beyond_the_pool_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(UserError, match=r"^--max-model-len 1601: .* largest that fits is 1600, .*--kv-cache-memory$"):
        limits(Settings(max_model_len=1601), SPEC, 1600, "cpu")


def test_length_beyond_the_model_is_refused_with_the_largest() -> None:
    with pytest.raises(UserError, match=r"^--max-model-len 4097: .* 4096 positions; the largest is 1600$"):
        limits(Settings(max_model_len=4097), SPEC, 1600, "cpu")


def test_length_beyond_what_dynamic_rotary_scaling_leaves_alone_is_refused_by_its_name() -> None:
    spec = llama.spec(CONFIG | {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert limits(Settings(), spec, 1600, "cpu").max_model_len == 64
    with pytest.raises(UserError, match=r"^--max-model-len 65: .*dynamic rotary scaling .*; the largest is 64$"):
        limits(Settings(max_model_len=65), spec, 1600, "cpu")


@pytest.mark.parametrize(("device", "expected"), [("cpu", 512), ("cuda", 8192)])
def test_automatic_step_tokens_depend_on_the_device(device: str, expected: int) -> None:
    assert limits(Settings(), SPEC, None, device).max_num_batched_tokens == expected  # type: ignore[arg-type]


def test_step_tokens_below_the_sequences_lower_them_with_a_note() -> None:
    found = limits(Settings(max_num_batched_tokens=32), SPEC, None, "cpu")
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (32, 32)
    assert len(found.notes) == 1
    assert "--max-num-seqs from 256 to 32" in found.notes[0]


def test_without_chunks_automatic_step_tokens_hold_the_longest_prompt() -> None:
    assert limits(Settings(enable_chunked_prefill=False), SPEC, None, "cpu").max_num_batched_tokens == 4096


def test_without_chunks_given_step_tokens_limit_the_automatic_length() -> None:
    found = limits(Settings(enable_chunked_prefill=False, max_num_batched_tokens=1000), SPEC, None, "cpu")
    assert (found.max_model_len, found.max_num_batched_tokens) == (1000, 1000)
    assert len(found.notes) == 1


def test_without_chunks_a_given_length_beyond_given_step_tokens_is_refused_by_both_names() -> None:
    settings = Settings(enable_chunked_prefill=False, max_num_batched_tokens=1000, max_model_len=1001)
    with pytest.raises(UserError, match=r"--max-model-len 1001 .*--max-num-batched-tokens 1000"):
        limits(settings, SPEC, None, "cpu")


def test_automatic_length_that_the_pool_cuts_is_told_with_the_flag_that_gives_more() -> None:
    (note,) = limits(Settings(), SPEC, 1600, "cpu").notes
    assert note.startswith("the KV cache holds 1600 tokens")
    assert "4096" in note
    assert "--kv-cache-memory" in note
    assert limits(Settings(), SPEC, 100_000, "cpu").notes == ()
