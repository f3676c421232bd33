"""Open requests: everything that is known of them, enough to continue each one on any engine.

A `Generation` is one HTTP request, or one prompt of an `LLM`. Each of its prompts is a `Record`, which the engine
knows by a number, and each answer to a prompt is a `Choice`. Ids become text as they arrive, so a stop string ends a
choice in time although its client reads slowly; a client that does not read at all costs its text and no queue.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tpserve.deployment import Deployment
from tpserve.frontend.errors import ApiError
from tpserve.frontend.schema import GenerateRequest
from tpserve.frontend.text.detokenize import AnswerText
from tpserve.frontend.text.echo import Echo
from tpserve.frontend.text.logprobs import Score, Token, split
from tpserve.frontend.text.stops import StopPattern
from tpserve.messages import Finish, Sampling, Scores, Submit
from tpserve.tokenizer import Tokenizer

_REASONS = {Finish.NONE: None, Finish.STOP: "stop", Finish.LENGTH: "length", Finish.COMPLETE: "stop"}


@dataclass(frozen=True, slots=True)
class News:
    """What is new of a choice: text, its tokens if logprobs are wanted, and how it ended, if it has."""

    text: str
    tokens: list[Token]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True, eq=False)
class Choice:
    """One answer to one prompt. `index` is its place in the HTTP answer, `number` its number in the Submit."""

    index: int
    number: int
    text: AnswerText
    stop_token_ids: frozenset[int]  # those that the client named
    keeps_ids: bool  # not where no ids are wanted, so that the one that was asked for is only the end
    ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)  # of `ids`, if logprobs are wanted, until they are taken
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finish_reason: str | None = None
    first_at: float = 0.0  # monotonic seconds of the first and the last id
    last_at: float = 0.0
    _characters: int = 0  # of the text, with what a stop string may still cut

    @property
    def shown_reason(self) -> str | None:
        """`finish_reason` as clients see it: an answer that was cut did not come to an end."""
        return self.finish_reason if self.finish_reason in _REASONS.values() else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id that the client named and that has ended the answer."""
        if self.text.stop_string is not None:
            return self.text.stop_string
        named = self.shown_reason == "stop" and self.ids and self.ids[-1] in self.stop_token_ids
        return self.ids[-1] if named else None

    def add(self, id_: int, finish: Finish, now: float, score: Score | None) -> None:
        """Take the next id, with the engine's reason to end after it. A stop string that it completes ends too."""
        self.first_at = self.first_at or now
        self.last_at = now
        if not self.keeps_ids:
            self.finish_reason = "length"
            return
        text, data = self.text.add(id_, finish)
        self.ids.append(id_)
        if score is not None:
            self.tokens.append(Token(self._characters, text, data, score))
        self._characters += len(text)
        self.finish_reason = "stop" if self.text.is_stopped else _REASONS[finish]

    def take(self) -> News:
        """What came since the last call. A token comes with the first of its characters."""
        is_whole = self.shown_reason is not None and not self.text.is_stopped
        shown = itertools.takewhile(lambda token: is_whole or token.offset < self.text.released, self.tokens)
        tokens = list(shown)
        self.tokens = self.tokens[len(tokens) :]
        return News(self.text.take(), tokens, self.shown_reason, self.stop_reason)


class Generation:
    """A request while it is open: its records, and the bell that wakes its handler."""

    def __init__(
        self,
        request: GenerateRequest,
        prompts: Sequence[np.ndarray],
        arrived: float,
        priority: int = 0,
        max_wait_s: float = 0.0,
        echoes: Sequence[Echo] = (),
    ):
        self.priority = priority
        self.max_wait_s = max_wait_s  # in the queue; 0 is no limit
        self.request = request
        self.prompts = prompts  # int32
        self.echoes = echoes  # of the prompts, if they are to be echoed
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
    prompt_scores: list[Scores] = field(default_factory=list)  # of the prompt's ids from its second

    def scores(self) -> Iterator[Score | None]:
        """Of each id of the prompt, if they are wanted; None for the first, which nothing precedes."""
        return itertools.chain([None], *map(split, self.prompt_scores))

    def submit(self) -> Submit:
        """The message that has the engine go on with the open choices from where they are."""
        choices = [choice for choice in self.choices if choice.finish_reason is None]
        request = self.generation.request
        has_scores = sum(len(scores.counts) for scores in self.prompt_scores) == len(self.prompt) - 1
        if not has_scores:
            self.prompt_scores.clear()  # they come again from the first on
        return Submit(
            request=self.number,
            group=self.generation.records[0].number,
            prompt=self.prompt,
            choices=np.array([choice.number for choice in choices], "<u2"),
            generated=[np.array(choice.ids, "<i4") for choice in choices],
            max_tokens=self.max_tokens,
            min_tokens=min(request.min_tokens, self.max_tokens),
            stop_ids=self.stop_ids,
            sampling=self.sampling,
            bias_ids=np.array([*request.logit_bias], "<i4"),
            bias_values=np.array([*request.logit_bias.values()], "<f4"),
            logprobs=-1 if request.logprobs is None or request.max_tokens == 0 else request.logprobs,
            prompt_logprobs=-1 if has_scores else request.prompt_likeliest,
            grammar=request.grammar,
            priority=self.generation.priority,
            max_wait_s=self.generation.max_wait_s,
            cache_salt=request.cache_salt,
        )


def new_record(generation: Generation, place: int, number: int, tokenizer: Tokenizer, deployment: Deployment) -> Record:
    """The record of the generation's prompt `place`. Choices are indexed prompt by prompt."""
    request, prompt = generation.request, generation.prompts[place]
    room = deployment.max_model_len - len(prompt)
    asked = room if request.max_tokens is None else min(room, request.max_tokens)
    stop_ids = {*(() if request.ignore_eos else deployment.stop_ids), *request.stop_token_ids}
    return Record(
        number=number,
        generation=generation,
        prompt=prompt,
        max_tokens=max(1, asked),  # a prompt is worked through for the id after it
        # Equal prompts without a seed are asked for different answers.
        sampling=request.sampling if request.has_seed else replace(request.sampling, seed=secrets.randbits(64)),
        stop_ids=np.array(sorted(stop_ids), "<i4"),
        choices=[_new_choice(generation, place * request.n + i, i, tokenizer) for i in range(request.n)],
        open_choices=request.n,
    )


def _new_choice(generation: Generation, index: int, number: int, tokenizer: Tokenizer) -> Choice:
    request = generation.request
    hidden_ids = tokenizer.special_ids - request.shown_ids if request.skip_special_tokens else frozenset()
    text = AnswerText(tokenizer, generation.patterns, hidden_ids, request.min_tokens, request.include_stop)
    return Choice(index, number, text, frozenset(request.stop_token_ids), request.max_tokens != 0)
