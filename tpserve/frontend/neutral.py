"""Request fields that are not built yet, each with the values that ask for nothing.

Clients send many fields with their default values; such a field changes nothing and is accepted. Any other
value is refused by the field's name, and so is a field that nobody knows. Null is always neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpserve.frontend.errors import InvalidRequest, shown

Table = Mapping[str, tuple[Any, ...]]

_COMMON: Table = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": ("",),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

COMPLETION: Table = {**_COMMON, "add_special_tokens": (True,), "suffix": ("",)}

CHAT: Table = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # tools are refused, so there is nothing to do in parallel
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

MESSAGE: Table = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

STREAM_OPTIONS: Table = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}


def check(fields: Mapping[str, Any], table: Table, where: str = "") -> None:
    """Refuse the first field whose value asks for something. `where` precedes its name in the message."""
    for field, value in fields.items():
        name = shown(field)
        if value is None or any(_same(value, neutral) for neutral in table.get(field, ())):
            continue
        param = where.partition("[")[0].partition(".")[0] or name
        if field in table:
            raise InvalidRequest(f"{where}{name} is not supported yet", param)
        raise InvalidRequest(f"{where}{name}: unknown field", param)


def _same(value: Any, neutral: Any) -> bool:
    """Equal, but true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
