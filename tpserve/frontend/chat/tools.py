"""`tools` and `tool_choice` of a request, checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tpserve.frontend.chat.messages import Strict
from tpserve.frontend.errors import InvalidRequest, shown
from tpserve.frontend.structured import check_schema

MAX_TOOLS = 128
MAX_CHARS = 2**20  # of all tools, as JSON


@dataclass(frozen=True, slots=True)
class ChatTools:
    """A request's tools, as OpenAI has them, and which of them are to be called."""

    tools: tuple[Mapping[str, Any], ...]
    choice: Literal["none", "auto", "required"]
    named: str | None = None  # the only one that may be called; the choice is then "required"
    parallel: bool = True  # whether several calls may be made

    @property
    def names(self) -> frozenset[str]:
        """Of their functions."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def may_call(self) -> bool:
        """Whether an answer may have calls at all."""
        return self.choice != "none"

    @property
    def is_auto(self) -> bool:
        """Whether the model chooses between calls and content."""
        return self.choice == "auto"


class Function(Strict):
    """What a tool is called, does and takes; `parameters` is the JSON schema of an object."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One entry of `tools`. Templates are given all of it, so no field of it is without effect."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


def chat_tools(tools: Sequence[Tool] | None, choice: Any, parallel: bool | None, ignored: list[str]) -> ChatTools | None:
    """What a request's fields say; None without tools. Names of fields that nobody knows are added to `ignored`.

    Raises InvalidRequest.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools to choose from; give tools", "tool_choice")
        return None
    as_sent = tuple(tool.model_dump(exclude_unset=True) for tool in tools)
    names = [tool.function.name for tool in tools]
    for place, tool in enumerate(tools):
        _check_parameters(tool.function, f"tools[{place}].function.parameters")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidRequest(f"tools: the name {twice[0]!r} stands there twice", "tools")
    if (size := len(json.dumps(as_sent))) > MAX_CHARS:
        raise InvalidRequest(f"tools: {size} characters as JSON; {MAX_CHARS} is the most", "tools")
    is_parallel = parallel is not False
    if choice in (None, "none", "auto", "required"):
        return ChatTools(as_sent, choice or "auto", None, is_parallel)
    return ChatTools(as_sent, "required", _named(choice, names, ignored), is_parallel)


def _check_parameters(function: Function, where: str) -> None:
    kind = check_schema(function.parameters or {}, where).get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{where}.type: must be 'object', not {shown(repr(kind))}: arguments have names", "tools")


def _named(choice: Any, names: Sequence[str], ignored: list[str]) -> str:
    """The name of the tool chosen."""
    match choice:
        case {"type": "function", "function": {"name": str(name), **of_function}, **others}:
            if name not in names:
                raise InvalidRequest(f"tool_choice: no tool is named {shown(repr(name))}", "tool_choice")
            ignored += [f"tool_choice.{field}" for field in others]
            ignored += [f"tool_choice.function.{field}" for field in of_function]
            return name
        case {"type": str(kind)} if kind != "function":
            raise InvalidRequest(f"tool_choice: type {shown(repr(kind))} is not supported; function is", "tool_choice")
    named = '{"type": "function", "function": {"name": ...}}'
    raise InvalidRequest(f"tool_choice: must be none, auto, required or {named}", "tool_choice")
