"""Everything that can be checked before the first process starts: from settings to a `Deployment`, without torch.

A user's mistake raises UserError: one line with what is wrong, where, and what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any, Literal

from tpserve import machine, memory
from tpserve.checkpoint import folder, generation, headers, source
from tpserve.deployment import Deployment
from tpserve.frontend import template
from tpserve.frontend.tokenizer import Tokenizer
from tpserve.limits import limits
from tpserve.listen import is_loopback
from tpserve.model import families
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import ImpossibleSize, Shard, partition
from tpserve.settings import Settings, UserError

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]

_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bfloat16",
    "half": "float16",
    "float16": "float16",
    "float32": "float32",
    "float": "float32",
}


def resolve(settings: Settings) -> Deployment:
    """What will run. Raises UserError for whatever can be known to be wrong now."""
    try:
        return _resolve(settings)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


def _resolve(settings: Settings) -> Deployment:
    _check_host(settings)
    device = _device(settings)
    files = source.describe(settings)
    path = files.path
    config = folder.read_json(path / "config.json")
    family = families.for_architecture(folder.architecture(config))
    folder.check_quantization(config)
    spec = family.spec(config)
    shards = _shards(spec, settings.tp)
    tokenizer = folder.read_tokenizer(files.tokenizer, spec.vocab_size)
    stop_ids = folder.stop_ids(files, config, tokenizer, spec.vocab_size)
    sampling = generation.defaults(path)
    chat_template = _chat_template(settings)
    _check_text(files.tokenizer, chat_template)
    stored, unused = {}, []
    if settings.load_format != "dummy":
        files.fetch_weights()
        stored = headers.scan(path)
        spec = headers.untie(spec, stored)
        unused = headers.check(spec, stored)
    dtype = _dtype(settings, config, stored)
    pages = _pages(settings, spec, shards, device, dtype)
    sizes = limits(settings, spec, None if pages is None else pages * settings.block_size, device)
    cores = machine.cores()
    return Deployment(
        settings=settings,
        model_path=str(path),
        tokenizer_path=str(files.tokenizer),
        served_names=settings.served_model_name or (files.name,),
        spec=spec,
        device=device,
        dtype=dtype,
        page_size=settings.block_size,
        num_pages=pages,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        chat_template=chat_template,
        threads_per_rank=max(1, cores // settings.tp),
        notes=(
            *_notes(settings, device, dtype, cores, stop_ids, unused),
            *generation.notes(path, sampling),
            *sizes.notes,
        ),
    )


def _chat_template(settings: Settings) -> str | None:
    """What is in the file that takes the place of the model's template."""
    if settings.chat_template is None:
        return None
    named = f"--chat-template {settings.chat_template}"
    try:
        source = Path(os.path.expanduser(settings.chat_template)).read_text("utf-8")
        template.ChatTemplate(source, {})
    except OSError as error:
        raise UserError(f"{named}: {error.strerror}; give a file with a Jinja template") from None
    except (ValueError, UserError) as error:  # not UTF-8, or not Jinja
        raise UserError(f"{named}: {error}") from None
    return source


def _check_text(path: Path, chat_template: str | None) -> None:
    """Read tokenizer and chat template as the frontend will, so that what it cannot use is refused now."""
    Tokenizer(path)
    template.load(path, chat_template)


def _check_host(settings: Settings) -> None:
    if not is_loopback(settings.host) and not settings.allow_no_key:
        raise UserError(
            f"--host {settings.host!r}: any client that reaches this machine could use the server;"
            " permit that with --allow-no-key, or give 127.0.0.1"
        )


def _device(settings: Settings) -> Device:
    has_driver = machine.has_nvidia_driver()
    if settings.device == "cpu" or (settings.device == "auto" and not has_driver):
        return "cpu"
    if not has_driver:
        raise UserError("--device cuda: no NVIDIA driver on this machine; give --device cpu")
    torch = importlib.metadata.version("torch")
    if torch.endswith("+cpu"):
        raise UserError(
            f"--device {settings.device}: torch {torch} cannot use the GPU;"
            " run scripts/setup --cuda --torch-index URL, or give --device cpu"
        )
    return "cuda"


def _shards(spec: ModelSpec, ranks: int) -> tuple[Shard, ...]:
    try:
        return partition(spec, ranks)
    except ImpossibleSize as error:
        raise UserError(str(error)) from None


def _dtype(settings: Settings, config: dict[str, Any], stored: dict[str, headers.Stored]) -> Dtype:
    """Of weights and KV pages; auto is what config.json says, else what the files hold, else float32 as in transformers."""
    if settings.dtype == "auto":
        held = {headers.DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in headers.DTYPES}
        named = str(config.get("dtype") or config.get("torch_dtype") or (held.pop() if len(held) == 1 else "float32"))
    else:
        named = settings.dtype
    if named not in _DTYPES:
        raise UserError(f"config.json: dtype {named!r} is not supported; give --dtype bfloat16, half or float32")
    dtype = _DTYPES[named]
    kv_cache_dtype = settings.kv_cache_dtype
    if kv_cache_dtype != "auto" and _DTYPES.get(kv_cache_dtype) != dtype:
        raise UserError(f"--kv-cache-dtype {kv_cache_dtype} is not supported yet; give auto, which is the model's {dtype}")
    return dtype


def _pages(settings: Settings, spec: ModelSpec, shards: tuple[Shard, ...], device: Device, dtype: Dtype) -> int | None:
    """Pages of the KV pool; None on a GPU, whose free memory is known once the weights are there."""
    budget_bytes = settings.kv_cache_memory
    if device == "cpu":
        available_bytes = machine.available_bytes()
        budget_bytes = budget_bytes or memory.default_kv_bytes(available_bytes)
        _check_memory(memory.model_bytes(spec, dtype), budget_bytes, available_bytes)
    if budget_bytes is None:
        return None
    page_bytes = memory.host_page_bytes(spec, shards, dtype, settings.block_size)
    if budget_bytes < page_bytes:
        raise UserError(
            f"--kv-cache-memory of {budget_bytes} bytes is less than one page, {page_bytes} bytes;"
            " give more, or a smaller --block-size"
        )
    return budget_bytes // page_bytes


def _check_memory(weight_bytes: int, kv_bytes: int, available_bytes: int) -> None:
    if weight_bytes + kv_bytes > available_bytes:
        raise UserError(
            f"weights need {memory.show(weight_bytes)} and --kv-cache-memory is {memory.show(kv_bytes)}, but"
            f" {memory.show(available_bytes)} are available; lower --kv-cache-memory, or give a smaller model or --dtype"
        )


def _notes(
    settings: Settings, device: Device, dtype: Dtype, cores: int, stop_ids: tuple[int, ...], unused: list[str]
) -> list[str]:
    notes = {
        "--trust-remote-code: accepted, but code from a model folder is never run": settings.trust_remote_code,
        "--gpu-memory-utilization has no effect on a CPU; --kv-cache-memory sets the KV cache there": (
            device == "cpu" and "gpu_memory_utilization" in settings.model_fields_set
        ),
        "float16 on a CPU: weights and KV cache are stored in float16, computed in float32": (
            device == "cpu" and dtype == "float16"
        ),
        f"--tp {settings.tp} is more than the {cores} cores there are: the ranks will wait for each other": (
            device == "cpu" and settings.tp > cores
        ),
        "the model names no end-of-sequence id: answers end by length or stop strings only": not stop_ids,
        f"{len(unused)} tensors of the checkpoint are not used, the first is {next(iter(unused), '')}": bool(unused),
    }
    return [note for note, applies in notes.items() if applies]
