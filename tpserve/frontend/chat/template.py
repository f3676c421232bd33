"""The model's chat template: messages to the text of a prompt.

Templates are code from a model folder: they run in a sandbox, with the names that Hugging Face gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from tpserve.checkpoint import folder as model_folder
from tpserve.frontend.chat import sandbox
from tpserve.settings import UserError


class TemplateRefusal(Exception):
    """The template could not render these messages; the text is one line that says why."""


class ChatTemplate:
    """A compiled chat template with the special tokens that it may name. Some models have another one for chats with tools."""

    def __init__(self, source: str, tokens: dict[str, str], source_with_tools: str | None = None):
        self.source = source if source_with_tools is None else source_with_tools  # that tells of tools
        self._tokens = tokens
        self._template = _compiled(source)
        self._with_tools = self._template if source_with_tools is None else _compiled(source_with_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        names: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, ending where the assistant's answer begins if `names` say nothing else.

        `names` are what else the template may look for. Raises TemplateRefusal.
        """
        template = self._with_tools if tools else self._template
        given = {"tools": tools and [*tools], "documents": None, "add_generation_prompt": True, **(names or {})}
        try:
            return sandbox.render(template, {**given, "messages": self._adapted(messages), **self._tokens})
        except Exception as error:  # whatever the template trips over is in what it was given
            cause = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise TemplateRefusal(" ".join(cause.split()) or type(error).__name__) from error

    def _adapted(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """OpenAI's developer is what others call system; few templates have heard of it."""
        if "developer" in self.source:
            return [*messages]
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def load(folder: Path, source: str | None = None) -> ChatTemplate | None:
    """The folder's template: chat_template.jinja, else that of tokenizer_config.json, else none.

    Another `source` gets the folder's special tokens.
    """
    tokens = model_folder.special_tokens(folder)
    if source is not None:
        return ChatTemplate(source, tokens)
    config = model_folder.tokenizer_config(folder)
    file, with_tools = folder / "chat_template.jinja", None
    try:
        source = model_folder.read_text(file) if file.exists() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in source}
            source, with_tools = named.get("default"), named.get("tool_use")
    except (OSError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: the chat template cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(source, str | None) or not isinstance(with_tools, str | None):
        raise UserError(f"{folder}/tokenizer_config.json: chat_template must be a string")
    return None if source is None else ChatTemplate(source, tokens, with_tools)


def _compiled(source: str) -> jinja2.Template:
    environment = sandbox.Environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.compiled(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # Jinja makes Python of it
        raise UserError(f"the chat template is not valid Jinja: {str(error) or type(error).__name__}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
