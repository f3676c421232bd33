"""From settings and a folder to what will run, or to one line that says why not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tpserve import machine
from tpserve.checkpoint.source import Source
from tpserve.deployment import Deployment, Native
from tpserve.kernels import choice
from tpserve.kernels.native.library import NotBuilt
from tpserve.preflight import resolve
from tpserve.sampling import SamplingDefaults
from tpserve.settings import Settings, UserError

GIB = 1024**3
PAGE_BYTES = 2 * 3 * 8 * 2 * 16 * 4  # of the tiny model: K and V, heads, their size, layers, tokens, float32


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 cores, 16 GiB, no GPU, native kernels: what follows must not depend on where the tests run."""
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(machine, "available_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(choice, "library", lambda: SimpleNamespace(name="avx2", sources="0123"))


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be spoilt."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def configure(model: Path, file: str = "config.json", **changes: Any) -> None:
    """Change a file of the model's; None removes an entry."""
    config = json.loads((model / file).read_text()) | changes
    (model / file).write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def refusal(**values: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(Settings.model_validate(values))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_deployment_of_a_plain_launch_has_the_models_values(tiny_model: Path) -> None:
    found = resolve(Settings(model=str(tiny_model), tp=3))
    assert found.model_path == str(tiny_model)
    assert (found.device, found.dtype, found.page_size) == ("cpu", "float32", 16)
    assert (found.spec.num_heads, found.spec.num_kv_heads, found.spec.vocab_size) == (9, 3, 257)
    assert (found.max_model_len, found.max_num_seqs, found.max_num_batched_tokens) == (1024, 256, 512)
    assert found.stop_ids == (0,)
    assert found.threads_per_rank == 2
    assert found.native == Native(level="avx2", sources="0123")
    assert found.notes == ()


def test_deployment_comes_back_from_json(tiny_model: Path) -> None:
    found = resolve(Settings(model=str(tiny_model), kv_cache_memory=10**6))
    assert Deployment.model_validate_json(found.model_dump_json()) == found


def test_pool_is_the_budget_by_the_pages_of_all_ranks(tiny_model: Path) -> None:
    assert resolve(Settings(model=str(tiny_model))).num_pages == 2 * GIB // PAGE_BYTES
    assert resolve(Settings(model=str(tiny_model), tp=3, kv_cache_memory=10**6)).num_pages == 10**6 // PAGE_BYTES
    assert resolve(Settings(model=str(tiny_model), tp=9, kv_cache_memory=10**6)).num_pages == 10**6 // (3 * PAGE_BYTES)


@pytest.mark.parametrize(("available", "expected"), [(4 * GIB, GIB), (64 * GIB, 2 * GIB)])
def test_default_pool_follows_the_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: available)
    assert resolve(Settings(model=str(tiny_model))).num_pages == expected // PAGE_BYTES


def test_length_is_bounded_by_the_pool(tiny_model: Path) -> None:
    assert resolve(Settings(model=str(tiny_model), kv_cache_memory=200_000)).max_model_len == 512
    assert "the largest that fits is 512" in refusal(model=str(tiny_model), kv_cache_memory=200_000, max_model_len=513)


def test_served_name_is_the_folders_or_the_given_ones_never_the_path(tiny_model: Path) -> None:
    assert resolve(Settings(model=str(tiny_model))).served_names == ("tiny",)
    assert resolve(Settings(model=f"{tiny_model}/../tiny/")).served_names == ("tiny",)
    assert resolve(Settings(model=str(tiny_model), served_model_name=("a", "b"))).served_names == ("a", "b")


def test_demo_is_served_as_demo(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.checkpoint.source.demo_path", lambda: tiny_model)
    assert resolve(Settings()).served_names == ("demo",)


@pytest.mark.parametrize(
    ("config", "setting", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": None}, "auto", "float32"),  # the files'
        ({"dtype": "bfloat16"}, "half", "float16"),
        ({"dtype": "float8_e4m3fn"}, "bfloat16", "bfloat16"),
        ({}, "float", "float32"),
    ],
)
def test_dtype_is_the_given_one_or_the_checkpoints(model: Path, config: dict[str, Any], setting: Any, expected: str) -> None:
    configure(model, **config)
    assert resolve(Settings(model=str(model), dtype=setting)).dtype == expected


def test_half_on_a_cpu_is_noted(tiny_model: Path) -> None:
    (note,) = resolve(Settings(model=str(tiny_model), dtype="half")).notes
    assert "stored in float16, computed in float32" in note


def test_gpu_memory_utilization_is_noted_on_a_cpu_only_when_given(tiny_model: Path) -> None:
    (note,) = resolve(Settings(model=str(tiny_model), gpu_memory_utilization=0.9)).notes
    assert note.startswith("--gpu-memory-utilization has no effect")


def test_more_ranks_than_cores_are_noted(tiny_model: Path) -> None:
    found = resolve(Settings(model=str(tiny_model), tp=9))
    assert found.threads_per_rank == 1
    assert ["--tp 9 is more than the 8 cores" in note for note in found.notes] == [True]


def test_trust_remote_code_is_noted_and_nothing_is_imported(model: Path, tmp_path: Path) -> None:
    (model / "modeling_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    configure(model, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    (note,) = resolve(Settings(model=str(model), trust_remote_code=True)).notes
    assert "never run" in note
    assert not (tmp_path / "ran").exists()


def test_key_file_that_others_read_or_that_orders_nobody_is_noted(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a alice 1 30")
    (tmp_path / "keys").chmod(0o644)
    given = Settings(model=str(tiny_model), api_key_file=str(tmp_path / "keys"))
    first, second = resolve(given).notes
    assert "other users of this machine can read it" in first
    assert "have no effect without --scheduling-policy priority" in second
    (tmp_path / "keys").chmod(0o600)
    found = resolve(given.model_copy(update={"scheduling_policy": "priority"}))
    assert (found.notes, [key.name for key in found.keys]) == ((), ["alice"])


def test_model_without_an_end_is_noted(model: Path) -> None:
    configure(model, eos_token_id=None)
    (model / "generation_config.json").unlink()
    (model / "tokenizer_config.json").unlink()
    found = resolve(Settings(model=str(model)))
    assert found.stop_ids == ()
    assert "no end-of-sequence id" in found.notes[0]


def test_models_defaults_are_taken_over_and_noted_in_one_line(model: Path) -> None:
    configure(model, "generation_config.json", temperature=0.3, top_p=0.8, repetition_penalty=1.2)
    found = resolve(Settings(model=str(model)))
    assert found.sampling == SamplingDefaults(temperature=0.3, top_p=0.8, repetition_penalty=1.2)
    (note,) = found.notes
    assert note == (
        "generation_config.json: requests that leave them out get temperature 0.3, top_p 0.8, repetition_penalty 1.2"
    )
    configure(model, "generation_config.json", temperature=-1)
    assert "temperature is -1" in refusal(model=str(model))


def test_chat_template_of_a_file_takes_the_place_of_the_models(model: Path, tmp_path: Path) -> None:
    assert resolve(Settings(model=str(model))).chat_template is None
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    configure(model, "tokenizer_config.json", chat_template="{% broken")  # which it may well be
    found = resolve(Settings(model=str(model), chat_template=str(tmp_path / "own.jinja")))
    assert found.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("none.jinja", None, "none.jinja: No such file or directory; give a file"),
        ("{{ messages }}", None, "{{ messages }}: No such file or directory; give a file"),
        (".", None, "is not a regular file"),
        ("own.jinja", b"{% for %}", "own.jinja: the chat template is not valid Jinja: "),
        ("own.jinja", b"\xff", "own.jinja: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_file_that_is_no_chat_template_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    text = refusal(model=str(tiny_model), chat_template=name)
    assert text.startswith(f"--chat-template {name}: ")
    assert named in text


def test_native_kernels_that_are_missing_are_noted_or_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NotBuilt("the native kernels were not built")

    monkeypatch.setattr(choice, "library", missing)
    found = resolve(Settings(model=str(tiny_model)))
    assert found.native is None
    assert found.notes == ("plain torch does the work, which is slower: the native kernels were not built",)
    assert refusal(model=str(tiny_model), kernels="native").startswith("--kernels native: the native kernels were not built")


def test_dummy_needs_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert resolve(Settings(model=str(model), load_format="dummy")).dtype == "float32"
    assert refusal(model=str(model)).startswith("no weights")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_missing_file_is_refused_by_name(model: Path, file: str, load_format: str) -> None:
    (model / file).unlink()
    assert refusal(model=str(model), load_format=load_format).startswith(f"no {file} in {model}")


def test_empty_folder_is_refused_by_path(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(model=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"vocab_size": 256}, "the embedding has 256 rows"),
        ({"hidden_size": 63}, "has shape [257, 54], config.json says [257, 63]"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; give --dtype"),
    ],
)
def test_config_that_cannot_be_served_is_refused_by_name(model: Path, changes: dict[str, Any], named: str) -> None:
    configure(model, **changes)
    assert named in refusal(model=str(model))


class Fetched(Exception):
    """The weights would be fetched now."""


@pytest.fixture
def remote(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model as one whose weights have to be fetched first; they never come."""

    def fetch_weights() -> Path:
        raise Fetched

    (model / "model.safetensors").unlink()
    monkeypatch.setattr("tpserve.checkpoint.source.describe", lambda _: Source(model, model, "remote", fetch_weights))
    return model


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        ({}, dict(tp=1000), "sizes that work"),
        ({}, dict(max_model_len=1025), "made for 1024 positions"),
        ({}, dict(max_model_len=513, kv_cache_memory=200_000), "the largest that fits is 512"),
        ({}, dict(kv_cache_memory="200GiB"), "are available"),
        ({}, dict(kv_cache_memory=1), "less than one page"),
        ({"dtype": None}, dict(kv_cache_memory="200GiB"), "are available"),
        ({"dtype": None}, dict(max_model_len=1025), "made for 1024 positions"),
        ({"intermediate_size": 10**9}, {}, "weights need"),
        ({}, dict(kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"),
        ({}, dict(kv_cache_dtype="half"), "the model's float32"),
        ({"dtype": "float8_e4m3fn"}, {}, "'float8_e4m3fn' is not supported"),
        ({"architectures": ["MambaForCausalLM"]}, {}, "MambaForCausalLM"),
        ({}, dict(device="cuda"), "no NVIDIA driver"),
        ({}, dict(chat_template="none.jinja"), "--chat-template none.jinja"),
        ({}, dict(max_model_len=600, max_num_batched_tokens=512, enable_chunked_prefill=False), "in one step"),
    ],
)
def test_what_is_wrong_without_weights_is_refused_before_they_are_fetched(
    remote: Path, config: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    configure(remote, **config)
    assert named in refusal(model="org/remote", **settings)


@pytest.mark.parametrize("settings", [{}, dict(kv_cache_dtype="half"), dict(kv_cache_memory=PAGE_BYTES // 2)])
def test_what_only_weights_can_tell_is_left_to_them(remote: Path, settings: dict[str, Any]) -> None:
    configure(remote, dtype=None)
    with pytest.raises(Fetched):
        resolve(Settings.model_validate({"model": "org/remote", **settings}))


def test_dtype_that_only_weights_tell_is_checked_again(model: Path) -> None:
    configure(model, dtype=None)  # which are float32
    assert f"less than one page, {PAGE_BYTES} bytes" in refusal(model=str(model), kv_cache_memory=PAGE_BYTES - 1)
    assert "the model's float32" in refusal(model=str(model), kv_cache_dtype="half")


def test_weights_are_taken_from_where_they_were_put(remote: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.checkpoint.source.describe", lambda _: Source(remote, remote, "remote", lambda: tiny_model))
    found = resolve(Settings(model="org/remote"))
    assert (found.model_path, found.tokenizer_path) == (str(tiny_model), str(remote))
    assert resolve(Settings(model="org/remote", load_format="dummy")).model_path == str(remote)


def test_error_without_a_path_is_told_as_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: Path, *_: Any) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", exhausted)
    assert refusal(model=str(model)) == "cannot check the model: [Errno 24] Too many open files"


def test_unreadable_file_is_refused_by_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    assert refusal(model=str(model)) == f"cannot read {model / 'config.json'}: Permission denied"


def test_target_for_gaps_without_chunks_is_refused_by_both_names(tiny_model: Path) -> None:
    text = refusal(model=str(tiny_model), target_itl_ms=60, enable_chunked_prefill=False)
    assert "--target-itl-ms" in text
    assert "--no-enable-chunked-prefill" in text


def test_impossible_size_is_refused_with_the_sizes_that_work(tiny_model: Path) -> None:
    assert refusal(model=str(tiny_model), tp=18).endswith("sizes that work: 1 to 17")
    assert resolve(Settings(model=str(tiny_model), tp=17)).settings.tp == 17


def test_memory_that_is_not_there_is_refused_with_both_numbers(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(model=str(tiny_model), kv_cache_memory="200GiB")
    assert "--kv-cache-memory is 200.00 GiB (" in text
    assert re.search(r"^weights need 0.00 GiB \(\d+ bytes\), buffers 0.00 GiB \(\d+ bytes\) and ", text)
    assert f"16.00 GiB ({16 * GIB} bytes) are available" in text
    monkeypatch.setattr(machine, "available_bytes", lambda: 300_000)
    assert "(300000 bytes) are available" in refusal(model=str(tiny_model))  # the weights alone are more


def test_kv_memory_below_one_page_is_refused_with_the_pages_size(tiny_model: Path) -> None:
    assert f"{PAGE_BYTES} bytes" in refusal(model=str(tiny_model), kv_cache_memory=PAGE_BYTES - 1)
    assert resolve(Settings(model=str(tiny_model), kv_cache_memory=PAGE_BYTES)).max_model_len == 16


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "bfloat16", "int8", "nonsense"])
def test_kv_cache_of_another_type_is_refused_by_name(tiny_model: Path, kv_cache_dtype: str) -> None:
    assert f"--kv-cache-dtype {kv_cache_dtype} is not supported yet" in refusal(
        model=str(tiny_model), kv_cache_dtype=kv_cache_dtype
    )


def test_kv_cache_of_the_models_type_is_taken(tiny_model: Path) -> None:
    assert resolve(Settings(model=str(tiny_model), dtype="half", kv_cache_dtype="float16")).dtype == "float16"


def test_cuda_without_a_driver_is_refused(tiny_model: Path) -> None:
    assert "no NVIDIA driver" in refusal(model=str(tiny_model), device="cuda")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_driver_with_a_cpu_build_of_torch_is_refused_with_the_remedy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    assert "scripts/setup --cuda" in refusal(model=str(tiny_model), device=device)
    assert resolve(Settings(model=str(tiny_model), device="cpu")).device == "cpu"


def test_pool_on_a_gpu_is_left_to_the_loaded_device_unless_given(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cu130")
    found = resolve(Settings(model=str(tiny_model), gpu_memory_utilization=0.5))
    assert (found.device, found.num_pages, found.max_num_batched_tokens, found.notes) == ("cuda", None, 8192, ())
    assert resolve(Settings(model=str(tiny_model), kv_cache_memory=10 * PAGE_BYTES)).num_pages == 10


def test_added_tokens_beyond_the_vocabulary_are_noted(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>", "<pad>"])
    tokenizer.save(str(model / "tokenizer.json"))
    assert resolve(Settings(model=str(model))).notes == (
        "2 tokens of the tokenizer, the first is '<image>', are not in the model's vocabulary: prompts with them are refused",
    )
