"""The messages of a chat: checked as OpenAI's clients send them, then as chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from tpserve.frontend import neutral
from tpserve.frontend.errors import InvalidRequest, shown

MAX_MESSAGES = 10_000
MAX_CALLS = 128  # of one message
MAX_KWARGS = 32
MAX_KWARGS_CHARS = 16 * 1024  # as JSON

Message = dict[str, Any]  # role, content, and what else its role may have, as chat templates know it

# What templates get from us; all names that end in _token are the tokenizer's.
_OUR_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "tokenize", "raise_exception", "strftime_now"}
)
# Fields that clients send back as they got them, with the values that say nothing.
_NEUTRAL: neutral.Table = {"annotations": ([],), "audio": (), "refusal": ("",)}


class Strict(BaseModel):
    """JSON's types are not converted. Fields that are not declared are kept for whoever judges them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _content(value: Any) -> Any:
    """A string, or text parts; they are joined where what else they have can be told."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type")
        if kind != "text":
            raise ValueError(f"a part of type {shown(repr(kind))} is not supported; text is")
        if type(part.get("text")) is not str:
            raise ValueError("a text part must have a string 'text'")
    return value


def _kwargs(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_KWARGS:
        raise ValueError(f"has {len(value)} names; {MAX_KWARGS} is the most")
    for name in value:
        if name in _OUR_NAMES or name.endswith("_token"):
            raise ValueError(f"{shown(repr(name))} is the server's to give")
    try:
        size = len(json.dumps(value))
    except (ValueError, TypeError, RecursionError):  # from Python, where it need not be JSON
        raise ValueError("must be JSON") from None
    if size > MAX_KWARGS_CHARS:
        raise ValueError(f"has {size} characters as JSON; {MAX_KWARGS_CHARS} is the most")
    return value


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_kwargs)]


_Content = str | list[dict[str, Any]] | None


class FunctionCall(Strict):
    """Which function the assistant called, and with what: JSON, if the model wrote any."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCall(Strict):
    """One of an assistant's calls."""

    id: Annotated[str, Field(min_length=1)]
    index: int | None = None  # of a delta; clients send it back
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One entry of `messages`."""

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[_Content, PlainValidator(_content, json_schema_input_type=_Content)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name for it
    function_call: FunctionCall | None = None  # what tool_calls were before


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[ChatMessage], ignored: list[str]) -> tuple[Message, ...]:
    """The messages in Hugging Face's shape. Names of fields that nobody knows are added to `ignored`.

    Raises InvalidRequest for a message that lacks what its role needs, or has what only another role may have.
    """
    return tuple(_message(message, f"messages[{place}]", ignored) for place, message in enumerate(messages))


def render_options(
    kwargs: Mapping[str, Any],
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> dict[str, Any]:
    """Names for the template: the client's, and how the prompt is to end. Raises InvalidRequest.

    Without either option it ends where a new answer begins; see `PromptMaker.render` for the final message.
    """
    if not continue_final_message:
        return {**kwargs, "add_generation_prompt": add_generation_prompt is not False}
    name = "continue_final_message"
    if add_generation_prompt is not False:
        raise InvalidRequest(f"{name}: needs add_generation_prompt false: an answer is continued or begun", name)
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        raise InvalidRequest(f"{name}: the final message must be the assistant's, with content", name)
    return {**kwargs, "add_generation_prompt": False, name: True}


def _message(message: ChatMessage, where: str, ignored: list[str]) -> Message:
    _note_unknown(message, where, ignored)
    content, reasoning = _text(message.content, f"{where}.content", ignored), _reasoning(message, where)
    match message.role:
        case "assistant":
            return _assistant(message, content, reasoning, where, ignored)
        case "function":  # what tool was before
            needed = {"name": message.name}
        case "tool":
            needed = {"tool_call_id": message.tool_call_id}
        case _:
            needed = {}
    for field, value in {"content": content, **needed}.items():
        if value is None:
            raise _wrong(f"{where}.{field}", f"is missing; a message of role {shown(message.role)} must have it")
    only_elsewhere = {
        "tool_calls": message.tool_calls,
        "function_call": message.function_call,
        "reasoning_content": reasoning,
        "tool_call_id": None if message.role == "tool" else message.tool_call_id,
    }
    for field, misplaced in only_elsewhere.items():
        if misplaced:
            raise _wrong(f"{where}.{field}", f"a message of role {shown(message.role)} must not have it")
    role = "tool" if message.role == "function" else message.role
    return {"role": role, "content": content, **_named(message), **needed}


def _assistant(message: ChatMessage, content: str | None, reasoning: str, where: str, ignored: list[str]) -> Message:
    calls = [_call(call, f"{where}.tool_calls[{i}]", ignored) for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        _note_unknown(message.function_call, f"{where}.function_call", ignored)
        calls.append({"type": "function", "function": _function(message.function_call)})
    if message.tool_call_id is not None:
        raise _wrong(f"{where}.tool_call_id", "a message of role assistant must not have it")
    if content is None and not calls and not reasoning:
        raise _wrong(f"{where}.content", "may be missing or null only beside tool_calls")
    # Templates test for the presence of tool_calls, and join content to other strings.
    return {
        "role": "assistant",
        "content": content or "",
        **_named(message),
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _text(content: _Content, where: str, ignored: list[str]) -> str | None:
    """The content as one string: text parts are joined by line ends."""
    if content is None or isinstance(content, str):
        return content
    for place, part in enumerate(content):
        others = {name: value for name, value in part.items() if name not in ("type", "text")}
        ignored += neutral.check(others, {}, f"{where}[{place}].")
    return "\n".join(part["text"] for part in content)


def _reasoning(message: ChatMessage, where: str) -> str:
    """By either name; "" is none."""
    given = {text for text in (message.reasoning_content, message.reasoning) if text}
    if len(given) > 1:
        raise _wrong(f"{where}.reasoning", "differs from reasoning_content: give one of them")
    return given.pop() if given else ""


def _call(call: ToolCall, where: str, ignored: list[str]) -> dict[str, Any]:
    _note_unknown(call, where, ignored)
    _note_unknown(call.function, f"{where}.function", ignored)
    return {"id": call.id, "type": call.type, "function": _function(call.function)}


def _function(function: FunctionCall) -> dict[str, Any]:
    """Arguments as the object that templates write as JSON; as they stand if the model's JSON was no object."""
    try:
        arguments = pydantic_core.from_json(function.arguments) if function.arguments.strip() else {}
    except ValueError:
        arguments = None
    return {"name": function.name, "arguments": arguments if isinstance(arguments, dict) else function.arguments}


def _named(message: ChatMessage) -> Message:
    return {} if message.name is None else {"name": message.name}


def _note_unknown(model: Strict, where: str, ignored: list[str]) -> None:
    ignored += neutral.check(model.model_extra or {}, _NEUTRAL, f"{where}.")


def _wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {what}", "messages")
