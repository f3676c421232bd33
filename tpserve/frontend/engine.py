"""The frontend's side of the `requests` socket: what is asked of the engine, and what its answers mean."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time

import numpy as np
import zmq
import zmq.asyncio

from tpserve.codec import MessageError
from tpserve.deployment import Deployment
from tpserve.frontend.errors import ApiError, EngineFault, InvalidRequest, TooManyRequests, Unavailable
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.records import Choice, Generation, Record, new_record
from tpserve.frontend.text.logprobs import Score, split
from tpserve.messages import Abort, Finish, Message, PromptScores, Refusal, Refused, Stats, Submit, Tokens, decode, encode
from tpserve.tokenizer import Tokenizer

logger = logging.getLogger("tpserve")

_NOT_FINITE = "the model's output was not finite numbers"
_TOO_COMPLEX = "the answer was ended: its grammar takes more work than is allowed; ask for a simpler form"


class Engine:
    """The engine as requests see it. Everything happens on the event loop's thread."""

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer, metrics: Metrics):
        self.epoch = 0  # 0: none is up yet
        self.refusal: str | None = "the model is still loading"  # why no request is taken now
        self._deployment = deployment
        self.tokenizer = tokenizer
        self._metrics = metrics
        self._stats = Stats()
        self._wait_s = 0.0  # in the queue, of who left it last
        self._numbers = itertools.count(1)
        self._records: dict[int, Record] = {}  # those with open choices
        self._generations: set[Generation] = set()  # until their clients have the last byte
        self._idle = asyncio.Event()
        self._idle.set()
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing to compute."""
        return not self._records and not self._stats.running + self._stats.waiting

    def check_open(self) -> None:
        """Raises Unavailable while no request is taken."""
        if self.refusal is not None:
            raise Unavailable(self.refusal)

    def connect(self, context: zmq.asyncio.Context, epoch: int, address: str, pages: int) -> None:
        """Take requests from now on, for this epoch's coordinator and its `pages` KV pages."""
        self._socket = context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self.epoch = epoch
        self.refusal = None
        self._on_message(dataclasses.replace(self._stats, pages_total=pages))

    async def receive(self) -> None:
        """Take the coordinator's messages for ever. Raises MessageError for one that is not valid."""
        assert self._socket is not None
        incoming = self._socket
        while True:
            epoch, message = decode(await incoming.recv())
            if epoch == self.epoch:
                self._on_message(message)

    def close(self) -> None:
        """Say nothing more to the coordinator, and take no request any more. Those that are open can still be failed."""
        self.refusal = self.refusal or "the engine is closed"
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # What requests ask for

    def submit(self, generation: Generation) -> None:
        """Begin. The generation counts as open until `finish`. Raises Unavailable."""
        self.check_open()
        self._generations.add(generation)
        self._idle.clear()
        for place in range(len(generation.prompts)):
            record = new_record(generation, place, next(self._numbers), self.tokenizer, self._deployment)
            generation.records.append(record)
            self._records[record.number] = record
            self._send(record.submit())

    def hang_up(self, generation: Generation) -> None:
        """The client is gone: free what its request holds."""
        generation.hang_up()
        self._cut(generation, "abort")

    def finish(self, generation: Generation) -> None:
        """The answer was sent, or will never be."""
        self._cut(generation, "abort")
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()

    # The end of serving

    def stop_taking(self, reason: str) -> None:
        """Refuse new requests; open ones go on."""
        self.refusal = reason

    def fail_all(self, reason: str) -> None:
        """Refuse new requests and end the open ones with an error."""
        self.stop_taking(reason)
        for generation in self._generations:
            self._fail(generation, Unavailable(reason))

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    # What the coordinator says

    def _on_message(self, message: Message) -> None:
        match message:
            case Tokens():
                self._on_tokens(message)
            case PromptScores():
                self._on_prompt_scores(message)
            case Refused():
                self._on_refused(message)
            case Stats():
                self._stats = message
                self._metrics.engine(message)
            case _:
                raise MessageError(f"a {type(message).__name__} is not for the frontend")

    def _on_refused(self, message: Refused) -> None:
        record = self._records.get(message.request)
        if record is not None:
            self._fail(record.generation, self._refused(message))

    def _refused(self, message: Refused) -> ApiError:
        match message.kind:
            case Refusal.QUEUE_FULL:
                return TooManyRequests(message.reason, code="queue_full", retry_after_s=self._wait_s)
            case Refusal.WAITED:
                return Unavailable(message.reason, code="queue_timeout", retry_after_s=self._wait_s)
        return InvalidRequest(message.reason)

    def _on_prompt_scores(self, message: PromptScores) -> None:
        record = self._records.get(message.request)
        if record is None:
            return  # it ended here while the engine was at work on it
        if np.isfinite(message.scores.logprobs).all():
            record.prompt_scores.append(message.scores)
        else:
            self._fail(record.generation, EngineFault(_NOT_FINITE))

    def _on_tokens(self, message: Tokens) -> None:
        now, generated = time.monotonic(), 0
        columns = (message.requests, message.choices, message.ids, message.finishes, message.cached)
        scores = split(message.scores) if len(message.scores.counts) else [None] * len(message.ids)
        for number, place, id_, finish, cached, score in zip(*(column.tolist() for column in columns), scores, strict=True):
            record = self._records.get(number)
            if record is None or record.choices[place].finish_reason is not None:
                continue  # it ended here while the engine was at work on it
            if finish == Finish.ERROR:
                self._fail(record.generation, EngineFault(_NOT_FINITE))
                continue
            if finish == Finish.TOO_COMPLEX:
                self._fail(record.generation, InvalidRequest(_TOO_COMPLEX))
                continue
            generated += record.choices[place].keeps_ids
            self._take(record, record.choices[place], id_, Finish(finish), score, cached, now)
        self._metrics.step(message, generated)
        if len(message.waits):
            self._wait_s = float(message.waits[-1])

    def _take(
        self, record: Record, choice: Choice, id_: int, finish: Finish, score: Score | None, cached: int, now: float
    ) -> None:
        generation = record.generation
        is_first = not choice.first_at
        try:
            choice.add(id_, finish, now, score)
        except Exception:  # this request's text must not end the others
            logger.exception("request %d: its text could not be decoded", record.number)
            self._fail(generation, EngineFault("the answer could not be decoded"))
            return
        if is_first:
            choice.cached_tokens = cached
            self._metrics.first_token(now - generation.arrived)
        if not record.is_started:
            record.is_started = True
            self._metrics.prompt_done(len(record.prompt))
        if choice.finish_reason is not None:
            if finish is Finish.NONE:  # the engine knows nothing of stop strings
                self._send(Abort(record.number, choice.number))
            self._end(record, choice, choice.finish_reason)
        generation.notice(choice)

    def _fail(self, generation: Generation, error: ApiError) -> None:
        generation.fail(error)
        self._cut(generation, "error")

    def _cut(self, generation: Generation, reason: str) -> None:
        """End every choice that is still open, here and in the engine."""
        for record in generation.records:
            if self._records.get(record.number) is record:
                self._send(Abort(record.number, -1))
                for choice in record.choices:
                    if choice.finish_reason is None:
                        self._end(record, choice, reason)

    def _end(self, record: Record, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        record.open_choices -= 1
        record.generation.open_choices -= 1
        if not record.open_choices:
            del self._records[record.number]
        later = len(choice.ids) - 1
        per_token_s = (choice.last_at - choice.first_at) / later if later > 0 else None
        self._metrics.ended(reason, time.monotonic() - record.generation.arrived, per_token_s)

    def _send(self, message: Submit | Abort) -> None:
        if self._socket is not None:  # else there is nobody to tell
            self._socket.send(encode(message, self.epoch))  # without a high-water mark it is queued at once
