"""The bodies of requests: checked field by field, then turned into one frozen `GenerateRequest`.

Nothing is ignored: a field is honoured, or has a value that asks for nothing, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from tpserve.frontend import neutral
from tpserve.frontend.errors import InvalidRequest
from tpserve.messages import Sampling
from tpserve.sampling import AdditivePenalty, MinP, RepetitionPenalty, SamplingDefaults, Temperature, TopK, TopP

MAX_N = 128
MAX_CHOICES = 1024  # prompts x n of one request
MAX_FIELDS = 200  # of a body: what is beyond is not looked at one by one
MAX_MESSAGES = 10_000
MAX_STOPS = 16
MAX_STOP_CHARS = 512
_LEAST_TEMPERATURE = 1e-5  # below it a request is greedy
_LEAST_TOP_P = 1e-9  # below it only the likeliest id can be left, in any vocabulary
OPENAI_DEFAULTS = SamplingDefaults()

Prompt = str | list[int]
Message = dict[str, str]  # role, content, and name if given


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a client asked for, on either endpoint. Exactly one of `prompts` and `messages` is not None."""

    prompts: tuple[Prompt, ...] | None
    messages: tuple[Message, ...] | None
    n: int
    max_tokens: int | None  # None: the room left
    stop: tuple[str, ...]
    sampling: Sampling
    has_seed: bool  # if not, each prompt draws one
    ignore_eos: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object. NaN and infinities pass here, to be refused with the name of their field."""
    try:
        value = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(value)} fields; {MAX_FIELDS} is the most")
    return value


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or any(type(stop) is not str for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


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


def _content(value: Any) -> str:
    """A string as it is; text parts joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type")
        if kind != "text":
            raise ValueError(f"a part of type {kind!r} is not supported yet; text is")
        if type(part.get("text")) is not str:
            raise ValueError("a text part must have a string 'text'")
    return "\n".join(part["text"] for part in value)


class _Strict(BaseModel):
    """JSON's types are not converted. Fields that are not declared are left to `neutral.check`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Strict):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class ChatMessage(_Strict):
    """One entry of `messages`."""

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None


class _Generate(_Strict):
    """What both endpoints have in common. A field that is null is as if it were absent."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    user: str | None = None  # this and the next three are the client's own notes
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None

    def sampling(self, default_seed: int | None, vocab_size: int, defaults: SamplingDefaults) -> Sampling:
        """How ids are chosen; seed 0 where neither the client nor the user of the server gives one."""
        asked = {name: value for name in SamplingDefaults.model_fields if (value := getattr(self, name)) is not None}
        wanted = defaults.model_copy(update=asked)
        is_greedy = wanted.temperature < _LEAST_TEMPERATURE or wanted.top_p < _LEAST_TOP_P
        seed = default_seed if self.seed is None else self.seed
        return Sampling(
            temperature=0.0 if is_greedy else wanted.temperature,
            top_k=0 if wanted.top_k >= vocab_size else max(0, wanted.top_k),
            top_p=wanted.top_p,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=(seed or 0) % 2**64,
        )

    def token_limit(self) -> int | None:
        """The most ids of an answer that the client wants."""
        asked = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(asked) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
        return asked.pop() if asked else None


class CompletionBody(_Generate):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]


class ChatBody(_Generate):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def completion_request(
    body: Mapping[str, Any], default_seed: int | None, vocab_size: int, defaults: SamplingDefaults = OPENAI_DEFAULTS
) -> GenerateRequest:
    """The request that a body of /v1/completions makes. Raises InvalidRequest."""
    checked = _validated(CompletionBody, body)
    _refuse_unknown(checked, neutral.COMPLETION)
    sampling = checked.sampling(default_seed, vocab_size, defaults)
    return _request(checked, default_seed, sampling, prompts=tuple(checked.prompt))


def chat_request(
    body: Mapping[str, Any], default_seed: int | None, vocab_size: int, defaults: SamplingDefaults = OPENAI_DEFAULTS
) -> GenerateRequest:
    """The request that a body of /v1/chat/completions makes. Raises InvalidRequest."""
    checked = _validated(ChatBody, body)
    _refuse_unknown(checked, neutral.CHAT)
    messages = tuple(_message(message, index) for index, message in enumerate(checked.messages))
    return _request(checked, default_seed, checked.sampling(default_seed, vocab_size, defaults), messages=messages)


_Body = TypeVar("_Body", bound=BaseModel)


def _validated(kind: type[_Body], body: Mapping[str, Any]) -> _Body:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = _path(first["loc"])
        raise InvalidRequest(f"{field}: {_reason(first)}", str(first["loc"][0])) from None


def _reason(error: pydantic_core.ErrorDetails) -> str:
    match error["type"]:
        case "value_error":  # raised in this module
            return str(error["ctx"]["error"])
        case "model_type":
            return "must be an object"
    return error["msg"]


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'content') -> 'messages[0].content'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _refuse_unknown(checked: _Generate, table: neutral.Table) -> None:
    neutral.check(checked.model_extra or {}, {**table, "best_of": (1, checked.n or 1)})
    if checked.stream_options is None:
        return
    if not checked.stream:
        raise InvalidRequest("stream_options: only with stream true", "stream_options")
    neutral.check(checked.stream_options.model_extra or {}, neutral.STREAM_OPTIONS, "stream_options.")


def _message(message: ChatMessage, index: int) -> Message:
    where = f"messages[{index}]."
    neutral.check(message.model_extra or {}, neutral.MESSAGE, where)
    if message.role in ("tool", "function"):
        raise InvalidRequest(f"{where}role: {message.role!r} is not supported yet", "messages")
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named}


def _request(
    body: _Generate,
    default_seed: int | None,
    sampling: Sampling,
    prompts: tuple[Prompt, ...] | None = None,
    messages: tuple[Message, ...] | None = None,
) -> GenerateRequest:
    n = body.n or 1
    count = len(prompts) if prompts else 1
    if count * n > MAX_CHOICES:
        raise InvalidRequest(f"{count} prompts x n {n} is more than the {MAX_CHOICES} choices of one request", "prompt")
    return GenerateRequest(
        prompts=prompts,
        messages=messages,
        n=n,
        max_tokens=body.token_limit(),
        stop=tuple(dict.fromkeys(body.stop)),
        sampling=sampling,
        has_seed=not (body.seed is None and default_seed is None),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
