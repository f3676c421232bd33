"""The scheduler: which sequences advance in the next step, by how many tokens, in which pages.

Pure: no sockets, clock, torch or randomness, and nothing about ranks. Plans are made ahead: up to `WINDOW`
of them are without a result, so a row's input may be an id that is not known here yet.

Two orders matter. Sequences are admitted in order of arrival. When pages run out, the sequence that arrived
last gives up its own and is computed again later; so the oldest always advances.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.draft import Draft
from tpserve.coordinator.pages import PagePool
from tpserve.coordinator.sequence import Sequence
from tpserve.memory import pages_for
from tpserve.messages import Finish, Refused, Stats, StepPlan, StepResult, Submit, Tokens

WINDOW = 2  # plans in flight: the workers have the next one when they end a step

_ALL_CHOICES = -1
_arrival = attrgetter("arrival")


class ProtocolError(ValueError):
    """Another process sent what it must not send in this state."""


class _InFlight(NamedTuple):
    """A plan without a result: its sampling rows. A slot may have another sequence when the result comes."""

    step: int
    sampled: list[Sequence]


class _Prefix(NamedTuple):
    """What is computed already of a sequence that is to be admitted."""

    pages: list[int]  # to be shared, all of them full
    tokens: int
    partial: int | None  # the page with the tokens beyond `pages`, to be copied


class Scheduler:
    """Owns every open sequence of an epoch. Steps are numbered from 1 without a gap."""

    def __init__(self, capacity: Capacity, secret: bytes):
        self._capacity = capacity
        self._pool = PagePool(capacity.num_pages, capacity.page_size, secret)
        self._page_size = capacity.page_size
        self._step = 0
        self._in_flight: deque[_InFlight] = deque()
        self._arrivals = 0
        self._begun_s: list[float] = []  # arrivals of the choices planned first since `take_waits`
        self._open: dict[int, dict[int, Sequence]] = {}  # request -> choice -> sequence
        self._waiting: list[Sequence] = []  # in order of arrival; some may have ended
        self._num_gone = 0  # how many of them have
        self._running: dict[int, Sequence] = {}  # slot -> sequence, in order of admission
        self._free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))
        self._preemptions = 0
        self._prefix_hit_tokens = 0

    # What comes from the frontend

    def submit(self, submit: Submit, arrived_s: float = 0.0) -> Refused | None:
        """Queue the request's choices, or say why they can never be served. Raises ProtocolError for a malformed one.

        `arrived_s` is the time, by any clock; `take_waits` gives it back.
        """
        choices: list[int] = submit.choices.tolist()
        if submit.request in self._open:
            raise ProtocolError(f"request {submit.request} is already open")
        if not choices or len(set(choices)) < len(choices):
            raise ProtocolError(f"request {submit.request} has choices {choices}")
        reason = self._capacity.refusal(submit)
        if reason:
            return Refused(submit.request, reason)
        leader = None
        for choice, generated in zip(choices, submit.generated, strict=True):
            sequence = self._sequence(submit, choice, generated, leader, arrived_s)
            leader = leader or sequence
            self._waiting.append(sequence)
            self._open.setdefault(submit.request, {})[choice] = sequence
        return None

    def abort(self, request: int, choice: int) -> None:
        """End one choice, or all of the request (choice -1). What is over or unknown is ignored."""
        choices = self._open.get(request, {})
        wanted = list(choices.values()) if choice == _ALL_CHOICES else [choices[choice]] if choice in choices else []
        for sequence in wanted:
            self._end(sequence)

    # What goes to the workers, and comes back

    def plan(self) -> StepPlan | None:
        """The next step, or None when the window is full or no sequence can advance."""
        if len(self._in_flight) == WINDOW:
            return None
        self._make_room()
        draft = Draft(self._step + 1, self._capacity.max_num_batched_tokens)
        self._plan_decodes(draft)
        self._plan_running_chunk(draft)
        self._plan_admissions(draft)
        plan = draft.finish()
        if plan is None:
            return None
        for sequence in draft.chunks:  # only now, so that a page is hit in a later step than it is computed in
            self._publish(sequence)
        self._step = plan.step
        self._in_flight.append(_InFlight(plan.step, draft.sampled))
        return plan

    def take_waits(self, now_s: float) -> list[float]:
        """Seconds in the queue of each choice that was planned for the first time since the last call."""
        waits = [now_s - arrived_s for arrived_s in self._begun_s]
        self._begun_s.clear()
        return waits

    def result(self, result: StepResult) -> Tokens:
        """Take in the ids of the oldest plan in flight. Raises ProtocolError when the result is not that plan's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ProtocolError(f"result of step {result.step} came; in flight are {[plan.step for plan in self._in_flight]}")
        _, sampled = self._in_flight.popleft()
        if len(result.ids) != len(sampled):
            raise ProtocolError(f"result of step {result.step} has {len(result.ids)} ids for {len(sampled)} rows")
        live: list[Sequence] = []
        ids, finishes = array("i"), bytearray()
        size, begun, goes_on = self._page_size, 1 % self._page_size, int(Finish.NONE)
        for sequence, token in zip(sampled, result.ids.tolist(), strict=True):
            if sequence.ended:  # aborted, or this is its ghost row
                continue
            live.append(sequence)
            ids.append(token)
            known = sequence.ids
            known.append(token)
            if len(known) % size == begun:  # the id begins a page: the one before is complete
                self._publish(sequence)
            ends = token in sequence.stop_ids or len(known) == sequence.max_len or token < 0
            finishes.append(self._finish(sequence, token) if ends else goes_on)
        return Tokens(
            step=result.step,
            requests=np.array([sequence.request for sequence in live], np.uint64),
            choices=np.array([sequence.choice for sequence in live], np.uint16),
            ids=np.asarray(ids),
            finishes=np.asarray(finishes),
            cached=np.array([sequence.cached for sequence in live], np.uint32),
            seconds=result.seconds,
            waits=np.empty(0, np.float32),  # a clock's matter: the process fills it in
        )

    @property
    def idle(self) -> bool:
        """Whether no request is open and no plan in flight."""
        return not self._open and not self._in_flight

    @property
    def stats(self) -> Stats:
        """Its part of the statistics; what was sent to the workers and counted there is 0."""
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting) - self._num_gone,
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
        assert self._waiting == sorted(self._waiting, key=_arrival), "the queue is out of order"
        holders = [sequence for choices in self._open.values() for sequence in choices.values()]
        waiting = [sequence for sequence in self._waiting if not sequence.ended]
        assert len(waiting) == len(self._waiting) - self._num_gone, "the queue is miscounted"
        assert set(holders) == {*running, *waiting}, "an open sequence is neither running nor waiting, or is over"

    # Arrival and end

    def _sequence(
        self, submit: Submit, choice: int, generated: np.ndarray, leader: Sequence | None, arrived_s: float
    ) -> Sequence:
        ids = array("i", submit.prompt.tobytes())
        ids.frombytes(generated.tobytes())
        self._arrivals += 1
        return Sequence(
            request=submit.request,
            choice=choice,
            arrival=self._arrivals,
            arrived_s=arrived_s,
            ids=ids,
            num_prompt=len(submit.prompt),
            max_len=self._capacity.max_len(submit),
            stop_ids=frozenset(submit.stop_ids.tolist()),
            sampling=submit.sampling,
            leader=leader,
        )

    def _finish(self, sequence: Sequence, token: int) -> Finish:
        """End a sequence by its last id, and say why."""
        if token < 0:  # its logits were not finite; who hit these pages would fail as well
            self._pool.forget(sequence.digests)
        self._end(sequence)
        if token < 0:
            return Finish.ERROR
        return Finish.STOP if token in sequence.stop_ids else Finish.LENGTH

    def _end(self, sequence: Sequence) -> None:
        """Give up what the sequence holds; results still outstanding for it will be dropped."""
        sequence.ended = True
        if sequence.slot is None:
            self._leave_queue()
        else:
            self._vacate(sequence)
        choices = self._open[sequence.request]
        del choices[sequence.choice]
        if not choices:
            del self._open[sequence.request]

    def _leave_queue(self) -> None:
        """Count one that has ended in the queue. Looking for it would cost the queue's length, for each of many."""
        self._num_gone += 1
        if 2 * self._num_gone > len(self._waiting):
            self._waiting = [sequence for sequence in self._waiting if not sequence.ended]
            self._num_gone = 0

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
            youngest = max(self._running.values(), key=_arrival)
            self._preempt(youngest)
            beginners = [sequence for sequence in beginners if sequence is not youngest]

    def _begins_page(self, sequence: Sequence) -> bool:
        """Whether the next plan has a decode row for it that begins a page."""
        decodes = sequence.samples_left > 0 and not sequence.is_prefilling()
        return decodes and sequence.num_computed % self._page_size == 0

    def _preempt(self, sequence: Sequence) -> None:
        """Put it back in the queue; what was computed of it is lost, unless its pages survive in the prefix index."""
        self._publish(sequence)
        self._vacate(sequence)
        insort(self._waiting, sequence, key=_arrival)
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
        if not sequence.is_prefilling():
            sequence.prefilled_at = draft.step
            sequence.samples_left -= 1

    # Admission

    def _plan_admissions(self, draft: Draft) -> None:
        """Admit in order of arrival while budget, slots and pages last."""
        index = 0
        while index < len(self._waiting) and draft.budget and self._free_slots:
            sequence = self._waiting[index]
            if sequence.ended:
                del self._waiting[index]
                self._num_gone -= 1
            elif self._awaits_leader(sequence, draft.step):
                index += 1  # those behind it need not wait as well
            elif self._admit(sequence, draft):
                del self._waiting[index]
            else:
                return

    def _awaits_leader(self, sequence: Sequence, step: int) -> bool:
        """Whether the pages it is to share are being computed."""
        leader = sequence.leader
        return leader is not None and leader.slot is not None and not leader.can_share(step)

    def _admit(self, sequence: Sequence, draft: Draft) -> bool:
        """Give it a slot and pages for all its known ids, and plan its first chunk; False if it must wait."""
        if sequence.num_outstanding:  # preempted, and not all its ids are known yet
            return False
        prefix = self._prefix(sequence, draft.step)
        if len(sequence.ids) - prefix.tokens > draft.budget and not self._capacity.chunked_prefill:
            return False
        num_new = pages_for(len(sequence.ids), self._page_size) - len(prefix.pages)
        # Without a reserve the others' next pages would soon have to come from this sequence again.
        reserve = min(len(self._running), self._pool.total // 100 + 1)
        if num_new + self._pool.num_unreferenced(prefix.pages) + reserve > self._pool.available:
            return False
        self._pool.share(prefix.pages)
        new_pages = self._pool.take(num_new)
        if prefix.partial is not None:
            draft.add_copy(prefix.partial, new_pages[0])
        slot = self._free_slots.pop()
        if sequence.cached is None:
            self._prefix_hit_tokens += min(prefix.tokens, sequence.num_prompt)
            self._begun_s.append(sequence.arrived_s)
        sequence.start(slot, prefix.pages + new_pages, prefix.tokens, self._page_size)
        self._running[slot] = sequence
        self._plan_chunk(draft, sequence, first=True)
        return True

    def _prefix(self, sequence: Sequence, step: int) -> _Prefix:
        """What it need not compute: all known ids but the last at most, since the last one's logits are needed."""
        most = len(sequence.ids) - 1
        pages = self._hit(sequence, most // self._page_size)
        tokens = len(pages) * self._page_size
        leader, shared = sequence.leader, min(sequence.num_prompt, most)
        if leader is None or not leader.can_share(step) or tokens >= shared:
            return _Prefix(pages, tokens, None)
        full, rest = divmod(shared, self._page_size)
        return _Prefix(leader.pages[:full], shared, leader.pages[full] if rest else None)

    # The prefix index

    def _hit(self, sequence: Sequence, most: int) -> list[int]:
        """Indexed pages with the content of the sequence's first ones, `most` at most."""
        if not self._capacity.prefix_caching:
            return []
        self._pool.extend_digests(sequence.digests, sequence.ids, most)
        return self._pool.find(sequence.digests[:most])

    def _publish(self, sequence: Sequence) -> None:
        """Offer its pages to the index that are full of known ids and computed, in steps already planned."""
        if not self._capacity.prefix_caching:
            return
        full = min(sequence.num_computed, len(sequence.ids)) // self._page_size
        self._pool.extend_digests(sequence.digests, sequence.ids, full)
        for index in range(sequence.num_published, full):
            self._pool.publish(sequence.pages[index], sequence.digests[index])
        sequence.num_published = full
