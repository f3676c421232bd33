"""One prompt on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from tpserve.frontend.errors import ApiError
from tpserve.frontend.records import Choice, Generation
from tpserve.frontend.schema import GenerateRequest
from tpserve.offline.outputs import RequestOutput, completion, prompt_logprobs
from tpserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """A checked prompt: what is asked, its text if it has one, and its ids (int32)."""

    request: GenerateRequest
    text: str | None
    ids: np.ndarray


class Job(Generation):
    """Put into `ended` once, when it is over; nobody is woken before. `place` is that of its prompt among the others."""

    def __init__(self, question: Question, place: int, ended: SimpleQueue[Job]):
        super().__init__(question.request, [question.ids], time.monotonic())
        self.place = place
        self._text = question.text
        self._ended = ended

    def notice(self, choice: Choice) -> None:
        """A choice has something new."""
        if self.is_over:
            self._ended.put(self)

    def fail(self, error: ApiError) -> None:
        """End with an error, unless it is over."""
        if not self.is_over:
            self.error = error
            self._ended.put(self)

    def output(self, number: int, tokenizer: Tokenizer) -> RequestOutput:
        """What has come out, once it is over without an error."""
        (record,), request = self.records, self.request
        return RequestOutput(
            request_id=str(number),
            prompt=self._text,
            prompt_token_ids=record.prompt.tolist(),
            outputs=[completion(choice, request.logprobs, tokenizer) for choice in record.choices],
            num_cached_tokens=record.choices[0].cached_tokens,
            prompt_logprobs=prompt_logprobs(record, request.prompt_logprobs, tokenizer),
        )
