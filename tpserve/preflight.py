"""Everything that can be checked before the first process starts: from settings to a `Deployment`, without torch.

A user's mistake raises UserError: one line with what is wrong, where, and what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tpserve import keys, machine, memory
from tpserve.checkpoint import folder, generation, headers, source
from tpserve.deployment import ApiKey, Deployment, RankMemory
from tpserve.frontend.chat import template
from tpserve.kernels import choice
from tpserve.limits import Limits, limits
from tpserve.model import families
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import ImpossibleSize, Shard, partition
from tpserve.settings import Settings, UserError
from tpserve.tokenizer import Tokenizer

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]

_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bfloat16",
    "half": "float16",
    "float16": "float16",
    "float32": "float32",
    "float": "float32",
}
_LEAST: Dtype = "bfloat16"  # what a model needs at least whose dtype only its weights tell


def resolve(settings: Settings) -> Deployment:
    """What will run. Raises UserError for whatever can be known to be wrong now.

    Weights may take hours to fetch, so all that can be known without them is checked before.
    """
    try:
        return _resolve(settings)
    except OSError as error:
        found = f"cannot read {error.filename}: {error.strerror}" if error.filename else f"cannot check the model: {error}"
        raise UserError(found) from error


def _resolve(settings: Settings) -> Deployment:
    device, chat_template, api_keys = _device(settings), _chat_template(settings), keys.load(settings)
    _check_target(settings)
    _check_kv_cache_dtype(settings, None)
    files = source.describe(settings)
    config = folder.read_json(files.path / "config.json")
    spec = _spec(config)
    shards = _shards(spec, settings.tp)
    native, of_kernels = choice.choose(settings, device, spec)
    tokenizer = Tokenizer(files.tokenizer)
    beyond = tokenizer.beyond(spec.vocab_size)
    stop_ids = folder.stop_ids(files.path, config, files.tokenizer, tokenizer.id_of, spec.vocab_size)
    sampling = generation.defaults(files.path)
    template.load(files.tokenizer, chat_template)  # as the frontend will, so that what it cannot use is refused now
    dtype = _dtype(settings, config)
    _check_kv_cache_dtype(settings, dtype)
    _fit(settings, spec, shards, device, dtype or _LEAST, dtype or _LEAST)
    weights = _weights(settings, files, spec)
    spec, dtype = weights.spec, dtype or weights.dtype
    _check_kv_cache_dtype(settings, dtype)
    # Again: a head may have turned up, memory may have gone.
    pages, sizes, held = _fit(settings, spec, shards, device, dtype, weights.table)
    cores = machine.cores()
    return Deployment(
        settings=settings.model_copy(update={"api_key": ()}),
        model_path=str(weights.path),
        tokenizer_path=str(files.tokenizer),
        served_names=settings.served_model_name or (files.name,),
        spec=spec,
        device=device,
        dtype=dtype,
        native=native,
        page_size=settings.block_size,
        num_pages=pages,
        memory=held,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        chat_template=chat_template,
        keys=api_keys,
        threads_per_rank=max(1, cores // settings.tp),
        notes=(
            *_notes(settings, device, dtype, cores, stop_ids, weights.unused, beyond),
            *([of_kernels] if of_kernels else ()),
            *_key_notes(settings, api_keys),
            *generation.notes(files.path, sampling),
            *sizes.notes,
        ),
    )


def _check_target(settings: Settings) -> None:
    if settings.target_itl_ms is not None and not settings.enable_chunked_prefill:
        raise UserError("--target-itl-ms shares out prompts over steps: leave --no-enable-chunked-prefill out")


def _chat_template(settings: Settings) -> str | None:
    """What is in the file that takes the place of the model's template."""
    if settings.chat_template is None:
        return None
    named = f"--chat-template {settings.chat_template}"
    try:
        source = folder.read_text(Path(os.path.expanduser(settings.chat_template)))
        template.ChatTemplate(source, {})
    except OSError as error:
        raise UserError(f"{named}: {error.strerror}; give a file with a Jinja template") from None
    except (ValueError, UserError) as error:  # not UTF-8, or not Jinja
        raise UserError(f"{named}: {error}") from None
    return source


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


def _spec(config: dict[str, Any]) -> ModelSpec:
    family = families.for_architecture(folder.architecture(config), config)
    folder.check_quantization(config)
    return family.spec(config)


def _dtype(settings: Settings, config: dict[str, Any]) -> Dtype | None:
    """Of weights and KV pages; auto is what config.json says, and None where that says nothing."""
    named = settings.dtype if settings.dtype != "auto" else config.get("dtype") or config.get("torch_dtype")
    if not named:
        return None
    if str(named) not in _DTYPES:
        raise UserError(f"config.json: dtype {named!r} is not supported; give --dtype bfloat16, half or float32")
    return _DTYPES[str(named)]


def _check_kv_cache_dtype(settings: Settings, dtype: Dtype | None) -> None:
    """Refuse another one than the model's, as far as that is known."""
    named = settings.kv_cache_dtype
    if named != "auto" and (named not in _DTYPES or dtype not in (None, _DTYPES[named])):
        raise UserError(f"--kv-cache-dtype {named} is not supported yet; give auto, which is the model's {dtype or 'own'}")


class _Weights(NamedTuple):
    path: Path  # their folder
    spec: ModelSpec  # with a head of its own if they have one
    dtype: Dtype
    table: str | None  # dtype of the embedding in its file; None: there is no file to map
    unused: list[str]  # tensors that nothing uses


def _weights(settings: Settings, files: source.Source, spec: ModelSpec) -> _Weights:
    if settings.load_format == "dummy":
        return _Weights(files.path, spec, "float32", None, [])
    path = files.fetch_weights()
    stored = headers.scan(path)
    spec = headers.untie(spec, stored)
    held = {headers.DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in headers.DTYPES}
    unused = headers.check(spec, stored)
    # Of several, as of none: transformers' default.
    dtype = _DTYPES[held.pop()] if len(held) == 1 else "float32"
    return _Weights(path, spec, dtype, headers.DTYPES[stored[families.embedding(spec)].dtype], unused)


def _fit(
    settings: Settings, spec: ModelSpec, shards: tuple[Shard, ...], device: Device, dtype: Dtype, table: str | None
) -> tuple[int | None, Limits, tuple[RankMemory, ...]]:
    """(Pages of the KV pool, lengths and counts, what each rank holds); the first and last are of CPUs.

    On a GPU the free memory is known once the weights are there.
    """
    available_bytes = machine.available_bytes()
    budget_bytes = settings.kv_cache_memory or (memory.default_kv_bytes(available_bytes) if device == "cpu" else None)
    pages = None if budget_bytes is None else _pages(settings, spec, shards, dtype, budget_bytes)
    sizes = limits(settings, spec, None if pages is None else pages * settings.block_size, device)
    if device != "cpu" or pages is None:
        return pages, sizes, ()
    held = memory.rank_memory(spec, shards, dtype, sizes, settings, pages=pages, table=table)
    _check_memory(memory.host_memory(held), available_bytes)
    return pages, sizes, held


def _pages(settings: Settings, spec: ModelSpec, shards: tuple[Shard, ...], dtype: Dtype, budget_bytes: int) -> int:
    page_bytes = memory.host_page_bytes(spec, shards, dtype, settings.block_size)
    if budget_bytes < page_bytes:
        raise UserError(
            f"--kv-cache-memory of {budget_bytes} bytes is less than one page, {page_bytes} bytes;"
            " give more, or a smaller --block-size"
        )
    return budget_bytes // page_bytes


def _check_memory(held: RankMemory, available_bytes: int) -> None:
    if held.total > available_bytes:
        raise UserError(
            f"weights need {memory.show(held.weights)}, buffers {memory.show(held.buffers)} and --kv-cache-memory is"
            f" {memory.show(held.pool)}, but {memory.show(available_bytes)} are available; lower --kv-cache-memory,"
            " --max-num-batched-tokens or --max-num-seqs, or give a smaller model or --dtype"
        )


def _notes(
    settings: Settings,
    device: Device,
    dtype: Dtype,
    cores: int,
    stop_ids: tuple[int, ...],
    unused: list[str],
    beyond: list[str],
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
        f"{len(beyond)} tokens of the tokenizer, the first is {next(iter(beyond), '')!r}, are not in the model's vocabulary:"
        " prompts with them are refused": bool(beyond),
        f"{len(unused)} tensors of the checkpoint are not used, the first is {next(iter(unused), '')!r}": bool(unused),
    }
    return [note for note, applies in notes.items() if applies]


def _key_notes(settings: Settings, api_keys: tuple[ApiKey, ...]) -> list[str]:
    file, by_arrival = f"--api-key-file {settings.api_key_file}", settings.scheduling_policy == "fcfs"
    notes = {
        f"{file}: other users of this machine can read it; see to its rights (chmod 600)": keys.is_open_to_others(settings),
        f"{file}: its priorities have no effect without --scheduling-policy priority": (
            by_arrival and any(key.priority for key in api_keys)
        ),
    }
    return [note for note, applies in notes.items() if applies]
