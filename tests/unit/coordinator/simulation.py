"""Streams of requests against a scheduler, on a simulated clock: how long a step takes is a function of its plan."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.coordinator.rig import result_of
from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.scheduler import Scheduler
from tpserve.messages import Finish, Row, StepPlan, Tokens

VOCABULARY = 8
END = 0
Cost = Callable[[int, int], float]  # seconds of a step with so many decode rows and prompt tokens


def linear(base_ms: float, row_ms: float, token_ms: float, noise: float = 0.0, seed: int = 0) -> Cost:
    """A step's time, which now and then takes far longer."""
    rng = random.Random(seed)

    def cost(rows: int, tokens: int) -> float:
        hiccup = 3 if noise and rng.random() < 0.005 else 1
        return (base_ms + row_ms * rows + token_ms * tokens) / 1000 * rng.lognormvariate(0, noise) * hiccup

    return cost


Lengths = tuple[int, int, int]  # of a request: prompt, answer allowed, answer if it ends by itself


@dataclass
class Simulation:
    """Frontend and worker of a scheduler. The worker runs plans one after the other, each when it has come.

    A stream is an iterator of lengths: it sends a request, reads the answer, sends the next.
    """

    capacity: Capacity
    cost: Cost
    now_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between an answer's ids
    num_tokens: int = 0
    num_ended: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.capacity, b"secret", VOCABULARY)
        self._free_s = 0.0  # when the worker is
        self._in_flight: deque[tuple[float, int, list[int]]] = deque()  # when it is done, step, requests sampled for
        self._numbers = itertools.count(2, 2)  # odd ones have penalties
        self._owners: dict[int, int] = {}  # slot -> request
        self._streams: dict[int, Iterator[Lengths]] = {}
        self._left: dict[int, int] = {}  # of each answer until it ends by itself
        self._last_s: dict[int, float] = {}

    def add(self, stream: Iterator[Lengths]) -> None:
        """It sends its next request, if it has one."""
        lengths = next(stream, None)
        if lengths is None:
            return
        number = next(self._numbers)
        prompt, allowed, self._left[number] = lengths
        submit = make_submit(number, [1] * prompt, allowed, stop_ids=(END,), seed=number, cache_salt=str(number))
        assert self.scheduler.submit(submit, self.now_s) is None
        self._streams[number] = stream

    def run(self, until_s: float = math.inf) -> None:
        """Go on until then, or until nothing is open."""
        while self.now_s < until_s:
            while (plan := self.scheduler.plan(self.now_s)) is not None:
                self._execute(plan)
            if not self._in_flight:
                return
            self.now_s, step, numbers = self._in_flight.popleft()
            ids = [END if self._left[number] == 1 else END + 1 for number in numbers]
            self._receive(self.scheduler.result(result_of(step, *ids), self.now_s).tokens)

    def _execute(self, plan: StepPlan) -> None:
        flags, slots = plan.flags, plan.slots
        self._owners.update(zip(slots[flags & Row.FIRST > 0].tolist(), plan.first_rows.seeds.tolist(), strict=True))
        self._free_s = max(self._free_s, self.now_s)
        self._free_s += self.cost(int(np.count_nonzero(flags & Row.FROM_SLOT)), len(plan.ids))
        numbers = [self._owners[slot] for slot in slots[flags & Row.SAMPLE > 0].tolist()]
        self._in_flight.append((self._free_s, plan.step, numbers))

    def _receive(self, tokens: Tokens) -> None:
        for number, finish in zip(tokens.requests.tolist(), tokens.finishes.tolist(), strict=True):
            self.num_tokens += 1
            self._left[number] -= 1
            if number in self._last_s:
                self.gaps_s.append(self.now_s - self._last_s[number])
            self._last_s[number] = self.now_s
            if finish != Finish.NONE:
                self.num_ended += 1
                self.add(self._streams.pop(number))
