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

import numpy as np

from tpserve.coordinator.batch import Batch
from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.draft import Draft
from tpserve.coordinator.flight import Flight, Outcome, ProtocolError
from tpserve.coordinator.forecast import Forecast
from tpserve.coordinator.pace import Pace
from tpserve.coordinator.pages import PagePool
from tpserve.coordinator.prefix import Prefixes
from tpserve.coordinator.queue import Queue
from tpserve.coordinator.sequence import Group, Matcher, Request, Sequence
from tpserve.coordinator.speculation import can_speculate, most_drafts
from tpserve.memory import pages_for
from tpserve.messages import (
    Finish,
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
        self._waits: list[float] = []  # seconds in the queue, of choices planned first since the last result
        self._open: dict[int, Request] = {}  # by number
        self._queue = Queue(capacity.by_priority, capacity.max_queue)
        self._refused: list[Refused] = []  # since `take_refused`
        self._pace = None if capacity.target_itl_s is None else Pace(capacity.target_itl_s, capacity.max_num_batched_tokens)
        self._forecast = Forecast()
        self._batch = Batch(capacity.max_num_seqs, capacity.page_size, vocab_size)
        self._preemptions = 0
        self._prefix_hit_tokens = 0

    # What comes from the frontend

    def submit(self, submit: Submit, arrived_s: float = 0.0, matchers: Iterable[Matcher] = ()) -> Refused | None:
        """Queue the request's choices, or say why they can never be served. Raises ProtocolError for a malformed one.

        `arrived_s` is the time, by the clock of `expire` and `plan`. `matchers` has one for each choice, if the
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

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """The next step, or None when the window is full or no sequence can advance."""
        if len(self._in_flight) == WINDOW:
            return None
        assert not self._in_flight or not self._in_flight[0].masked, "a step's masks come before the next plan"
        self._make_room()
        decodes = self._batch.decode(self._pool.take, self._most_drafts())
        draft = Draft(self._step + 1, self._capacity.max_num_batched_tokens, now_s, decodes)
        if self._pace is not None:
            draft.budget = min(draft.budget, self._pace.share(draft.num_decodes))
        self._plan_running_chunk(draft)
        self._plan_admissions(draft)
        plan = draft.finish()
        if plan is None:
            return None
        for sequence in draft.chunks:  # only now, so that a page is hit in a later step than it is computed in
            self._prefixes.publish(sequence, sequence.num_prefilled)
        if self._pace is not None:
            self._pace.planned(draft.num_columns, len(plan.ids), now_s)
        self._step = plan.step
        slots = draft.sampled
        self._in_flight.append(Flight(plan.step, slots, self._batch.stays[slots], draft.scored, draft.masked, draft.most_ids))
        return plan

    def masks(self) -> SampleMasks | None:
        """The masks of the oldest plan in flight, once; None when it has none. They come before the next plan.

        What they follow from is known: all earlier results are in. Whose choice has ended may sample anything.
        """
        return self._in_flight[0].masks(self._mask_words) if self._in_flight else None

    def result(self, result: StepResult, now_s: float = 0.0) -> Outcome:
        """Take in what the oldest plan in flight brought. Raises ProtocolError when the result is not that plan's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ProtocolError(f"result of step {result.step} came; in flight are {[plan.step for plan in self._in_flight]}")
        flight = self._in_flight.popleft()
        flight.check(result)
        if self._pace is not None:
            self._pace.done(now_s)
        batch, slots, ids = self._batch, flight.slots, result.ids
        prompt_scores = flight.prompt_scores(result.target_scores)
        if flight.most_ids is None:
            live, finishes = self._take(slots, flight.stays, ids)
        else:
            batch.settle(slots, flight.stays, flight.most_ids - result.id_counts)
            slots, live, finishes = self._take_columns(flight, result)
        token_scores = flight.token_scores(result.scores, live)
        if len(finishes) < len(ids):
            slots, ids = slots[live], ids[live]
        batch.let_go()
        tokens = Tokens(
            step=result.step,
            requests=batch.requests[slots],
            choices=batch.choices[slots],
            ids=ids,
            finishes=finishes,
            cached=batch.cached[slots],
            scores=token_scores,
            seconds=result.seconds,
            waits=np.array(self._waits, np.float32),
        )
        self._waits.clear()
        return Outcome(prompt_scores, tokens)

    def _take(self, slots: np.ndarray, stays: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take in an id of each of these slots; which are live, and their finishes. The others ended, or are ghosts."""
        batch = self._batch
        live = batch.stays[slots] == stays
        if np.count_nonzero(live) < len(live):
            slots, ids = slots[live], ids[live]
        finishes = np.zeros(len(ids), np.uint8)
        taken = batch.take(slots, ids)
        for slot in slots[taken.filled].tolist():
            sequence = batch.updated(slot)
            if sequence.is_running:
                self._prefixes.publish(sequence, len(sequence.ids) - 1)
        for row in taken.suspects:
            finishes[row] = self._finish(batch.updated(int(slots[row])))
        return live, finishes

    def _take_columns(self, flight: Flight, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take in the ids of rows that might have had drafts: each id's slot, then as `_take`, ids behind an end being dead."""
        rows, columns = flight.columns(result.id_counts)
        slots, stays = flight.slots[rows], flight.stays[rows]
        live, finishes = np.zeros(len(rows), bool), np.zeros(len(rows), np.uint8)
        for places in columns:
            live[places], found = self._take(slots[places], stays[places], result.ids[places])
            finishes[places[live[places]]] = found
        return slots, live, finishes[live]

    @property
    def idle(self) -> bool:
        """Whether no request is open and no plan in flight."""
        return not self._open and not self._in_flight

    @property
    def stats(self) -> Stats:
        """Its part of the statistics; what is counted by who sends plans and gets results is 0."""
        return Stats(
            running=self._batch.num_running,
            waiting=len(self._queue),
            pages_used=self._pool.used,
            pages_total=self._pool.total,
            kv_tokens=self._num_tokens,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    @property
    def _num_tokens(self) -> int:
        """Tokens in used pages: of those that are shared, which are full, once and not for each who shares."""
        return self._batch.total_held() - self._pool.num_shared * self._page_size

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and queues agree."""
        running = {slot: sequence for slot, sequence in self._batch.sequences.items() if sequence.is_running}
        self._pool.check([sequence.pages for sequence in running.values()])
        for slot, sequence in running.items():
            open_pages = sequence.pages[self._batch.num_computed(slot) // self._page_size :]
            assert not self._pool.is_shared(open_pages), "a page that will be written to is shared"
        assert self._batch.recount_held() == self._num_tokens, "tokens in pages were miscounted"
        self._batch.check()
        self._queue.check(list(self._open.values()), list(running.values()))

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
            speculates=self._capacity.speculative and can_speculate(submit),
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
        if sequence.is_running:
            self._pool.release(sequence.pages)
            self._forecast.ended(len(sequence.ids) - sequence.num_prompt)
        else:
            self._queue.count_ended()
        if sequence.slot is not None:
            self._batch.end(sequence)
        request = sequence.request
        del request.choices[sequence.choice]
        if not request.choices:
            del self._open[request.submit.request]
            self._queue.close(request)

    # Running sequences

    def _make_room(self) -> None:
        """Preempt until every decode row that begins a page can have one."""
        if self._pool.available >= self._batch.num_running:
            return
        while self._batch.num_beginning_pages() > self._pool.available:
            running = [slot for slot, sequence in self._batch.sequences.items() if sequence.is_running]
            self._preempt(max(running, key=lambda slot: self._batch.sequences[slot].order))

    def _preempt(self, slot: int) -> None:
        """Put it back in the queue; what was computed of it is lost, unless its pages survive in the prefix index.

        Steps in flight may still write to its pages, as to those of who ended, but run before any plan that gives them away.
        """
        sequence = self._batch.updated(slot)
        self._prefixes.publish(sequence, self._batch.num_computed(slot))
        self._pool.release(sequence.pages)
        self._batch.preempt(sequence)
        self._queue.add(sequence)
        self._preemptions += 1
        self._forecast.preempted()

    def _most_drafts(self) -> int:
        """How many each decode row of the next plan may have. What may be wrong takes no page that others will want soon."""
        if not self._capacity.speculative:
            return 0
        most = most_drafts(self._batch.num_decoding, self._capacity.max_num_batched_tokens)
        wanted = self._batch.num_beginning_pages(most) + self._batch.num_running
        return most if wanted <= self._pool.available else 0

    def _plan_running_chunk(self, draft: Draft) -> None:
        """The next chunk of the sequence amid its prefill. Only the last one admitted can be: it took all the budget."""
        newest = next(reversed(self._batch.sequences.values()), None)
        if newest is not None and newest.is_prefilling():
            self._plan_chunk(draft, newest)

    def _plan_chunk(self, draft: Draft, sequence: Sequence, first: bool = False) -> None:
        count = min(draft.budget, sequence.num_prefill - sequence.num_prefilled)
        draft.add_chunk(sequence, count, first)
        sequence.num_prefilled += count
        request = sequence.request
        request.num_scored = max(request.num_scored, min(sequence.num_prefilled, request.num_targets))
        if not sequence.is_prefilling():
            sequence.prefilled_at = draft.step
            self._batch.end_prefill(sequence)

    # Admission

    def _plan_admissions(self, draft: Draft) -> None:
        """Admit in order while budget, slots and pages last."""
        if not self._has_place():
            self._turn_away()
        place = 0
        while draft.budget and self._has_place() and (sequence := self._queue.at(place)) is not None:
            if self._awaits_leader(sequence, draft.step):
                place += 1  # those behind it need not wait as well
            elif self._admit(sequence, draft):
                self._queue.admit(place)
            else:
                return

    def _has_place(self) -> bool:
        """Whether one more sequence may run, as far as pages are not concerned."""
        return not self._batch.is_full and (self._pace is None or self._batch.num_running < self._pace.most_running)

    def _overfills(self, sequence: Sequence) -> bool:
        """Whether pages would run out, as far as can be told, if this one were admitted beside those that run."""
        num_running = self._batch.num_running
        if self._pace is None or not num_running:
            return False
        newcomer = (sequence.num_prompt, len(sequence.ids) - sequence.num_prompt, sequence.max_len - sequence.num_prompt)
        all_ = [np.append(lens, new) for lens, new in zip(self._batch.answers(), newcomer)]
        num_pages = pages_for(self._forecast.most_held(*all_), self._page_size) + num_running  # a page of each is begun
        return num_pages > self._pool.total

    def _turn_away(self) -> None:
        """Slots or pages are wanted: no more than so many requests may wait for them."""
        for group in self._queue.surplus():
            reason = f"the queue is full: {self._capacity.max_queue} requests wait in it (--max-queue)"
            self._refuse(group, Refusal.QUEUE_FULL, reason)

    def _awaits_leader(self, sequence: Sequence, step: int) -> bool:
        """Whether the pages it is to share are being computed."""
        leader = sequence.leader
        return leader is not None and leader.is_running and not leader.can_share(step)

    def _admit(self, sequence: Sequence, draft: Draft) -> bool:
        """Give it a slot and pages for all its known ids, and plan its first chunk; False if it must wait."""
        if sequence.slot is not None:  # preempted, and not all its ids are known yet
            return False
        prefix = self._prefixes.find(sequence, draft.step)
        if len(sequence.ids) - prefix.tokens > draft.budget and not self._capacity.chunked_prefill:
            return False
        num_new = pages_for(len(sequence.ids), self._page_size) - len(prefix.pages)
        # Without a reserve the others' next pages would soon have to come from this sequence again.
        reserve = min(self._batch.num_running, self._pool.total // 100 + 1)
        num_wanted = num_new + self._pool.num_unreferenced(prefix.pages) + reserve
        if num_wanted > self._pool.available or self._overfills(sequence):
            self._turn_away()
            return False
        self._pool.share(prefix.pages)
        new_pages = self._pool.take(num_new)
        if prefix.partial is not None:
            draft.add_copy(prefix.partial, new_pages[0])
        if sequence.cached is None:
            self._prefix_hit_tokens += min(prefix.tokens, sequence.num_prompt)
            self._waits.append(draft.now_s - sequence.request.group.arrived_s)
        self._batch.admit(sequence, prefix.pages + new_pages, prefix.tokens)
        self._plan_chunk(draft, sequence, first=True)
        return True
