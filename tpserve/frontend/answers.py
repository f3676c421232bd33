"""The shapes of OpenAI's answers: whole, and in chunks of a stream."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_json  # several times as fast as the standard library's, which many logprobs need

from tpserve.frontend.chat.answer.message import Delta, MessageParser, merged
from tpserve.frontend.records import Choice, Generation, News, Record
from tpserve.frontend.text import logprobs
from tpserve.frontend.text.logprobs import Token
from tpserve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Answer:
    """What all chunks of a generation's answer, or the whole one, have in common; and how a choice looks in each."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, generation: Generation, tokenizer: Tokenizer):
        self._model = model
        self._generation = generation
        self._request = generation.request
        self._tokenizer = tokenizer
        self._id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def choice(self, choice: Choice, news: News) -> dict[str, Any]:
        """A finished choice in a whole answer."""
        raise NotImplementedError

    def deltas(self, choice: Choice, news: News) -> list[dict[str, Any]]:
        """What is new of a choice, as the choices of chunks; none when there is nothing to show."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self.choice(choice, choice.take()) for choice in self._generation.choices()]
        return {**self._head(self.whole_object), "choices": choices, "usage": usage(self._generation.records)}

    def events(self, news: Iterable[tuple[Choice, News]]) -> bytes:
        """Server-sent events for what is new of choices; may be empty."""
        running = usage(self._generation.records) if self._request.continuous_usage else None
        deltas = itertools.chain.from_iterable(itertools.starmap(self.deltas, news))
        return b"".join(self._chunk([delta], running) for delta in deltas)

    def last_events(self) -> bytes:
        """What follows the choices: usage, if it was asked for, and the mark of the end."""
        return (self._chunk([], usage(self._generation.records)) if self._request.include_usage else b"") + DONE

    def _record(self, choice: Choice) -> Record:
        return self._generation.records[choice.index // self._request.n]

    def _prompt_logprobs(self, record: Record) -> dict[str, Any]:
        """Those that were asked for by name, as vLLM has them."""
        count = self._request.prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": logprobs.prompt_logprobs(record.scores(), count, self._tokenizer)}

    def _chunk(self, choices: list[dict[str, Any]], usage_: dict[str, Any] | None) -> bytes:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = usage_
        return event(chunk)

    def _head(self, object_: str) -> dict[str, Any]:
        return {"id": self._id, "object": object_, "created": self._created, "model": self._model}


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, model: str, generation: Generation, tokenizer: Tokenizer):
        super().__init__(model, generation, tokenizer)
        self._begun: set[int] = set()  # choices whose prompt was echoed

    def choice(self, choice: Choice, news: News) -> dict[str, Any]:
        """A finished choice in a whole answer."""
        return {**self._shown(choice, news), **self._prompt_logprobs(self._record(choice))}

    def deltas(self, choice: Choice, news: News) -> list[dict[str, Any]]:
        """One chunk, when there is text or an end."""
        delta = self._shown(choice, news)
        return [delta] if delta["text"] or news.tokens or news.finish_reason else []

    def _shown(self, choice: Choice, news: News) -> dict[str, Any]:
        text, tokens = self._with_echo(choice, news) if self._request.echo else (news.text, news.tokens)
        count = self._request.logprobs
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None if count is None else logprobs.completion_logprobs(tokens, count, self._tokenizer),
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }

    def _with_echo(self, choice: Choice, news: News) -> tuple[str, list[Token]]:
        """The text and its tokens; before the first of them the prompt's."""
        echo = self._generation.echoes[choice.index // self._request.n]
        tokens = [replace(token, offset=len(echo.text) + token.offset) for token in news.tokens]
        if choice.index in self._begun:
            return news.text, tokens
        self._begun.add(choice.index)
        return echo.text + news.text, [*_prompt_tokens(echo.parts, self._record(choice)), *tokens]


def _prompt_tokens(parts: Sequence[str], record: Record) -> Iterator[Token]:
    offset = 0
    for part, score in zip(parts, record.scores()):
        yield Token(offset, part, part.encode(), score)
        offset += len(part)


@dataclass(slots=True, eq=False)
class _Message:
    """A chat's choice on its way to the client."""

    parser: MessageParser
    is_begun: bool = False  # its role was sent
    tokens: list[Token] = field(default_factory=list)  # whose logprobs wait for a chunk


class ChatAnswer(Answer):
    """Of /v1/chat/completions. `new_parser` makes what takes one choice's text apart."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, generation: Generation, tokenizer: Tokenizer, new_parser: Callable[[], MessageParser]):
        super().__init__(model, generation, tokenizer)
        self._messages = [_Message(new_parser()) for _ in range(self._request.n)]

    def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        (record,) = self._generation.records
        return {**super().whole(), **self._prompt_logprobs(record)}

    def choice(self, choice: Choice, news: News) -> dict[str, Any]:
        """A finished choice in a whole answer."""
        parser = self._messages[choice.index].parser
        message = {**merged([*parser.feed(news.text), *parser.end()]), "refusal": None}
        return self._shown(choice, "message", message, news.tokens, news)

    def deltas(self, choice: Choice, news: News) -> list[dict[str, Any]]:
        """The role before anything else; then chunks when there are parts of the message, or an end."""
        message = self._messages[choice.index]
        chunks = [] if message.is_begun else [self._shown(choice, "delta", {"role": "assistant", "content": ""}, [])]
        message.is_begun = True
        message.tokens += news.tokens
        parts: list[Delta] = message.parser.feed(news.text)
        if news.finish_reason is not None:
            parts = [*parts, *message.parser.end()] or [{}]
        for place, part in enumerate(parts, 1):
            last = news if place == len(parts) else None
            chunks.append(self._shown(choice, "delta", part, message.tokens, last))
            message.tokens = []
        return chunks

    def _shown(
        self, choice: Choice, name: str, content: Delta, tokens: Sequence[Token], last: News | None = None
    ) -> dict[str, Any]:
        """A message or a delta of one; `last` is the news that it is the last part of, if it is."""
        count = self._request.logprobs if tokens or name == "message" else None
        reason = last and self._messages[choice.index].parser.finish_reason(last.finish_reason)
        return {
            "index": choice.index,
            name: content,
            "logprobs": None if count is None else logprobs.chat_logprobs(tokens, count, self._tokenizer),
            "finish_reason": reason,
            "stop_reason": last and last.stop_reason,
        }


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
_LINE_ENDS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event of one data line."""
    line = to_json(data)
    for char, escaped in _LINE_ENDS:
        line = line.replace(char, escaped)
    return b"data: " + line + b"\n\n"


def model_list(names: Sequence[str], created: int, max_model_len: int, vocab_size: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    entry = {"object": "model", "created": created, "owned_by": "tpserve"}
    sizes = {"max_model_len": max_model_len, "vocab_size": vocab_size}
    return {"object": "list", "data": [{"id": name, **entry, **sizes} for name in names]}
