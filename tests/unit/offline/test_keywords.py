"""What LLM(...) takes: settings by any name, other engines' keywords, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit import vllm
from tpserve import UserError
from tpserve.offline.keywords import to_settings


def test_the_keywords_that_vllm_users_have_work() -> None:
    settings, notes = to_settings(
        dict(
            model=Path("folder"), tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=None, trust_remote_code=True,
            tensor_parallel_size=2, dtype="half", quantization=None, revision=None, seed=0, gpu_memory_utilization=0.8,
            swap_space=4, cpu_offload_gb=0, enforce_eager=False, disable_custom_all_reduce=False, max_model_len=512,
            max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=True, enable_chunked_prefill=False,
            kv_cache_dtype="auto", block_size=32, disable_log_stats=True, pipeline_parallel_size=1,
            distributed_executor_backend="mp", served_model_name="name",
        )
    )  # fmt: skip
    assert (settings.model, settings.tp, settings.dtype, settings.seed) == ("folder", 2, "half", 0)
    assert (settings.max_model_len, settings.max_num_seqs, settings.block_size) == (512, 8, 32)
    assert (settings.gpu_memory_utilization, settings.trust_remote_code, settings.enable_chunked_prefill) == (0.8, True, False)
    assert settings.served_model_name == ("name",)
    assert sorted(notes) == ["disable_log_stats has no effect here", "swap_space has no effect here"]


def test_everything_that_vllm_has_can_be_given_as_it_is_by_default() -> None:
    for name, default in vllm.LLM.items():
        to_settings({"model": "demo", name: default})
    to_settings({**vllm.LLM, "model": "demo"})


@pytest.mark.parametrize(("model", "tokenizer"), [("demo", "demo"), (Path("a/b"), "a/b"), ("a/b", Path("a/b"))])
def test_tokenizer_may_be_the_models_own(model: Any, tokenizer: Any) -> None:
    assert to_settings({"model": model, "tokenizer": tokenizer})[1] == []
    with pytest.raises(UserError, match="tokenizer is not supported yet"):
        to_settings({"model": model, "tokenizer": "other"})


def test_numbers_of_numpy_are_taken() -> None:
    settings, _ = to_settings({"model": "demo", "tp": np.int64(3), "gpu_memory_utilization": np.float64(0.5)})
    assert (settings.tp, settings.gpu_memory_utilization) == (3, 0.5)


def test_none_is_as_if_not_given_and_logs_are_quiet_by_default() -> None:
    settings, _ = to_settings({"model": "demo", "max_model_len": None, "seed": None})
    assert (settings.max_model_len, settings.seed, settings.log_level) == ("auto", None, "warning")
    assert to_settings({"model": "demo", "log_level": "info"})[0].log_level == "info"


@pytest.mark.parametrize("name", ["tp", "tensor_parallel_size"])
def test_setting_goes_by_its_own_name_and_by_others(name: str) -> None:
    assert to_settings({"model": "demo", name: 3})[0].tp == 3


def test_dtype_of_torch_is_taken_by_its_name() -> None:
    class Dtype:
        def __repr__(self) -> str:
            return "torch.float16"

    assert to_settings({"model": "demo", "dtype": Dtype()})[0].dtype == "float16"


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"tensor_paralel_size": 2}, TypeError, "tensor_paralel_size; did you mean tensor_parallel_size?"),
        ({"port": 8000}, TypeError, "port: it does not serve over HTTP"),
        ({"tp": 1, "tensor_parallel_size": 2}, TypeError, "tp and tensor_parallel_size are the same setting"),
        ({"tensor_parallel_size": 0}, UserError, "tensor_parallel_size=0: must be greater than or equal to 1"),
        ({"dtype": "int4"}, UserError, "dtype='int4': must be 'auto', "),
        ({"cpu_offload_gb": 4}, UserError, "cpu_offload_gb 4 is not supported yet, only 0"),
        ({"skip_tokenizer_init": True}, UserError, "skip_tokenizer_init is not supported yet"),
        (
            {"distributed_executor_backend": "ray"},
            UserError,
            "distributed_executor_backend ray is not supported yet, only mp or",
        ),
        ({"generation_config": "vllm"}, UserError, "generation_config vllm is not supported yet, only auto"),
        ({"hf_overrides": {"a": 1}}, UserError, "hf_overrides is not supported yet"),
        ({"pipeline_parallel_size": 2}, UserError, "pipeline_parallel_size 2 is not supported yet, only 1"),
        ({"quantization": "awq"}, UserError, "quantization is not supported yet"),
        ({"model": ""}, UserError, "model=''"),
    ],
)
def test_keyword_that_is_wrong_is_refused_by_name(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        to_settings({"model": "demo", **keywords})
    assert message in str(caught.value)
