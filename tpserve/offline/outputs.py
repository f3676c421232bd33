"""What `LLM.generate` returns. The fields have the names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass

from tpserve.frontend.records import Choice, Record
from tpserve.frontend.text.logprobs import Score
from tpserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Of one id at one position."""

    logprob: float
    rank: int | None = None  # from 1; None for an id that is not among those asked for
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # the id that stands there first, then the likeliest, best first


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]  # an end-of-sequence id included
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None  # the stop string, or that of the stop_token_ids, which ended it
    cumulative_logprob: float | None = None  # this and the next: if logprobs were asked for
    logprobs: list[Logprobs] | None = None  # of each of `token_ids`
    lora_request: None = None  # not built: programs that keep all fields find it


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None  # its text, of a chat as the template renders it; None if it came as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    finished: bool = True
    prompt_logprobs: list[Logprobs | None] | None = None  # of each id of the prompt, if asked for; None for the first
    lora_request: None = None  # not built, as above
    metrics: None = None


def completion(choice: Choice, logprobs: int | None, tokenizer: Tokenizer) -> CompletionOutput:
    """The output of a choice that has ended."""
    assert choice.finish_reason is not None
    ended = (choice.finish_reason, choice.stop_reason)
    if logprobs is None:
        return CompletionOutput(choice.index, choice.text.take(), choice.ids, *ended)
    scores = [token.score for token in choice.tokens if token.score is not None]
    cumulative = sum(score.logprob for score in scores)
    each = [_logprobs(score, logprobs, tokenizer) for score in scores]
    return CompletionOutput(choice.index, choice.text.take(), choice.ids, *ended, cumulative, each)


def prompt_logprobs(record: Record, count: int | None, tokenizer: Tokenizer) -> list[Logprobs | None] | None:
    """Of a prompt that has been worked through."""
    if count is None:
        return None
    return [None if score is None else _logprobs(score, count, tokenizer) for score in record.scores()]


def _logprobs(score: Score, count: int, tokenizer: Tokenizer) -> Logprobs:
    ranked = score.ranked(count).items()
    return {id_: Logprob(logprob, rank, tokenizer.text_of(id_)) for id_, (logprob, rank) in ranked}
