"""Open requests: everything that is known of them, enough to continue each one on any engine.

A `Generation` is one HTTP request, or one prompt of an `LLM`. Each of its prompts is a `Record`, which the engine
knows by a number, and each answer to a prompt is a `Choice`. Ids become text as they arrive, so a stop string ends a
choice in time although its client reads slowly; a client that does not read at all costs its text and no queue.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tpserve.deployment import Deployment
from tpserve.frontend.detokenize import AnswerText
from tpserve.frontend.errors import ApiError
from tpserve.frontend.schema import GenerateRequest
from tpserve.frontend.stops import StopPattern
from tpserve.frontend.tokenizer import Tokenizer
from tpserve.messages import Finish, Sampling, Submit

_REASONS = {Finish.NONE: None, Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(slots=True, eq=False)
class Choice:
    """One answer to one prompt. `index` is its place in the HTTP answer, `number` its number in the Submit."""

    index: int
    number: int
    text: AnswerText
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finish_reason: str | None = None
    first_at: float = 0.0  # monotonic seconds of the first and the last id
    last_at: float = 0.0

    @property
    def shown_reason(self) -> str | None:
        """`finish_reason` as clients see it: an answer that was cut did not come to an end."""
        return self.finish_reason if self.finish_reason in _REASONS.values() else None

    def add(self, id_: int, finish: Finish, now: float) -> None:
        """Take the next id, with the engine's reason to end after it. A stop string that it completes ends too."""
        self.text.add(id_, finish)
        self.ids.append(id_)
        self.first_at = self.first_at or now
        self.last_at = now
        self.finish_reason = "stop" if self.text.is_stopped else _REASONS[finish]


class Generation:
    """A request while it is open: its records, and the bell that wakes its handler."""

    def __init__(self, request: GenerateRequest, prompts: Sequence[np.ndarray], arrived: float):
        self.request = request
        self.prompts = prompts  # int32
        self.patterns = [StopPattern(stop) for stop in request.stop]
        self.arrived = arrived  # monotonic seconds
        self.records: list[Record] = []
        self.error: ApiError | None = None
        self.hung_up = False
        self.open_choices = len(prompts) * request.n
        self._bell = asyncio.Event()
        self._changed: dict[int, Choice] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.hung_up or self.error is not None or not self.open_choices

    def choices(self) -> Iterator[Choice]:
        """All of them, in the order of their indices."""
        return (choice for record in self.records for choice in record.choices)

    def notice(self, choice: Choice) -> None:
        """Wake the handler: this choice has something new. Many calls before it runs are one wake-up."""
        self._changed[choice.index] = choice
        self._bell.set()

    def fail(self, error: ApiError) -> None:
        """End with an error; the first one counts."""
        self.error = self.error or error
        self._bell.set()

    def hang_up(self) -> None:
        """End without an answer: the client is gone."""
        self.hung_up = True
        self._bell.set()

    async def changes(self) -> list[Choice]:
        """Wait for news; the choices that have some. None have when it ends otherwise than by its choices."""
        await self._bell.wait()
        self._bell.clear()
        changed, self._changed = list(self._changed.values()), {}
        return changed


@dataclass(slots=True, eq=False)
class Record:
    """One prompt and its choices, as the engine is asked for them, and can be asked again after it was replaced."""

    number: int  # of the Submit, never used twice
    generation: Generation
    prompt: np.ndarray  # int32
    max_tokens: int
    stop_ids: np.ndarray  # int32
    sampling: Sampling
    choices: list[Choice]
    open_choices: int
    is_started: bool = False  # an id has come, so the prompt has been worked through

    def submit(self) -> Submit:
        """The message that has the engine go on with the open choices from where they are."""
        choices = [choice for choice in self.choices if choice.finish_reason is None]
        return Submit(
            request=self.number,
            prompt=self.prompt,
            choices=np.array([choice.number for choice in choices], "<u2"),
            generated=[np.array(choice.ids, "<i4") for choice in choices],
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            sampling=self.sampling,
        )


def new_record(generation: Generation, place: int, number: int, tokenizer: Tokenizer, deployment: Deployment) -> Record:
    """The record of the generation's prompt `place`. Choices are indexed prompt by prompt."""
    request, prompt = generation.request, generation.prompts[place]
    hidden_ids = tokenizer.special_ids if request.skip_special_tokens else frozenset()
    room = deployment.max_model_len - len(prompt)
    return Record(
        number=number,
        generation=generation,
        prompt=prompt,
        max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
        # Equal prompts without a seed are asked for different answers.
        sampling=request.sampling if request.has_seed else replace(request.sampling, seed=secrets.randbits(64)),
        stop_ids=np.array(() if request.ignore_eos else deployment.stop_ids, "<i4"),
        choices=[
            Choice(place * request.n + i, i, AnswerText(tokenizer, generation.patterns, hidden_ids)) for i in range(request.n)
        ],
        open_choices=request.n,
    )
