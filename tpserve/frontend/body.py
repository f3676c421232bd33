"""The bodies of requests, field by field: which types and numbers each may have. Null is as if a field were absent."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from tpserve.frontend.chat.messages import Messages, Strict, TemplateKwargs
from tpserve.frontend.chat.tools import Tools
from tpserve.sampling import AdditivePenalty, MinP, RepetitionPenalty, Temperature, TopK, TopP

MAX_N = 128
MAX_CHOICES = 1024  # prompts x n of one request
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_SALT_CHARS = 256

Prompt = str | list[int]

_ID = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or any(type(stop) is not str for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _stop_ids(value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or len(ids) > MAX_STOP_IDS or any(type(id_) is not int for id_ in ids):
        raise ValueError(f"must be a list of at most {MAX_STOP_IDS} token ids")
    return tuple(dict.fromkeys(ids))


def _biases(value: Any) -> dict[int, float]:
    """Checked by hand, so that nothing is done for a map that is too large."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must be an object of at most {MAX_BIASES} token ids and what is added to their logits")
    for id_, bias in value.items():
        if type(id_) is not int and not (isinstance(id_, str) and _ID.fullmatch(id_)):
            raise ValueError(f"{str(id_)[:20]!r} is no token id")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of {id_} must be a number from {-MAX_BIAS} to {MAX_BIAS}")
    return {int(id_): float(bias) for id_, bias in value.items()}


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, list) and len(value) > MAX_CHOICES and type(value[0]) is not int:
        raise ValueError(f"{len(value)} prompts are more than the {MAX_CHOICES} choices of one request")
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not (all(type(one) is str for one in prompts) or all(map(_is_ids, prompts))):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not prompts or not all(prompts):
        raise ValueError("must not be empty")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(id_) is int for id_ in value)


Likeliest = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]  # how many ids have their logprobs shown
_Stops = Annotated[tuple[str, ...], PlainValidator(_stops, json_schema_input_type=str | list[str] | None)]
_StopIds = Annotated[tuple[int, ...], PlainValidator(_stop_ids, json_schema_input_type=list[int] | None)]
_Biases = Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=dict[str, float] | None)]
_AnyPrompts = str | list[str] | list[int] | list[list[int]]
_Prompts = Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=_AnyPrompts)]


class StreamOptions(Strict):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(Strict):
    """What both endpoints have in common. Fields that are not declared are left to `neutral.check`."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: int | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    logit_bias: _Biases = Field(default_factory=dict)
    seed: int | None = None
    prompt_logprobs: Likeliest | None = None
    stop: _Stops = ()
    stop_token_ids: _StopIds = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Any = None  # what this and the next five may be is said by `grammar_of`
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    user: str | None = None  # this and the next three are the client's own notes
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None


class CompletionBody(Body):
    """Body of POST /v1/completions."""

    prompt: _Prompts
    logprobs: Likeliest | None = None
    echo: bool | None = None


class ChatBody(Body):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None  # what it may be is said by `chat_tools`
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
