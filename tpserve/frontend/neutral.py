"""Request fields that are known but not built, each with the values that ask for nothing.

Clients send many fields with their default values; such a field changes nothing and is accepted. Any other value is
refused by the field's name. Null is always neutral. A field that nobody knows changes nothing either: it is for the
caller to refuse, or to name in the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote

from tpserve.frontend.errors import InvalidRequest, shown

Table = Mapping[str, tuple[Any, ...]]

_MOST_LISTED = 20  # fields in a header

# Of OpenAI's API and vLLM's.
_COMMON: Table = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "moderation": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # truncation itself is refused
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
# Of other engines' dialects of it, which would change the answer.
_DIALECTS: Table = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "grammar": ("",),
    "json_schema": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_predict": (),
    "options": ({},),
    "regex": (),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "thinking": (),
    "top_a": (0,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}

COMPLETION: Table = {
    **_COMMON,
    **_DIALECTS,
    "chat_template_kwargs": ({},),
    "parallel_tool_calls": (True, False),  # without tools it asks for nothing
    "prompt_embeds": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}

CHAT: Table = {
    **_COMMON,
    "suffix": ("",),
    **_DIALECTS,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "enable_thinking": (),  # in chat_template_kwargs it is known
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_SUCCESSORS = {"functions": "tools", "function_call": "tool_choice"}

STREAM_OPTIONS: Table = {"include_obfuscation": (False,)}


def check(fields: Mapping[str, Any], table: Table, where: str = "") -> list[str]:
    """The fields that nobody knows, each with `where` before its name. Refuses a known one whose value asks for something."""
    unknown = []
    for field, value in fields.items():
        if field not in table:
            unknown.append(f"{where}{field}")
        elif value is not None and not any(_same(value, neutral) for neutral in table[field]):
            instead = f"; give {_SUCCESSORS[field]}" if field in _SUCCESSORS else ""
            raise InvalidRequest(
                f"{where}{field} is not supported yet{instead}", where.partition("[")[0].partition(".")[0] or field
            )
    return unknown


def _same(value: Any, neutral: Any) -> bool:
    """Equal, but true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def refuse(unknown: str, known: Iterable[str]) -> InvalidRequest:
    """The refusal of a field that nobody knows, with the nearest of those that are known."""
    nearest = get_close_matches(unknown, known, 1, 0.75)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    param = unknown.partition("[")[0].partition(".")[0]
    return InvalidRequest(f"{shown(unknown)}: unknown field{hint}", shown(param))


def header(unknown: Iterable[str]) -> str:
    """The fields as the value of a header: what could break it is percent-encoded, what makes it too long left out."""
    names = [quote(shown(name), safe="[]._-$@") for name in unknown]
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f", and {more} more" if more > 0 else "")
