"""Every setting of `tpserve launch`, once: its flags, help, default and check.

The command line and the environment (`TPSERVE_` and the field's name in capitals) are made from these
fields, and the children get the validated values as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

DEMO = "demo"

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "kb": 1000}
_UNITS |= {"mb": 1000**2, "gb": 1000**3}


class UserError(Exception):
    """A mistake of the user's: one line that says what, where and what to do. Exit status 2, no traceback."""


@dataclass(frozen=True)
class Flag:
    """How a field is spelled on the command line: its own name first, then the spellings other engines use."""

    names: tuple[str, ...]
    hidden: bool = False

    def __init__(self, *names: str, hidden: bool = False):
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "hidden", hidden)


def parse_bytes(value: object) -> object:
    """`2GiB`, `500MB`, `1000000` -> bytes. Anything else is left for the type check to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("wants bytes, such as 2GiB or 500MB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def explain(error: ValidationError) -> tuple[str, str]:
    """The first field that pydantic refused, and what it must be."""
    first, *_ = errors = error.errors()
    field = first["loc"][0]
    # A field of several types brings one complaint per type.
    complaints = [complaint["msg"].removeprefix("Value error, ") for complaint in errors if complaint["loc"][0] == field]
    wants = [complaint.replace("Input should be", "must be").partition(", unable")[0] for complaint in complaints]
    return str(field), " or ".join(dict.fromkeys(wants))


class Settings(BaseModel):
    """What the user asked for, checked value by value. What needs the model to be known is in `Deployment`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Flag("--model"), Field(min_length=1, description="Model folder, or 'demo'.")] = DEMO
    served_model_name: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Flag("--served-model-name"),
        Field(description="Names clients use for the model, the first is its id (A B for two); default: the folder's name."),
    ] = ()
    host: Annotated[str, Flag("--host"), Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Flag("--port"), Field(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    allow_no_key: Annotated[
        bool, Flag("--allow-no-key"), Field(description="Listen beyond loopback although any client may connect.")
    ] = False
    tp: Annotated[
        int,
        Flag("--tp", "--tensor-parallel-size", "-tp"),
        Field(ge=1, le=1024, description="Worker processes that share the model."),
    ] = 1
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("--device"), Field(description="Where the workers compute.")] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "bfloat16", "half", "float16", "float32", "float"],
        Flag("--dtype"),
        Field(description="Type of weights and KV cache; auto is the checkpoint's."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Flag("--load-format"),
        Field(description="dummy: random weights from config.json alone."),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Field(ge=2)] | Literal["auto"],
        Flag("--max-model-len"),
        Field(description="Most tokens of a prompt with its answer; auto is the most the model and the memory allow."),
    ] = "auto"
    max_num_seqs: Annotated[
        int, Flag("--max-num-seqs"), Field(ge=1, le=65535, description="Most sequences that run at once.")
    ] = 256
    max_num_batched_tokens: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        Flag("--max-num-batched-tokens"),
        Field(description="Most tokens in one step; auto is 512 on a CPU, 8192 on a GPU."),
    ] = "auto"
    enable_chunked_prefill: Annotated[
        bool, Flag("--enable-chunked-prefill"), Field(description="Split long prompts over steps, beside running answers.")
    ] = True
    enable_prefix_caching: Annotated[
        bool, Flag("--enable-prefix-caching"), Field(description="Reuse the KV pages of prompts that begin alike.")
    ] = True
    block_size: Annotated[int, Flag("--block-size"), Field(ge=1, le=1024, description="Tokens per KV page.")] = 16
    kv_cache_memory: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(parse_bytes),
        Flag("--kv-cache-memory", "--kv-cache-memory-bytes"),
        Field(
            description="Bytes for the KV pools of all ranks of this host together, such as 2GiB;"
            " default: a quarter of memory, at most 2GiB."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str, Flag("--kv-cache-dtype"), Field(description="Type of the KV cache: auto is the model's.")
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Flag("--gpu-memory-utilization"), Field(gt=0, le=1, description="Share of each GPU's memory to use.")
    ] = 0.9
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=2**64)] | None,
        Flag("--seed"),
        Field(description="Seed of requests that bring none; default: a new one each."),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Flag("--trust-remote-code"),
        Field(description="Accepted for compatibility; code from a model folder is never run."),
    ] = False
    drain_timeout: Annotated[
        float, Flag("--drain-timeout"), Field(ge=0, description="Seconds that open requests get to end after SIGTERM.")
    ] = 30.0
    step_timeout: Annotated[
        float, Flag("--step-timeout"), Field(gt=0, description="Seconds a rank waits for another in a step.")
    ] = 60.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag("--log-level"), Field(description="Least severe lines shown.")
    ] = "info"
    debug: Annotated[bool, Flag("--debug"), Field(description="Show tracebacks.")] = False
    corrupt_id: Annotated[
        tuple[int, int] | None,
        BeforeValidator(lambda value: value.split(":") if isinstance(value, str) else value),
        Flag("--corrupt-id", hidden=True),
        Field(description="For tests, RANK:STEP: that rank samples a wrong id in that step."),
    ] = None
