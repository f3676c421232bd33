"""Every setting of `tpserve launch`, once: its flags, its section of a config file, help, default and check.

The command line, the environment (`TPSERVE_` and the field's name in capitals) and the keys of a config file are made
from these fields, and the children get the validated values as JSON.
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

Section = Literal["model", "scheduler", "cache", "server"]


class UserError(Exception):
    """A mistake of the user's: one line that says what, where and what to do. Exit status 2, no traceback."""


@dataclass(frozen=True)
class Flag:
    """How a field is spelled, its own name first, then as other engines have it; and where in a config file it stands."""

    names: tuple[str, ...]
    section: Section
    key: str = ""  # its name in that section, if that is another
    hidden: bool = False

    def __init__(self, *names: str, section: Section, key: str = "", hidden: bool = False):
        for name, value in (("names", names), ("section", section), ("key", key), ("hidden", hidden)):
            object.__setattr__(self, name, value)


def parse_bytes(value: object) -> object:
    """`2GiB`, `500MB`, `1000000` -> bytes. Anything else is left for the type check to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("wants bytes, such as 2GiB or 500MB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _refuse_priority(value: object) -> object:
    if value == "priority":
        raise ValueError("is not supported yet, only fcfs")
    return value


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

    model: Annotated[
        str,
        Flag("--model", section="model", key="path"),
        Field(min_length=1, description="Model folder, GGUF file, Hub id such as org/name, or 'demo'."),
    ] = DEMO
    revision: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Flag("--revision", section="model"),
        Field(description="Branch, tag or commit of a Hub id; default: main."),
    ] = None
    download_dir: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Flag("--download-dir", section="model"),
        Field(description="Where files of the Hub are kept; default: the cache of huggingface_hub."),
    ] = None
    served_model_name: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Flag("--served-model-name", section="server"),
        Field(description="Names clients use for the model, its id first (A B for two); default: folder's name or Hub id."),
    ] = ()
    chat_template: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Flag("--chat-template", section="server"),
        Field(description="File with the Jinja template of chats; default: the model's own."),
    ] = None
    host: Annotated[str, Flag("--host", section="server"), Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Flag("--port", section="server"), Field(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    ] = 8000
    allow_no_key: Annotated[
        bool,
        Flag("--allow-no-key", section="server"),
        Field(description="Listen beyond loopback although any client may connect."),
    ] = False
    tp: Annotated[
        int,
        Flag("--tp", "--tensor-parallel-size", "-tp", section="model"),
        Field(ge=1, le=1024, description="Worker processes that share the model."),
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag("--device", section="model"), Field(description="Where the workers compute.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "half", "float16", "float32", "float"],
        Flag("--dtype", section="model"),
        Field(description="Type of weights and KV cache; auto is the checkpoint's."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Flag("--load-format", section="model"),
        Field(description="dummy: random weights from config.json alone."),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Field(ge=2)] | Literal["auto"],
        Flag("--max-model-len", section="model"),
        Field(description="Most tokens of a prompt with its answer; auto is the most the model and the memory allow."),
    ] = "auto"
    scheduling_policy: Annotated[
        Literal["fcfs"],
        BeforeValidator(_refuse_priority),
        Flag("--scheduling-policy", section="scheduler", key="policy"),
        Field(description="Who runs first: fcfs is first come, first served."),
    ] = "fcfs"
    max_num_seqs: Annotated[
        int, Flag("--max-num-seqs", section="scheduler"), Field(ge=1, le=65535, description="Most sequences that run at once.")
    ] = 256
    max_num_batched_tokens: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        Flag("--max-num-batched-tokens", section="scheduler"),
        Field(description="Most tokens in one step; auto is 512 on a CPU, 8192 on a GPU."),
    ] = "auto"
    enable_chunked_prefill: Annotated[
        bool,
        Flag("--enable-chunked-prefill", section="scheduler"),
        Field(description="Split long prompts over steps, beside running answers."),
    ] = True
    enable_prefix_caching: Annotated[
        bool,
        Flag("--enable-prefix-caching", section="cache"),
        Field(description="Reuse the KV pages of prompts that begin alike."),
    ] = True
    block_size: Annotated[
        int, Flag("--block-size", section="cache"), Field(ge=1, le=1024, description="Tokens per KV page.")
    ] = 16
    kv_cache_memory: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(parse_bytes),
        Flag("--kv-cache-memory", "--kv-cache-memory-bytes", section="cache"),
        Field(
            description="Bytes for the KV pools of all ranks of this host together, such as 2GiB;"
            " default: a quarter of memory, at most 2GiB."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str, Flag("--kv-cache-dtype", section="cache"), Field(description="Type of the KV cache: auto is the model's.")
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Flag("--gpu-memory-utilization", section="model"),
        Field(gt=0, le=1, description="Share of each GPU's memory to use."),
    ] = 0.9
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=2**64)] | None,
        Flag("--seed", section="model"),
        Field(description="Seed of requests that bring none; default: a new one each."),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Flag("--trust-remote-code", section="model"),
        Field(description="Accepted for compatibility; code from a model folder is never run."),
    ] = False
    drain_timeout: Annotated[
        float,
        Flag("--drain-timeout", section="server"),
        Field(ge=0, description="Seconds that open requests get to end after SIGTERM."),
    ] = 30.0
    step_timeout: Annotated[
        float, Flag("--step-timeout", section="server"), Field(gt=0, description="Seconds a rank waits for another in a step.")
    ] = 60.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Flag("--log-level", section="server"),
        Field(description="Least severe lines shown."),
    ] = "info"
    debug: Annotated[bool, Flag("--debug", section="server"), Field(description="Show tracebacks.")] = False
    corrupt_id: Annotated[
        tuple[int, int] | None,
        BeforeValidator(lambda value: value.split(":") if isinstance(value, str) else value),
        Flag("--corrupt-id", hidden=True, section="server"),
        Field(description="For tests, RANK:STEP: that rank samples a wrong id in that step."),
    ] = None
