"""How models write calls of tools: the text around each one, and what it calls the arguments."""

from __future__ import annotations

from dataclasses import dataclass

PYTHON_TAG = "<|python_tag|>"  # Llama 3's mark that what follows is not for the user's eyes


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is {"name": NAME, ARGUMENTS: {...}}, on a line of its own between the marks if the form has marks.

    `between` stands between calls, `first` and `last` around all of them. Without marks an answer is either calls or
    content; with them content may stand around calls.
    """

    name: str
    arguments: str
    between: str
    opening: str = ""  # mark
    closing: str = ""  # mark
    first: str = ""
    last: str = ""


HERMES = CallForm("hermes", arguments="arguments", between="\n", opening="<tool_call>", closing="</tool_call>")
LLAMA3_JSON = CallForm("llama3_json", arguments="parameters", between="; ")
# For a model of which no form is known, but that must call.
PLAIN = CallForm("plain", arguments="arguments", between=", ", first="[", last="]")

FORMS = {form.name: form for form in (HERMES, LLAMA3_JSON)}


def recognized(template: str) -> CallForm | None:
    """The form that a chat template's text tells the model to use."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "</tool_call>" in template and "<function=" not in template:  # not Qwen3 Coder's XML
        return HERMES
    if '"parameters"' in template and ('"name"' in template or PYTHON_TAG in template):
        return LLAMA3_JSON
    return None
