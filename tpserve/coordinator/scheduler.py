"""The scheduler: which sequences advance in the next step, by how many tokens, in which pages.

Pure: no sockets, clock, torch or randomness, and nothing about ranks. Plans are made ahead: up to `WINDOW`
of them are without a result, so a row's input may be an id that is not known here yet.

One order matters, that of arrival or of priority (`Queue`). Sequences are admitted in it. When pages run out, the
last of those that run gives up its own and is computed again later; so the first always advances.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.draft import Draft
from tpserve.coordinator.flight import Flight, ProtocolError
from tpserve.coordinator.pages import PagePool
from tpserve.coordinator.prefix import Prefixes
from tpserve.coordinator.queue import Queue
from tpserve.coordinator.sequence import Group, Matcher, Request, Sequence
from tpserve.memory import pages_for
from tpserve.messages import (
    Finish,
    PromptScores,
    Refusal,
    Refused,
    SampleMasks,
    Stats,
    StepPlan,
    StepResult,
    Submit,
    Tokens,
)

WINDOW = 2  # plans in flight: the workers have the next one when they end a step

_ALL_CHOICES = -1
_order = attrgetter("order")


class Outcome(NamedTuple):
    """What a result brings for the frontend, in the order in which it is to be told."""

    prompt_scores: list[PromptScores]
    tokens: Tokens


class Scheduler:
    """Owns every open sequence of an epoch. Steps are numbered from 1 without a gap."""

    def __init__(self, capacity: Capacity, secret: bytes, vocab_size: int):
        self._capacity = capacity
        self._mask_words = -(-vocab_size // 32)
        self._pool = PagePool(capacity.num_pages, capacity.page_size, secret)
        self._prefixes = Prefixes(self._pool, capacity.page_size, capacity.prefix_caching)
        self._page_size = capacity.page_size
        self._step = 0
        self._in_flight: deque[Flight] = deque()
        self._arrivals = 0
        self._begun_s: list[float] = []  # arrivals of the choices planned first since `take_waits`
        self._open: dict[int, Request] = {}  # by number
        self._queue = Queue(capacity.by_priority, capacity.max_queue)
        self._refused: list[Refused] = []  # since `take_refused`
        self._running: dict[int, Sequence] = {}  # slot -> sequence, in order of admission
        self._free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))
        self._preemptions = 0
        self._prefix_hit_tokens = 0

    # What comes from the frontend

    def submit(self, submit: Submit, arrived_s: float = 0.0, matchers: Iterable[Matcher] = ()) -> Refused | None:
        """Queue the request's choices, or say why they can never be served. Raises ProtocolError for a malformed one.

        `arrived_s` is the time, by the clock of `expire` and `take_waits`. `matchers` has one for each choice, if the
        request has a grammar.
        """
        choices: list[int] = submit.choices.tolist()
        if submit.request in self._open:
            raise ProtocolError(f"request {submit.request} is already open")
        if not choices or len(set(choices)) < len(choices):
            raise ProtocolError(f"request {submit.request} has choices {choices}")
        reason = self._capacity.refusal(submit)
        if reason:
            return Refused(submit.request, Refusal.NEVER, reason)
        request = self._open[submit.request] = self._queue.open(submit, self._pool.root(submit.cache_salt), arrived_s)
        given = matchers if submit.grammar else [None] * len(choices)
        for choice, generated, matcher in zip(choices, submit.generated, given, strict=True):
            request.choices[choice] = sequence = self._sequence(request, choice, generated, matcher)
            self._queue.add(sequence)
        return None

    def abort(self, request: int, choice: int) -> None:
        """End one choice, or all of the request (choice -1). What is over or unknown is ignored."""
        choices = self._open[request].choices if request in self._open else {}
        wanted = list(choices.values()) if choice == _ALL_CHOICES else [choices[choice]] if choice in choices else []
        for sequence in wanted:
            self._end(sequence)

    def expire(self, now_s: float) -> None:
        """Refuse who has been in the queue for too long."""
        for group in self._queue.late(now_s):
            self._refuse(group, Refusal.WAITED, f"the request waited {group.max_wait_s:g} s in the queue, the longest it may")

    def take_refused(self) -> list[Refused]:
        """The requests that were queued and had to leave, since the last call."""
        refused, self._refused = self._refused, []
        return refused

    # What goes to the workers, and comes back

    def plan(self) -> StepPlan | None:
        """The next step, or None when the window is full or no sequence can advance."""
        if len(self._in_flight) == WINDOW:
            return None
        assert not self._in_flight or not self._in_flight[0].masked, "a step's masks come before the next plan"
        self._make_room()
        draft = Draft(self._step + 1, self._capacity.max_num_batched_tokens)
        self._plan_decodes(draft)
        self._plan_running_chunk(draft)
        self._plan_admissions(draft)
        plan = draft.finish()
        if plan is None:
            return None
        for sequence in draft.chunks:  # only now, so that a page is hit in a later step than it is computed in
            self._prefixes.publish(sequence)
        self._step = plan.step
        self._in_flight.append(Flight(plan.step, draft.sampled, draft.scored, draft.masked))
        return plan

    def take_waits(self, now_s: float) -> list[float]:
        """Seconds in the queue of each choice that was planned for the first time since the last call."""
        waits = [now_s - arrived_s for arrived_s in self._begun_s]
        self._begun_s.clear()
        return waits

    def masks(self) -> SampleMasks | None:
        """The masks of the oldest plan in flight, once; None when it has none. They come before the next plan.

        What they follow from is known: all earlier results are in. Whose choice has ended may sample anything.
        """
        return self._in_flight[0].masks(self._mask_words) if self._in_flight else None

    def result(self, result: StepResult) -> Outcome:
        """Take in what the oldest plan in flight brought. Raises ProtocolError when the result is not that plan's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ProtocolError(f"result of step {result.step} came; in flight are {[plan.step for plan in self._in_flight]}")
        flight = self._in_flight.popleft()
        flight.check(result)
        prompt_scores, token_scores = flight.prompt_scores(result.target_scores), flight.token_scores(result.scores)
        live: list[Sequence] = []
        ids, finishes = array("i"), bytearray()
        size, begun, goes_on = self._page_size, 1 % self._page_size, int(Finish.NONE)
        for sequence, token in zip(flight.sampled, result.ids.tolist(), strict=True):
            if sequence.ended:  # aborted, or this is its ghost row
                continue
            live.append(sequence)
            ids.append(token)
            known = sequence.ids
            known.append(token)
            if len(known) % size == begun:  # the id begins a page: the one before is complete
                self._prefixes.publish(sequence)
            may_end = token in sequence.stop_ids or len(known) == sequence.max_len or token < 0 or sequence.matcher is not None
            finishes.append(self._finish(sequence) if may_end else goes_on)
        tokens = Tokens(
            step=result.step,
            requests=np.array([sequence.request.submit.request for sequence in live], np.uint64),
            choices=np.array([sequence.choice for sequence in live], np.uint16),
            ids=np.asarray(ids),
            finishes=np.asarray(finishes),
            cached=np.array([sequence.cached for sequence in live], np.uint32),
            scores=token_scores,
            seconds=result.seconds,
            waits=np.empty(0, np.float32),  # a clock's matter: the process fills it in
        )
        return Outcome(prompt_scores, tokens)

    @property
    def idle(self) -> bool:
        """Whether no request is open and no plan in flight."""
        return not self._open and not self._in_flight

    @property
    def stats(self) -> Stats:
        """Its part of the statistics; what was sent to the workers and counted there is 0."""
        return Stats(
            running=len(self._running),
            waiting=len(self._queue),
            pages_used=self._pool.used,
            pages_total=self._pool.total,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
            plan_bytes=0,
            all_reduces=0,
            all_gathers=0,
        )

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and queues agree."""
        running = list(self._running.values())
        self._pool.check([sequence.pages for sequence in running])
        for sequence in running:
            open_pages = sequence.pages[sequence.num_computed // self._page_size :]
            assert not self._pool.is_shared(open_pages), "a page that will be written to is shared"
        assert sorted([*self._running, *self._free_slots]) == list(range(self._capacity.max_num_seqs)), "slots were lost"
        self._queue.check(list(self._open.values()), running)

    # Arrival and end

    def _sequence(self, request: Request, choice: int, generated: np.ndarray, matcher: Matcher | None) -> Sequence:
        submit = request.submit
        ids = array("i", submit.prompt.tobytes())
        ids.frombytes(generated.tobytes())
        self._arrivals += 1
        return Sequence(
            request=request,
            choice=choice,
            order=(request.group.rank, self._arrivals),
            ids=ids,
            max_len=self._capacity.max_len(submit),
            stop_ids=frozenset(submit.stop_ids.tolist()),
            leader=next(iter(request.choices.values()), None),
            matcher=matcher,
        )

    def _refuse(self, group: Group, kind: Refusal, reason: str) -> None:
        """Turn away all that is open of a queued group."""
        for number in list(group.requests):
            self.abort(number, _ALL_CHOICES)
            self._refused.append(Refused(number, kind, reason))

    def _finish(self, sequence: Sequence) -> Finish:
        """End a sequence whose last id is its end, and say why."""
        finish = sequence.finish()
        if finish is Finish.ERROR:  # its logits were not finite; who hit these pages would fail as well
            self._pool.forget(sequence.digests)
        if finish is not Finish.NONE:
            self._end(sequence)
        return finish

    def _end(self, sequence: Sequence) -> None:
        """Give up what the sequence holds; results still outstanding for it will be dropped."""
        sequence.ended = True
        if sequence.slot is None:
            self._queue.count_ended()
        else:
            self._vacate(sequence)
        request = sequence.request
        del request.choices[sequence.choice]
        if not request.choices:
            del self._open[request.submit.request]
            self._queue.close(request)

    def _vacate(self, sequence: Sequence) -> None:
        """Free slot and pages. Steps in flight may still write to them, but run before any plan that gives them away."""
        assert sequence.slot is not None
        del self._running[sequence.slot]
        self._free_slots.append(sequence.slot)
        self._pool.release(sequence.pages)
        sequence.stop()

    # Running sequences

    def _make_room(self) -> None:
        """Preempt until every decode row that begins a page can have one."""
        if self._pool.available >= len(self._running):
            return
        beginners = [sequence for sequence in self._running.values() if self._begins_page(sequence)]
        while len(beginners) > self._pool.available:
            last = max(self._running.values(), key=_order)
            self._preempt(last)
            beginners = [sequence for sequence in beginners if sequence is not last]

    def _begins_page(self, sequence: Sequence) -> bool:
        """Whether the next plan has a decode row for it that begins a page."""
        decodes = sequence.samples_left > 0 and not sequence.is_prefilling()
        return decodes and sequence.num_computed % self._page_size == 0

    def _preempt(self, sequence: Sequence) -> None:
        """Put it back in the queue; what was computed of it is lost, unless its pages survive in the prefix index."""
        self._prefixes.publish(sequence)
        self._vacate(sequence)
        self._queue.add(sequence)
        self._preemptions += 1

    def _plan_decodes(self, draft: Draft) -> None:
        """A row for each running sequence whose known ids are computed and which still has ids to sample."""
        rows = [row for row in self._running.values() if row.samples_left and row.num_computed >= row.num_prefill]
        page_size, page_counts, new_pages = self._page_size, [0] * len(rows), []
        for index, row in enumerate(rows):
            if not row.num_computed % page_size:
                page_counts[index] = 1
                new_pages += self._pool.take(1)
                row.pages.append(new_pages[-1])
            row.num_computed += 1
            row.samples_left -= 1
        draft.add_decodes(rows, page_counts, new_pages)

    def _plan_running_chunk(self, draft: Draft) -> None:
        """The next chunk of the sequence amid its prefill. Only the last one admitted can be: it took all the budget."""
        if self._running:
            newest = next(reversed(self._running.values()))
            if newest.is_prefilling():
                self._plan_chunk(draft, newest)

    def _plan_chunk(self, draft: Draft, sequence: Sequence, first: bool = False) -> None:
        count = min(draft.budget, sequence.num_prefill - sequence.num_computed)
        draft.add_chunk(sequence, count, first)
        sequence.num_computed += count
        request = sequence.request
        request.num_scored = max(request.num_scored, min(sequence.num_computed, request.num_targets))
        if not sequence.is_prefilling():
            sequence.prefilled_at = draft.step
            sequence.samples_left -= 1

    # Admission

    def _plan_admissions(self, draft: Draft) -> None:
        """Admit in order while budget, slots and pages last."""
        if not self._free_slots:
            self._turn_away()
        place = 0
        while draft.budget and self._free_slots and (sequence := self._queue.at(place)) is not None:
            if self._awaits_leader(sequence, draft.step):
                place += 1  # those behind it need not wait as well
            elif self._admit(sequence, draft):
                self._queue.admit(place)
            else:
                return

    def _turn_away(self) -> None:
        """Slots or pages are wanted: no more than so many requests may wait for them."""
        reason = f"the queue is full: {self._capacity.max_queue} requests wait in it (--max-queue)"
        for group in self._queue.surplus():
            self._refuse(group, Refusal.QUEUE_FULL, reason)

    def _awaits_leader(self, sequence: Sequence, step: int) -> bool:
        """Whether the pages it is to share are being computed."""
        leader = sequence.leader
        return leader is not None and leader.slot is not None and not leader.can_share(step)

    def _admit(self, sequence: Sequence, draft: Draft) -> bool:
        """Give it a slot and pages for all its known ids, and plan its first chunk; False if it must wait."""
        if sequence.num_outstanding:  # preempted, and not all its ids are known yet
            return False
        prefix = self._prefixes.find(sequence, draft.step)
        if len(sequence.ids) - prefix.tokens > draft.budget and not self._capacity.chunked_prefill:
            return False
        num_new = pages_for(len(sequence.ids), self._page_size) - len(prefix.pages)
        # Without a reserve the others' next pages would soon have to come from this sequence again.
        reserve = min(len(self._running), self._pool.total // 100 + 1)
        if num_new + self._pool.num_unreferenced(prefix.pages) + reserve > self._pool.available:
            self._turn_away()
            return False
        self._pool.share(prefix.pages)
        new_pages = self._pool.take(num_new)
        if prefix.partial is not None:
            draft.add_copy(prefix.partial, new_pages[0])
        slot = self._free_slots.pop()
        if sequence.cached is None:
            self._prefix_hit_tokens += min(prefix.tokens, sequence.num_prompt)
            self._begun_s.append(sequence.request.group.arrived_s)
        sequence.start(slot, prefix.pages + new_pages, prefix.tokens, self._page_size)
        self._running[slot] = sequence
        self._plan_chunk(draft, sequence, first=True)
        return True
