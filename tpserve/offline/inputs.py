"""Prompts in all the forms that a user may give them, each as the fields of an HTTP body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpserve.offline.params import SamplingParams
from tpserve.offline.plain import plain

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, ids (an array or tensor, too), or a dict of either
Conversation = Sequence[Mapping[str, Any]]

_MESSAGE = '{"role": "user", "content": "Hi!"}'


def prompts(given: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """One prompt or several as a list of texts and ids. Raises ValueError with the place of one that is neither."""
    given = plain(given)
    if not _holds_several(given):
        return [_prompt(given, 0)]
    several = plain([*given])
    if several and all(type(one) is int for one in several):
        several = [several]  # the ids of one prompt
    return [_prompt(one, place) for place, one in enumerate(several)]


def _holds_several(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))


def _prompt(given: Any, place: int) -> str | list[int]:
    if isinstance(given, Mapping):
        fields = {name: value for name, value in given.items() if value is not None}
        text, given = fields.pop("prompt", None), fields.pop("prompt_token_ids", None)
        given = text if given is None else given
        if fields:
            raise ValueError(f"prompts[{place}]: {next(iter(fields))!r} is not supported")
    if isinstance(given, str):
        return given
    ids = plain(given)
    if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
        raise ValueError(
            f"prompts[{place}]: must be a string, a list of token ids, or a dict with one of these as"
            " 'prompt' or 'prompt_token_ids'"
        )
    return ids


def conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One message, one conversation or several, as a list of conversations.

    Raises ValueError with the place of one that is none.
    """
    several: list[Any] = [*given] if _holds_several(given) else [given]
    if several and isinstance(several[0], Mapping):
        several = [several]  # the messages of one conversation
    for place, one in enumerate(several):
        if not _holds_several(one):
            raise ValueError(f"messages[{place}]: must be a list of messages, each such as {_MESSAGE}")
    return several


def params(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """For each of `count` prompts its own. Raises ValueError when they are not as many."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if isinstance(given, (str, Mapping)):
        raise TypeError(f"sampling_params: must be SamplingParams, not {type(given).__name__}")
    if len(given) != count:
        raise ValueError(f"{count} prompts, but {len(given)} SamplingParams: give one for all, or one for each")
    for one in given:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params: must be SamplingParams, not {type(one).__name__}")
    return list(given)
