"""The coordinator as a process: its sockets, and the loop that drives the scheduler."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import zmq

from tpserve.child import Charge, Control
from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.flight import ProtocolError
from tpserve.coordinator.grammar import Grammars, Pending
from tpserve.coordinator.scheduler import Scheduler
from tpserve.coordinator.sequence import Matcher
from tpserve.deployment import Deployment
from tpserve.messages import (
    Abort,
    Hello,
    Message,
    Ready,
    Refusal,
    Refused,
    SampleMasks,
    Serve,
    StepPlan,
    StepResult,
    Submit,
    decode,
    encode,
)
from tpserve.settings import UserError

BEAT_MS = 250  # the longest wait without a sign of life, and without a look at who waits for too long
STATS_S = 0.1  # between two Stats while busy

_SECRET_BYTES = 32
_T = TypeVar("_T")


class Coordinator:
    """Plans steps for the workers and passes their ids to the frontend, from `Serve` until it is killed."""

    def __init__(self, charge: Charge, control: Control, context: zmq.Context[zmq.Socket[bytes]]):
        self.step = 0  # the last one planned
        self._charge = charge
        self._control = control
        self._context = context
        self._beats = charge.beats()
        self._grammars = Grammars(charge.deployment)
        self._ranks = [str(rank).encode() for rank in range(charge.deployment.settings.tp)]
        self._plan_bytes = self._all_reduces = self._all_gathers = self._drafted = self._accepted = 0
        self._was_idle = True
        self._next_stats_s = 0.0

    def serve(self) -> None:
        """Never returns. Raises ProtocolError, MessageError or UserError when it cannot go on."""
        self._open(self._await_pages())
        self._await_workers()
        self._control.send(Ready("coordinator", 0))
        while True:
            self._turn()

    # The start

    def _await_pages(self) -> int:
        while (message := self._control.receive(BEAT_MS)) is None:
            self._beats.beat()
        if not isinstance(message, Serve):
            raise _unexpected(message, "the launcher, before Serve")
        return message.pages

    def _open(self, num_pages: int) -> None:
        deployment = self._charge.deployment
        self._scheduler = Scheduler(capacity(deployment, num_pages), os.urandom(_SECRET_BYTES), deployment.spec.vocab_size)
        self._plans = self._socket(zmq.ROUTER)
        self._plans.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a plan for an absent rank is dropped silently
        self._plans.bind(self._charge.address("plans"))
        self._requests = self._socket(zmq.PAIR)
        self._requests.bind(self._charge.address("requests"))
        self._poller = zmq.Poller()
        for socket in (self._plans, self._requests, self._control.socket):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._grammars.fileno(), zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)  # no limit: at a limit messages would be dropped, or the loop would stand
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _await_workers(self) -> None:
        missing = set(range(len(self._ranks)))
        while missing:
            self._beats.beat()
            if not self._plans.poll(BEAT_MS):
                continue
            rank, message = self._from_worker(self._plans.recv_multipart())
            if message is None:
                continue
            if not isinstance(message, Hello) or message.rank != rank or rank not in missing:
                raise _unexpected(message, f"rank {rank}, before its hello or after it")
            missing.remove(rank)

    # The loop

    def _turn(self) -> None:
        """Wait for messages, take in all that are there, and plan what can be planned."""
        ready = dict(self._poller.poll(BEAT_MS))
        self._beats.beat()
        if self._control.socket in ready:
            raise _unexpected(self._control.receive(0), "the launcher, after Serve")
        if self._requests in ready:
            for data in _drain(self._requests.recv):
                self._take_request(self._decode(data))
        if self._plans in ready:
            for frames in _drain(self._plans.recv_multipart):
                self._take_result(*self._from_worker(frames))
        if self._grammars.fileno() in ready:
            for pending in self._grammars.take():
                self._take_compiled(pending)
        self._scheduler.expire(time.monotonic())
        self._plan_steps()
        for refused in self._scheduler.take_refused():
            self._to_frontend(refused)
        self._send_stats()

    def _take_request(self, message: Message | None) -> None:
        if message is None:
            return
        if isinstance(message, Submit) and message.grammar:
            self._answer_refused(self._grammars.add(message, time.monotonic()))
        elif isinstance(message, Submit):
            self._submit(message, time.monotonic())
        elif not isinstance(message, Abort):
            raise _unexpected(message, "the frontend")
        elif not self._grammars.abort(message):
            self._scheduler.abort(message.request, message.choice)

    def _take_compiled(self, pending: Pending) -> None:
        submit = pending.submit
        if pending.reason:
            self._to_frontend(Refused(submit.request, Refusal.NEVER, pending.reason))
            return
        self._submit(submit, pending.arrived_s, pending.matchers)
        for choice in pending.aborted:
            self._scheduler.abort(submit.request, choice)

    def _submit(self, submit: Submit, arrived_s: float, matchers: Iterable[Matcher] = ()) -> None:
        self._answer_refused(self._scheduler.submit(submit, arrived_s, matchers))

    def _answer_refused(self, refused: Refused | None) -> None:
        if refused is not None:
            self._to_frontend(refused)

    def _take_result(self, rank: int, message: Message | None) -> None:
        if message is None:
            return
        if not isinstance(message, StepResult) or rank != 0:
            raise _unexpected(message, f"rank {rank}, while serving")
        self._all_reduces += message.all_reduces
        self._all_gathers += message.all_gathers
        self._drafted += message.drafted
        self._accepted += int(message.id_counts.sum()) - len(message.id_counts)
        prompt_scores, tokens = self._scheduler.result(message, time.monotonic())
        for scores in prompt_scores:
            self._to_frontend(scores)
        self._to_frontend(tokens)

    def _plan_steps(self) -> None:
        """Plan what can be planned; between two plans come the first one's masks."""
        self._send_masks()
        while (plan := self._scheduler.plan(time.monotonic())) is not None:
            self.step = plan.step
            self._to_workers(plan)
            self._beats.step(plan.step)
            self._send_masks()

    def _send_masks(self) -> None:
        masks = self._scheduler.masks()
        if masks is not None:
            self._to_workers(masks)

    def _to_workers(self, message: StepPlan | SampleMasks) -> None:
        data = encode(message, self._charge.epoch)
        for rank in self._ranks:
            try:
                self._plans.send(rank, zmq.SNDMORE)
                self._plans.send(data)
            except zmq.ZMQError as error:
                raise ProtocolError(f"rank {rank.decode()} is gone before step {message.step}: {error}") from None
        self._plan_bytes += len(data)

    def _send_stats(self) -> None:
        """Every `STATS_S` while there is work, and once when there is none any more."""
        idle, was_idle, now_s = self._scheduler.idle, self._was_idle, time.monotonic()
        self._was_idle = idle
        if was_idle if idle else now_s < self._next_stats_s:
            return
        counts = {
            "drafted": self._drafted, "accepted": self._accepted, "plan_bytes": self._plan_bytes,
            "all_reduces": self._all_reduces, "all_gathers": self._all_gathers,
        }  # fmt: skip
        stats = dataclasses.replace(self._scheduler.stats, **counts)
        if idle and stats.pages_used:
            raise RuntimeError(f"no request is open, yet {stats.pages_used} pages are in use")
        self._to_frontend(stats)
        self._next_stats_s = now_s + STATS_S

    # Messages

    def _to_frontend(self, message: Message) -> None:
        try:
            self._requests.send(encode(message, self._charge.epoch), zmq.NOBLOCK)
        except zmq.Again:
            raise ProtocolError("the frontend is not connected") from None

    def _from_worker(self, frames: list[bytes]) -> tuple[int, Message | None]:
        """The sender's rank and its message."""
        if len(frames) != 2 or frames[0] not in self._ranks:
            raise ProtocolError(f"{len(frames)} frames from {frames[0]!r} on plans, which is no rank")
        return int(frames[0]), self._decode(frames[1])

    def _decode(self, data: bytes) -> Message | None:
        """The message, or None if it is of another epoch."""
        epoch, message = decode(data)
        return message if epoch == self._charge.epoch else None


def capacity(deployment: Deployment, num_pages: int) -> Capacity:
    """What the scheduler may use. Raises UserError when the longest request does not fit the pages."""
    settings = deployment.settings
    try:
        return Capacity(
            num_pages=num_pages,
            page_size=deployment.page_size,
            max_model_len=deployment.max_model_len,
            max_num_seqs=deployment.max_num_seqs,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            chunked_prefill=settings.enable_chunked_prefill,
            prefix_caching=settings.enable_prefix_caching,
            by_priority=settings.scheduling_policy == "priority",
            max_queue=settings.max_queue,
            target_itl_s=None if settings.target_itl_ms is None else settings.target_itl_ms / 1000,
            speculative=settings.speculates,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _drain(receive: Callable[[int], _T]) -> Iterator[_T]:
    """All messages that are there now."""
    while True:
        try:
            yield receive(zmq.NOBLOCK)
        except zmq.Again:
            return


def _unexpected(message: object, sender: str) -> ProtocolError:
    return ProtocolError(f"{type(message).__name__} came from {sender}")
