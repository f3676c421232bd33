"""The model's chat template: messages to the text of a prompt.

Templates are code from a model folder: they run in Jinja's immutable sandbox, with the names that Hugging
Face gives them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from tpserve.checkpoint import folder as model_folder
from tpserve.settings import UserError


class TemplateRefusal(Exception):
    """The template could not render these messages; the text is one line that says why."""


class ChatTemplate:
    """A compiled chat template with the special tokens that it may name."""

    def __init__(self, source: str, tokens: dict[str, str]):
        self._tokens = tokens
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # Jinja makes Python of it
            raise UserError(f"the chat template is not valid Jinja: {str(error) or type(error).__name__}") from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt's text, ending where the assistant's answer begins. Raises TemplateRefusal."""
        try:
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except Exception as error:  # whatever the template trips over is in the messages
            cause = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise TemplateRefusal(" ".join(cause.split()) or type(error).__name__) from error


def load(folder: Path, source: str | None = None) -> ChatTemplate | None:
    """The folder's template: chat_template.jinja, else that of tokenizer_config.json, else none.

    Another `source` gets the folder's special tokens.
    """
    tokens = model_folder.special_tokens(folder)
    if source is not None:
        return ChatTemplate(source, tokens)
    config = model_folder.tokenizer_config(folder)
    file = folder / "chat_template.jinja"
    try:
        source = model_folder.read_text(file) if file.exists() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
    except (OSError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: the chat template cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(source, str | None):
        raise UserError(f"{folder}/tokenizer_config.json: chat_template must be a string")
    return None if source is None else ChatTemplate(source, tokens)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # nothing is computed before it is needed, such as "a" * 10**9
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
