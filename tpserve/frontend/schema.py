"""What a body asks for, as one frozen `GenerateRequest`.

Nothing is ignored: a field is honoured, or has a value that asks for nothing, or is refused by name. Fields that nobody
knows are kept by name: it is for the caller to refuse them, or to say that they have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pydantic_core
from pydantic import BaseModel, ValidationError

from tpserve.frontend import neutral
from tpserve.frontend.body import MAX_CHOICES, Body, ChatBody, CompletionBody, Prompt
from tpserve.frontend.chat.messages import Message, for_template, render_options
from tpserve.frontend.chat.tools import ChatTools, chat_tools
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.structured import FIELDS, grammar_of
from tpserve.messages import Sampling
from tpserve.sampling import SamplingDefaults

MAX_ANSWER_LOGPROBS = 2**22  # of a whole answer: it is held until all of it is there
_LEAST_TEMPERATURE = 1e-5  # below it a request is greedy
_LEAST_TOP_P = 1e-9  # below it only the likeliest id can be left, in any vocabulary
OPENAI_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a client asked for, on either endpoint. Exactly one of `prompts` and `messages` is not None."""

    prompts: tuple[Prompt, ...] | None
    messages: tuple[Message, ...] | None
    add_special_tokens: bool  # such as BOS, to prompts that are texts
    n: int
    max_tokens: int | None  # None: the room left; 0: the prompt is only worked through
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool  # in the text
    sampling: Sampling
    has_seed: bool  # if not, each prompt draws one
    logit_bias: Mapping[int, float]
    logprobs: int | None  # how many likeliest ids beside the one sampled; None: no logprobs at all
    prompt_logprobs: int | None  # the same of the prompt's ids
    echo: bool = False
    ignore_eos: bool
    skip_special_tokens: bool
    shown_ids: frozenset[int] = frozenset()  # special tokens that are not skipped: they mark calls and reasoning
    constraint: str  # the field of the body that the grammar comes from
    grammar: str  # that constrains the answer, as llguidance has it; "" is none
    tools: ChatTools | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    priority: int | None
    cache_salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk of the stream
    ignored: tuple[str, ...]  # fields of the body that nobody knows

    @property
    def prompt_likeliest(self) -> int:
        """As `prompt_logprobs`, with what the echo shows; -1 for none."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max(-1 if count is None else count for count in asked)

    def check(self, prompts: Sequence[np.ndarray], max_model_len: int) -> None:
        """What can be told only by the prompts' ids. Raises InvalidRequest."""
        if self.min_tokens and self.grammar:
            raise InvalidRequest("min_tokens: not with a grammar, which says where the answer ends", "min_tokens")
        room = max_model_len - max(map(len, prompts))
        if self.min_tokens > room:
            raise InvalidRequest(f"min_tokens: {self.min_tokens} do not fit: the prompt leaves room for {room}", "min_tokens")
        if self.logprobs is not None and not self.stream:
            self._check_logprobs(self.logprobs + 1, [max_model_len - len(prompt) for prompt in prompts])

    def _check_logprobs(self, count: int, rooms: Sequence[int]) -> None:
        """Bound what is held of a whole answer: `count` logprobs for each of its ids."""
        most = self.n * count * sum(room if self.max_tokens is None else min(room, self.max_tokens) for room in rooms)
        if most > MAX_ANSWER_LOGPROBS:
            what = f"the answer may have {most}; {MAX_ANSWER_LOGPROBS} is the most"
            raise InvalidRequest(f"logprobs: {what}: set a lower max_tokens, ask for fewer, or stream", "logprobs")


def completion_request(
    body: Mapping[str, Any], default_seed: int | None, vocab_size: int, defaults: SamplingDefaults = OPENAI_DEFAULTS
) -> GenerateRequest:
    """The request that a body of /v1/completions makes. Raises InvalidRequest."""
    checked = validated(CompletionBody, body)
    return GenerateRequest(
        prompts=tuple(checked.prompt),
        messages=None,
        logprobs=checked.logprobs,
        echo=bool(checked.echo),
        ignored=tuple(_unknown(checked, neutral.COMPLETION)),
        **_common(checked, len(checked.prompt), default_seed, vocab_size, defaults, add_special_tokens=True),
    )


def chat_request(
    body: Mapping[str, Any], default_seed: int | None, vocab_size: int, defaults: SamplingDefaults = OPENAI_DEFAULTS
) -> GenerateRequest:
    """The request that a body of /v1/chat/completions makes. Raises InvalidRequest."""
    checked = validated(ChatBody, body)
    ignored = _unknown(checked, neutral.CHAT)
    if checked.top_logprobs and not checked.logprobs:
        raise InvalidRequest("top_logprobs: only with logprobs true", "top_logprobs")
    messages = for_template(checked.messages, ignored)
    kwargs = checked.chat_template_kwargs or {}
    return GenerateRequest(
        prompts=None,
        messages=messages,
        tools=chat_tools(checked.tools, checked.tool_choice, checked.parallel_tool_calls, ignored),
        template_kwargs=render_options(kwargs, messages, checked.add_generation_prompt, checked.continue_final_message),
        logprobs=(checked.top_logprobs or 0) if checked.logprobs else None,
        ignored=tuple(ignored),
        **_common(checked, 1, default_seed, vocab_size, defaults, add_special_tokens=False),
    )


_Body = TypeVar("_Body", bound=BaseModel)


def validated(kind: type[_Body], body: Mapping[str, Any]) -> _Body:
    """The body as a model. Raises InvalidRequest with the first field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequest(f"{_path(first['loc'])}: {_reason(first)}", str(first["loc"][0])) from None


def _reason(error: pydantic_core.ErrorDetails) -> str:
    match error["type"]:
        case "value_error":  # raised in this program
            return str(error["ctx"]["error"])
        case "model_type":
            return "must be an object"
    return error["msg"]


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'content') -> 'messages[0].content'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _unknown(body: Body, table: neutral.Table) -> list[str]:
    """The fields that nobody knows. Raises InvalidRequest for those that are known and not built."""
    unknown = neutral.check(body.model_extra or {}, table)
    if body.stream_options is not None:
        unknown += neutral.check(body.stream_options.model_extra or {}, neutral.STREAM_OPTIONS, "stream_options.")
    return unknown


def _common(
    body: Body,
    prompts: int,
    default_seed: int | None,
    vocab_size: int,
    defaults: SamplingDefaults,
    add_special_tokens: bool,
) -> dict[str, Any]:
    """The fields of the request that both endpoints have; `add_special_tokens` is the endpoint's own default."""
    n, max_tokens = body.n or 1, _token_limit(body)
    _check_together(body, n, prompts, max_tokens)
    _check_ids("logit_bias", body.logit_bias, vocab_size)
    _check_ids("stop_token_ids", body.stop_token_ids, vocab_size)
    constraint, grammar = grammar_of({name: getattr(body, name) for name in FIELDS})
    options = body.stream_options
    return {
        "add_special_tokens": add_special_tokens if body.add_special_tokens is None else body.add_special_tokens,
        "n": n,
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens or 0,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "include_stop": bool(body.include_stop_str_in_output),
        "sampling": _sampling(body, default_seed, vocab_size, defaults),
        "has_seed": not (body.seed is None and default_seed is None),
        "logit_bias": body.logit_bias,
        "prompt_logprobs": body.prompt_logprobs,
        "constraint": constraint,
        "grammar": grammar,
        "ignore_eos": bool(body.ignore_eos),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "priority": body.priority,
        "cache_salt": body.cache_salt or "",
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.include_usage and options.continuous_usage_stats),
    }


def _token_limit(body: Body) -> int | None:
    """The most ids of an answer that the client wants."""
    asked = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(asked) > 1:
        raise InvalidRequest("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    return asked.pop() if asked else None


def _check_together(body: Body, n: int, prompts: int, max_tokens: int | None) -> None:
    """What no field says alone."""
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(f"{prompts} prompts x n {n} is more than the {MAX_CHOICES} choices of one request", "prompt")
    if body.best_of not in (None, n):
        raise InvalidRequest(f"best_of: other than n, which is {n}, it is not supported", "best_of")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens: {body.min_tokens} is more than max_tokens, {max_tokens}", "min_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only with stream true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: not with stream true", "prompt_logprobs")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for id_ in ids:
        if not 0 <= id_ < vocab_size:
            raise InvalidRequest(f"{name}: token id {id_} is not in the model's vocabulary (0 to {vocab_size - 1})", name)


def _sampling(body: Body, default_seed: int | None, vocab_size: int, defaults: SamplingDefaults) -> Sampling:
    """How ids are chosen; seed 0 where neither the client nor the user of the server gives one."""
    asked = {name: value for name in SamplingDefaults.model_fields if (value := getattr(body, name)) is not None}
    wanted = defaults.model_copy(update=asked)
    is_greedy = wanted.temperature < _LEAST_TEMPERATURE or wanted.top_p < _LEAST_TOP_P
    seed = default_seed if body.seed is None else body.seed
    return Sampling(
        temperature=0.0 if is_greedy else wanted.temperature,
        top_k=0 if wanted.top_k >= vocab_size else max(0, wanted.top_k),
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=(seed or 0) % 2**64,
    )
