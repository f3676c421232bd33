"""The shapes of OpenAI's answers: whole, and in chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tpserve.frontend.records import Choice, Generation, Record

DONE = b"data: [DONE]\n\n"


class Answer:
    """What all chunks of an answer, or the whole one, have in common; and how a choice looks in each."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, include_usage: bool):
        self.model = model
        self.include_usage = include_usage
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice in a whole answer."""
        raise NotImplementedError

    def deltas(self, choice: Choice) -> list[dict[str, Any]]:
        """What is new of a choice, as the choices of chunks; none when there is nothing to show."""
        raise NotImplementedError

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self.choice(choice) for choice in generation.choices()]
        return {**self._head(self.whole_object), "choices": choices, "usage": usage(generation.records)}

    def events(self, choice: Choice) -> bytes:
        """Server-sent events for what is new of a choice; may be empty."""
        return b"".join(self._chunk([delta], None) for delta in self.deltas(choice))

    def last_events(self, generation: Generation) -> bytes:
        """What follows the choices: usage, if it was asked for, and the mark of the end."""
        return (self._chunk([], usage(generation.records)) if self.include_usage else b"") + DONE

    def _chunk(self, choices: list[dict[str, Any]], usage_: dict[str, Any] | None) -> bytes:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self.include_usage:
            chunk["usage"] = usage_
        return event(chunk)

    def _head(self, object_: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_, "created": self.created, "model": self.model}


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice in a whole answer."""
        return {"index": choice.index, "text": choice.text.take(), "logprobs": None, "finish_reason": choice.shown_reason}

    def deltas(self, choice: Choice) -> list[dict[str, Any]]:
        """One chunk, when there is text or an end."""
        delta = self.choice(choice)
        return [delta] if delta["text"] or delta["finish_reason"] else []


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, include_usage: bool):
        super().__init__(model, include_usage)
        self._begun: set[int] = set()  # choices whose role was sent

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice in a whole answer."""
        message = {"role": "assistant", "content": choice.text.take(), "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": choice.shown_reason}

    def deltas(self, choice: Choice) -> list[dict[str, Any]]:
        """The role before anything else; then a chunk when there is text or an end."""
        chunks = [] if choice.index in self._begun else [self._delta(choice, {"role": "assistant", "content": ""}, None)]
        self._begun.add(choice.index)
        text = choice.text.take()
        if text or choice.shown_reason:
            chunks.append(self._delta(choice, {"content": text} if text else {}, choice.shown_reason))
        return chunks

    def _delta(self, choice: Choice, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage(records: Sequence[Record]) -> dict[str, Any]:
    """Tokens of prompts and answers. A prompt counts once, however many choices it has."""
    prompt = sum(len(record.prompt) for record in records)
    completion = sum(len(choice.ids) for record in records for choice in record.choices)
    # Choices of a prompt find each other's pages in the cache; what was there before is what the first found.
    cached = sum(record.choices[0].cached_tokens for record in records)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# Line ends of Unicode that JSON leaves as they are, and at which some clients would cut the line.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event of one data line."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return f"data: {text}\n\n".encode()


def model_list(names: Sequence[str], created: int, max_model_len: int, vocab_size: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    entry = {"object": "model", "created": created, "owned_by": "tpserve"}
    sizes = {"max_model_len": max_model_len, "vocab_size": vocab_size}
    return {"object": "list", "data": [{"id": name, **entry, **sizes} for name in names]}
