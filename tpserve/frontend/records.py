"""Open requests: everything that is known of them, enough to continue each one on any engine.

A `Generation` is one HTTP request. Each of its prompts is a `Record`, which the engine knows by a number, and
each answer to a prompt is a `Choice`. Ids arrive through `Choice.add`, which makes text of them at once: a
stop string ends a choice in time although its client reads slowly. What the client has not read yet waits in
the choice, joined, so a client that does not read at all costs its text and no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpserve.frontend.errors import ApiError
from tpserve.frontend.schema import GenerateRequest
from tpserve.frontend.stops import StopFinder, StopPattern
from tpserve.frontend.text import Detokenizer, Tokenizer
from tpserve.messages import Finish, Submit

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Choice:
    """One answer to one prompt. `index` is its place in the HTTP answer, `number` its number in the Submit."""

    def __init__(self, index: int, number: int, tokenizer: Tokenizer, hidden_ids: frozenset[int], finder: StopFinder):
        self.index = index
        self.number = number
        self.ids: list[int] = []
        self.cached_tokens = 0  # of the prompt, found in the prefix cache
        self.finish_reason: str | None = None
        self.first_at = self.last_at = 0.0  # monotonic seconds of the first and the last id
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._detokenizer = Detokenizer(tokenizer.pieces)
        self._finder = finder
        self._unread: list[str] = []

    def add(self, id_: int, finish: Finish, now: float) -> None:
        """Take the next id; `finish` is the engine's reason to end with it."""
        self.first_at = self.first_at or now
        self.last_at = now
        self.ids.append(id_)
        # The id that ends the sequence is never text of the answer; a hidden id may still complete a stop string.
        hidden = finish is Finish.STOP or id_ in self._hidden_ids
        if not hidden:
            self._show(self._detokenizer.add(id_))
        if finish:
            self._show(self._detokenizer.end())
        if hidden:
            self._show(self._tokenizer.text_of(id_), shown=False)
        if self._finder.found is not None:
            self.finish_reason = "stop"
        elif finish:
            self._unread.append(self._finder.end())
            self.finish_reason = _REASONS[finish]

    def take_text(self) -> str:
        """The text that came since the last call."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _show(self, text: str, shown: bool = True) -> None:
        self._unread.append(self._finder.feed(text, shown))


class Generation:
    """One HTTP request while it is open: its records, and the bell that wakes its handler."""

    def __init__(self, request: GenerateRequest, arrived: float):
        self.request = request
        self.arrived = arrived  # monotonic seconds
        self.records: list[Record] = []
        self.error: ApiError | None = None
        self.hung_up = False
        self._bell = asyncio.Event()
        self._changed: dict[int, Choice] = {}

    @property
    def choices(self) -> list[Choice]:
        """All of them, in the order of their indices."""
        return [choice for record in self.records for choice in record.choices]

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.hung_up or self.error is not None or not any(record.open_choices for record in self.records)

    def notice(self, choice: Choice) -> None:
        """Wake the handler: this choice has something new. Many calls before it runs are one wake-up."""
        self._changed[choice.index] = choice
        self._bell.set()

    def fail(self, error: ApiError) -> None:
        """End with an error; the first one counts."""
        self.error = self.error or error
        self._bell.set()

    def hang_up(self) -> None:
        """The client is gone."""
        self.hung_up = True
        self._bell.set()

    async def changes(self) -> Sequence[Choice]:
        """Wait for news; the choices that have some. May be none, when the generation is over."""
        await self._bell.wait()
        self._bell.clear()
        changed, self._changed = list(self._changed.values()), {}
        return changed


@dataclass(eq=False)
class Record:
    """One prompt and its choices, as the engine is asked for them and asked again after it was replaced."""

    number: int  # of the Submit, never used twice
    generation: Generation
    prompt: np.ndarray  # int32
    max_tokens: int
    stop_ids: np.ndarray  # int32
    choices: list[Choice]

    @property
    def open_choices(self) -> list[Choice]:
        """Those that still get ids."""
        return [choice for choice in self.choices if choice.finish_reason is None]

    def submit(self) -> Submit:
        """The message that has the engine generate the open choices from where they are."""
        choices = self.open_choices
        return Submit(
            request=self.number,
            prompt=self.prompt,
            choices=np.array([choice.number for choice in choices], "<u2"),
            generated=[np.array(choice.ids, "<i4") for choice in choices],
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            sampling=self.generation.request.sampling,
        )


def open_records(
    generation: Generation,
    prompts: Sequence[np.ndarray],
    numbers: Sequence[int],
    tokenizer: Tokenizer,
    max_model_len: int,
    stop_ids: Sequence[int],
) -> None:
    """Fill in the generation's records, one per prompt; choices are numbered prompt by prompt."""
    request = generation.request
    patterns = [StopPattern(stop) for stop in request.stop]
    hidden_ids = tokenizer.special_ids if request.skip_special_tokens else frozenset()
    for place, (prompt, number) in enumerate(zip(prompts, numbers)):
        room = max_model_len - len(prompt)
        choices = [Choice(place * request.n + i, i, tokenizer, hidden_ids, StopFinder(patterns)) for i in range(request.n)]
        generation.records.append(
            Record(
                number=number,
                generation=generation,
                prompt=prompt,
                max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
                stop_ids=np.array(() if request.ignore_eos else stop_ids, "<i4"),
                choices=choices,
            )
        )
