"""`tools` and `tool_choice` of a request, checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tpserve.frontend.chat.messages import Strict
from tpserve.frontend.chat.tools import ChatTools
from tpserve.frontend.errors import InvalidRequest, shown
from tpserve.frontend.structured import check_schema

MAX_TOOLS = 128
MAX_CHARS = 2**20  # of all tools, as JSON


class Function(Strict):
    """What a tool is called, does and takes; `parameters` is the JSON schema of an object."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


def chat_tools(tools: Sequence[Tool] | None, choice: Any, parallel: bool | None) -> ChatTools | None:
    """What a request's fields say; None without tools. Raises InvalidRequest."""
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
    chosen, is_named = _choice(choice, names)
    return ChatTools(as_sent, chosen, is_named, parallel is not False)


def _check_parameters(function: Function, where: str) -> None:
    kind = check_schema(function.parameters or {}, where).get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{where}.type: must be 'object', not {shown(repr(kind))}: arguments have names", "tools")


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, bool]:
    """The choice, or the name of the tool chosen; and whether it is a name."""
    match choice:
        case None:
            return "auto", False
        case "none" | "auto" | "required":
            return choice, False
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise InvalidRequest(f"tool_choice: no tool is named {shown(repr(name))}", "tool_choice")
            return name, True
        case {"type": str(kind)} if kind != "function":
            raise InvalidRequest(f"tool_choice: type {shown(repr(kind))} is not supported; function is", "tool_choice")
    named = '{"type": "function", "function": {"name": ...}}'
    raise InvalidRequest(f"tool_choice: must be none, auto, required or {named}", "tool_choice")
