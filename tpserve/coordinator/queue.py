"""Who waits for a slot: in which order, how many at most, and how long. Pure: the time is told."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from operator import attrgetter

from tpserve.coordinator.sequence import Group, Request, Sequence
from tpserve.messages import Submit

AGEING_S = 10  # who has waited so much longer makes up for a priority number that is higher by one

_order = attrgetter("order")


class Queue:
    """Waiting sequences in order, and the open groups.

    The order is that of arrival, with `by_priority` later by AGEING_S for each number of the priority. A request's
    rank never changes, yet who waits overtakes those who come later with a better number: nobody starves. Of groups
    none of whose sequences ever left the queue, more than `most` are too many.
    """

    def __init__(self, by_priority: bool, most: int | None):
        self._by_priority = by_priority
        self._most = most
        self._sequences: list[Sequence] = []  # in order; some may have ended
        self._num_gone = 0  # how many of them have
        self._groups: dict[int, Group] = {}
        self._num_queued = 0
        self._deadlines: list[tuple[float, int, Group]] = []  # a heap; some may not be queued any more
        self._ties = itertools.count()

    def __len__(self) -> int:
        """How many sequences wait."""
        return len(self._sequences) - self._num_gone

    # Groups

    def open(self, submit: Submit, root: bytes, arrived_s: float) -> Request:
        """A new request, in the group that it belongs to."""
        group = self._group(submit, arrived_s)
        request = group.requests[submit.request] = Request(submit, group, root)
        return request

    def close(self, request: Request) -> None:
        """Forget a request without open choices."""
        group = request.group
        del group.requests[request.submit.request]
        if not group.requests:
            del self._groups[group.number]
            self._leave_queued(group)

    def _group(self, submit: Submit, arrived_s: float) -> Group:
        group = self._groups.get(submit.group)
        if group is None:
            rank = arrived_s + (submit.priority * AGEING_S if self._by_priority else 0)
            group = self._groups[submit.group] = Group(submit.group, arrived_s, rank, submit.max_wait_s)
            self._num_queued += 1
            if submit.max_wait_s:
                heapq.heappush(self._deadlines, (arrived_s + submit.max_wait_s, next(self._ties), group))
        return group

    def surplus(self) -> list[Group]:
        """The queued groups beyond the most there may be, the last in order first."""
        excess = 0 if self._most is None else self._num_queued - self._most
        if excess <= 0:
            return []
        groups = dict.fromkeys(sequence.request.group for sequence in reversed(self._sequences))
        return [group for group in groups if group.is_queued][:excess]

    def late(self, now_s: float) -> list[Group]:
        """The groups that have been queued for longer than they may; each is told once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            group = heapq.heappop(self._deadlines)[-1]
            if group.is_queued:
                late.append(group)
        return late

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """Have a new sequence wait, or one that was preempted."""
        insort(self._sequences, sequence, key=_order)

    def at(self, place: int) -> Sequence | None:
        """The waiting sequence at this place, or None behind the last."""
        while place < len(self._sequences):
            sequence = self._sequences[place]
            if not sequence.ended:
                return sequence
            del self._sequences[place]
            self._num_gone -= 1
        return None

    def admit(self, place: int) -> None:
        """Take out the sequence `at` this place: it has a slot now."""
        self._leave_queued(self._sequences.pop(place).request.group)

    def count_ended(self) -> None:
        """A waiting sequence has ended. Looking for it would cost the queue's length, for each of many."""
        self._num_gone += 1
        if 2 * self._num_gone > len(self._sequences):
            self._sequences = [sequence for sequence in self._sequences if not sequence.ended]
            self._num_gone = 0

    def check(self, requests: list[Request], running: list[Sequence]) -> None:
        """Raise AssertionError unless all agrees with what is open and what has a slot."""
        waiting = [sequence for sequence in self._sequences if not sequence.ended]
        assert self._sequences == sorted(self._sequences, key=_order), "the queue is out of order"
        assert len(waiting) == len(self), "the queue is miscounted"
        open_ = {sequence for request in requests for sequence in request.choices.values()}
        assert open_ == {*running, *waiting}, "an open sequence is neither running nor waiting, or is over"
        grouped = [request for group in self._groups.values() for request in group.requests.values()]
        assert set(grouped) == set(requests), "groups and open requests disagree"
        queued = [group for group in self._groups.values() if group.is_queued]
        assert len(queued) == self._num_queued, "the queued groups are miscounted"
        assert all(group.requests for group in self._groups.values()), "a group is open without a request"
        assert not any(sequence.request.group.is_queued for sequence in running), "a group is queued that runs"
        assert len(self._deadlines) <= 2 * self._num_queued, "deadlines pile up"

    def _leave_queued(self, group: Group) -> None:
        if not group.is_queued:
            return
        group.is_queued = False
        self._num_queued -= 1
        if len(self._deadlines) > 2 * self._num_queued:
            self._deadlines = [entry for entry in self._deadlines if entry[-1].is_queued]
            heapq.heapify(self._deadlines)
