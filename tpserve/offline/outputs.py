"""What `LLM.generate` returns. The fields have the names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass

from tpserve.frontend.records import Choice


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]  # an end-of-sequence id included
    finish_reason: str  # "stop" or "length"
    stop_reason: str | None  # the stop string that ended it
    # What vLLM has besides, and is not built: programs that keep all fields find them.
    cumulative_logprob: None = None
    logprobs: None = None
    lora_request: None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None  # its text, of a chat as the template renders it; None if it came as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    finished: bool = True
    prompt_logprobs: None = None  # not built, as above
    lora_request: None = None
    metrics: None = None


def completion(choice: Choice) -> CompletionOutput:
    """The output of a choice that has ended."""
    assert choice.finish_reason is not None
    return CompletionOutput(choice.index, choice.text.take(), choice.ids, choice.finish_reason, choice.text.stop_string)
