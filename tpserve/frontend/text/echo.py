"""What an HTTP answer repeats of its prompts, which is bounded: each of a prompt's choices has it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpserve.frontend.body import Prompt
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest
from tpserve.frontend.text.detokenize import Detokenizer
from tpserve.tokenizer import Tokenizer

MAX_CHARS = 2**24
MAX_LOGPROBS = 2**18  # of the prompts' ids and the likeliest in their places


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and if its logprobs are wanted the part of each of its ids. Joined, the parts are the text."""

    text: str
    parts: list[str]


def echoes(request: GenerateRequest, prompts: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[Echo]:
    """Of the prompts, whose ids are given; none if none are wanted.

    Raises InvalidRequest if the answer would have too much of the prompts, or too many logprobs of them.
    """
    count = sum(map(len, prompts)) * request.n * (request.prompt_likeliest + 1)
    if count > MAX_LOGPROBS:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        asked = f"the answer would have {count} logprobs of prompts; {MAX_LOGPROBS} is the most"
        raise InvalidRequest(f"{param}: {asked}: ask for fewer, or send fewer prompts", param)
    if not request.echo:
        return []
    made = [_echo(request, prompt, ids, tokenizer) for prompt, ids in zip(request.prompts or (), prompts)]
    count = sum(len(echo.text) for echo in made) * request.n
    if count > MAX_CHARS:
        raise InvalidRequest(f"echo: the answer would begin with {count} characters; {MAX_CHARS} is the most", "echo")
    return made


def _echo(request: GenerateRequest, prompt: Prompt, ids: np.ndarray, tokenizer: Tokenizer) -> Echo:
    """A text as it was sent, and of ids all their text, that of special ones too.

    An id that the tokenizer puts before or after a text (BOS) has no part in it.
    """
    if isinstance(prompt, str):
        wanted = request.logprobs is not None
        return Echo(prompt, _parts(prompt, tokenizer.spans(prompt, request.add_special_tokens)) if wanted else [])
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add(id_) for id_ in ids.tolist()]
    parts[-1] += detokenizer.end()
    return Echo("".join(parts), parts)


def _parts(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """The text cut at the ends of its ids; a character of several ids belongs to the last of them."""
    ends, reached = [], 0
    for (_, end), (next_start, next_end) in zip(spans, [*spans[1:], (len(text), len(text))]):
        overlap = next_start < end and next_end > 0  # the span of ids that were added is (0, 0)
        reached = max(reached, next_start if overlap else end)
        ends.append(reached)
    last = max((place for place, (_, end) in enumerate(spans) if end), default=0)
    ends[last:] = [len(text)] * (len(spans) - last)  # what a normalizer has dropped is in no span
    return [text[start:end] for start, end in zip([0, *ends], ends)]
