"""Every setting of `tpserve launch`, once: its flags, its section of a config file, help, default and check.

The command line, the environment (`TPSERVE_` and the field's name in capitals) and the keys of a config file are made
from these fields, and the children get the validated values as JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

DEMO = "demo"
SHOWN_SECRET = "***"  # in place of a secret

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
    is_secret: bool = False  # never shown

    def __init__(self, *names: str, section: Section, key: str = "", hidden: bool = False, is_secret: bool = False):
        values = {"names": names, "section": section, "key": key, "hidden": hidden, "is_secret": is_secret}
        for name, value in values.items():
            object.__setattr__(self, name, value)


def parse_bytes(value: object) -> object:
    """`2GiB`, `500MB`, `1000000` -> bytes. Anything else is left for the type check to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("wants bytes, such as 2GiB or 500MB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _lists(value: object) -> object:
    """A list some of whose items are lists in JSON, as other engines take one: '["a", "b"]' is "a", "b"."""
    if not isinstance(value, list | tuple):
        return value
    try:
        lists = [json.loads(item) if isinstance(item, str) and item.startswith("[") else [item] for item in value]
    except ValueError:
        raise ValueError("wants a list in JSON after [") from None
    return [item for items in lists for item in items]


def _origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", value):
        raise ValueError("wants origins as browsers send them, such as https://chat.example:8443, without a path; or *")
    return value


def _key(value: str) -> str:
    if value == SHOWN_SECRET:
        raise ValueError(f"{SHOWN_SECRET} is how --show-config hides a key: give the key itself")
    if not re.fullmatch(r"[\x21-\x7e]+", value):
        raise ValueError("wants printable ASCII characters without spaces: it is sent as Authorization: Bearer KEY")
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
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json"],
        Flag("--tool-call-parser", section="server"),
        Field(description="How the model writes its calls of tools; auto tells by the chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["none", "qwen3", "deepseek_r1"],
        BeforeValidator(lambda value: value or "none"),
        Flag("--reasoning-parser", section="server"),
        Field(description="How the model marks its reasoning, which is answered apart from the content."),
    ] = "none"
    strict: Annotated[
        bool,
        Flag("--strict", section="server"),
        Field(description="Refuse requests with fields that nobody knows; else the header X-Ignored-Fields names them."),
    ] = False
    host: Annotated[str, Flag("--host", section="server"), Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Flag("--port", section="server"), Field(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    ] = 8000
    allow_no_key: Annotated[
        bool,
        Flag("--allow-no-key", section="server"),
        Field(description="Listen beyond loopback although any client may connect."),
    ] = False
    api_key: Annotated[
        tuple[Annotated[str, AfterValidator(_key)], ...],
        BeforeValidator(_lists),
        Flag("--api-key", section="server", is_secret=True),
        Field(repr=False, description="Key that clients must send; others see command lines, so better by TPSERVE_API_KEY."),
    ] = ()
    api_key_file: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Flag("--api-key-file", section="server"),
        Field(description="File of lines KEY NAME PRIORITY MAX_WAIT_S: keys, whose they are, what they may ask for."),
    ] = None
    allowed_origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...],
        BeforeValidator(_lists),
        Flag("--allowed-origins", section="server"),
        Field(description="Origins whose pages may use the server from a browser (CORS), such as https://chat.example, or *."),
    ] = ()
    tp: Annotated[
        int,
        Flag("--tp", "--tensor-parallel-size", "-tp", section="model"),
        Field(ge=1, le=1024, description="Worker processes that share the model."),
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag("--device", section="model"), Field(description="Where the workers compute.")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        Flag("--kernels", section="model"),
        Field(description="What computes on a CPU: auto is the native kernels where they were built, else plain torch."),
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
        Literal["fcfs", "priority"],
        Flag("--scheduling-policy", section="scheduler", key="policy"),
        Field(description="Who runs first: who came first, or who has the lowest priority number, which falls with waiting."),
    ] = "fcfs"
    max_queue: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Flag("--max-queue", section="scheduler"),
        Field(description="Most requests that wait for a place; more get status 429. Default: no bound."),
    ] = None
    queue_timeout: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Flag("--queue-timeout", section="scheduler"),
        Field(description="Seconds that a request may wait; then it gets status 503. Default: no bound."),
    ] = None
    max_num_seqs: Annotated[
        int, Flag("--max-num-seqs", section="scheduler"), Field(ge=1, le=65535, description="Most sequences that run at once.")
    ] = 256
    max_num_batched_tokens: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        Flag("--max-num-batched-tokens", section="scheduler"),
        Field(description="Most tokens in one step; auto is 512 on a CPU, 8192 on a GPU."),
    ] = "auto"
    speculative: Annotated[
        Literal["off", "ngram"],
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
        Flag("--speculative", "--speculative-algorithm", section="scheduler"),
        Field(
            description="ngram: while few requests run, try the ids that followed the last ones where they stood before,"
            " several a step; answers stay as they are."
        ),
    ] = "off"
    target_itl_ms: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Flag("--target-itl-ms", section="scheduler"),
        Field(
            description="Milliseconds between an answer's tokens to hold by sharing out prompt work and by admitting fewer;"
            " default: steps as large as they may be."
        ),
    ] = None
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
    log_format: Annotated[
        Literal["text", "json"], Flag("--log-format", section="server"), Field(description="json: each line is an object.")
    ] = "text"
    debug: Annotated[bool, Flag("--debug", section="server"), Field(description="Show tracebacks.")] = False
    corrupt_id: Annotated[
        tuple[int, int] | None,
        BeforeValidator(lambda value: value.split(":") if isinstance(value, str) else value),
        Flag("--corrupt-id", hidden=True, section="server"),
        Field(description="For tests, RANK:STEP: that rank samples a wrong id in that step."),
    ] = None
    script: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Flag("--script", hidden=True, section="server"),
        Field(description="For tests: a JSON file of the ids that the workers emit."),
    ] = None

    @property
    def speculates(self) -> bool:
        """Whether workers may draft ids."""
        return self.speculative != "off"
