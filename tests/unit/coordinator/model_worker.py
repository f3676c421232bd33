"""A worker without a model, and the coordinator's surroundings around a scheduler.

Instead of keys and values a page holds, per position, the id and a digest of everything before it, as a
model's keys and values depend on everything before them. The next id is a function of the last digest, so a
wrong page, order or copy anywhere changes what a choice says; besides, the worker checks all that a row sees.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.scheduler import Scheduler
from tpserve.memory import pages_for
from tpserve.messages import Finish, Row, Sampling, StepPlan, StepResult, Submit, Tokens, decode, encode

VOCAB = 5
NOT_FINITE_OF = 61  # one in so many digests stands for logits that are not finite


def sampling(seed: int = 0, looks_back: bool = False) -> Sampling:
    return Sampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.5 if looks_back else 0.0,
        frequency_penalty=0.0,
        seed=seed,
    )


def make_submit(
    request: int,
    prompt: list[int],
    max_tokens: int = 4,
    choices: dict[int, list[int]] | None = None,
    stop_ids: tuple[int, ...] = (),
    seed: int = 0,
) -> Submit:
    """`choices` maps each index to the ids it already has. Every other request has penalties."""
    choices = choices or {0: []}
    return Submit(
        request=request,
        prompt=np.array(prompt, np.int32),
        choices=np.array(list(choices), np.uint16),
        generated=[np.array(ids, np.int32) for ids in choices.values()],
        max_tokens=max_tokens,
        stop_ids=np.array(stop_ids, np.int32),
        sampling=sampling(seed, looks_back=request % 2 == 1),
    )


def extend(digest: int, token: int) -> int:
    return hash((digest, token))


def next_id(digest: int, choice: int, seed: int, failing: bool) -> int:
    value = hash((digest, choice, seed))
    return -1 if failing and value % NOT_FINITE_OF == 0 else value % VOCAB


def expected(submit: Submit, choice: int, generated: list[int], max_model_len: int, failing: bool) -> tuple[list[int], Finish]:
    """What the choice must say from here on, computed alone, and how it ends."""
    ids, new, digest = [*submit.prompt.tolist(), *generated], [], 0
    most = min(len(submit.prompt) + submit.max_tokens, max_model_len)
    for token in ids:
        digest = extend(digest, token)
    while True:
        token = next_id(digest, choice, submit.sampling.seed, failing)
        new.append(token)
        if token < 0:
            return new, Finish.ERROR
        if token in submit.stop_ids:
            return new, Finish.STOP
        if len(ids) + len(new) == most:
            return new, Finish.LENGTH
        digest = extend(digest, token)


@dataclass
class Slot:
    choice: int
    seed: int
    length: int
    past: list[int] | None  # with penalties all its ids, as told at first and sampled since
    last: int = -1
    table: list[int] = field(default_factory=list)


class ModelWorker:
    """Executes plans as a worker does: copies, then all rows' writes, then what each row sees."""

    def __init__(self, capacity: Capacity, failing: bool = False):
        self.capacity = capacity
        self.failing = failing
        self.slots: dict[int, Slot] = {}
        self.pages: list[list[tuple[int, int] | None]] = [[None] * capacity.page_size for _ in range(capacity.num_pages)]
        self.copies = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._copy(plan.copy_from.tolist(), plan.copy_to.tolist())
        rows = self._advance_slots(plan)
        writers: dict[int, Slot] = {}
        for slot, ids in rows:
            for page in self._write(slot, ids):
                assert writers.setdefault(page, slot) is slot, "two rows write to one page"
        for slot, _ in rows:
            for page in slot.table:
                assert writers.get(page, slot) is slot, "a row sees what another row of the step writes"
        ids = [self._sample(slot) for (slot, _), flags in zip(rows, plan.flags, strict=True) if flags & Row.SAMPLE]
        return StepResult(plan.step, np.array(ids, np.int32), np.zeros(5, np.float32), 0, 0)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        assert len(set(targets)) == len(targets)
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self.pages[target] = list(self.pages[source])
            self.copies += 1

    def _advance_slots(self, plan: StepPlan) -> list[tuple[Slot, list[int]]]:
        """Each row's slot with its page table as of this step, and the row's input ids."""
        first, pages, ids, past, rows = 0, plan.pages.tolist(), plan.ids.tolist(), plan.past.tolist(), []
        for r, number in enumerate(plan.slots.tolist()):
            flags, count, page_count = int(plan.flags[r]), int(plan.counts[r]), int(plan.page_counts[r])
            if flags & Row.FIRST:
                parameters = (plan.choices, plan.seeds, plan.starts, plan.past_counts)
                choice, seed, start, past_count = (int(values[first]) for values in parameters)
                assert bool(past_count) == bool(plan.presence_penalties[first])
                self.slots[number] = Slot(choice, seed, start, past[:past_count] or None)
                del past[:past_count]
                first += 1
            slot = self.slots[number]
            slot.table += pages[:page_count]
            del pages[:page_count]
            if flags & Row.FROM_SLOT:
                assert count == 1
                rows.append((slot, [max(slot.last, 0)]))  # a ghost row may follow logits that were not finite
            else:
                rows.append((slot, ids[:count]))
                del ids[:count]
        assert not pages
        assert not ids
        assert not past
        assert first == len(plan.starts)
        return rows

    def _write(self, slot: Slot, ids: list[int]) -> set[int]:
        """Store a row's ids; returns the pages written."""
        size, written = self.capacity.page_size, set()
        assert pages_for(slot.length + len(ids), size) <= len(slot.table)
        for position, token in enumerate(ids, slot.length):
            before = self._at(slot, position - 1)[1] if position else 0
            page = slot.table[position // size]
            self.pages[page][position % size] = (token, extend(before, token))
            written.add(page)
        slot.length += len(ids)
        return written

    def _at(self, slot: Slot, position: int) -> tuple[int, int]:
        entry = self.pages[slot.table[position // self.capacity.page_size]][position % self.capacity.page_size]
        assert entry is not None, "a row sees a position that was never written"
        return entry

    def _sample(self, slot: Slot) -> int:
        digest, seen = 0, []
        for position in range(slot.length):
            token, stored = self._at(slot, position)
            digest = extend(digest, token)
            assert stored == digest, "a row sees pages of another sequence"
            seen.append(token)
        slot.last = next_id(digest, slot.choice, slot.seed, self.failing)
        if slot.past is not None:
            assert slot.past == seen, "the past that penalties see is not the row's"
            slot.past.append(max(slot.last, 0))  # as the next row's input
        return slot.last


@dataclass
class Open:
    """A choice as the test knows it."""

    expected: list[int]
    finish: Finish
    received: list[int] = field(default_factory=list)
    ended: bool = False
    cached: set[int] = field(default_factory=set)


class Surroundings:
    """Frontend and worker around a scheduler: submits, passes plans on as bytes, checks all that comes back."""

    def __init__(self, capacity: Capacity, window: int = 2, failing: bool = False):
        self.capacity = capacity
        self.window = window
        self.failing = failing
        self.scheduler = Scheduler(capacity, b"secret")
        self.worker = ModelWorker(capacity, failing)
        self.in_flight: deque[StepPlan] = deque()
        self.choices: dict[tuple[int, int], Open] = {}
        self.steps = 0
        self.ghosts = 0

    def submit(self, submit: Submit) -> bool:
        """Whether the request was taken."""
        refused = self.scheduler.submit(submit)
        if refused is not None:
            assert refused.request == submit.request
            return False
        for choice, generated in zip(submit.choices.tolist(), submit.generated, strict=True):
            ids, finish = expected(submit, choice, generated.tolist(), self.capacity.max_model_len, self.failing)
            self.choices[submit.request, choice] = Open(ids, finish)
        self.check()
        return True

    def abort(self, request: int, choice: int = -1) -> None:
        self.scheduler.abort(request, choice)
        for key, record in self.choices.items():
            if key[0] == request and choice in (-1, key[1]):
                record.ended = True
        self.check()

    def plan(self) -> StepPlan | None:
        """Have a step planned if the window allows, and check it as a whole."""
        if len(self.in_flight) == self.window:
            return None
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.steps += 1
        data = encode(plan, 1)
        _, message = decode(data)
        assert isinstance(message, StepPlan)
        self._check_plan(message, len(data))
        self.in_flight.append(message)
        self.check()
        return message

    def answer(self) -> Tokens | None:
        """Execute the oldest plan in flight, and check what its result brings."""
        if not self.in_flight:
            return None
        result = self.worker.execute(self.in_flight.popleft())
        _, tokens = decode(encode(self.scheduler.result(result), 1))
        assert isinstance(tokens, Tokens)
        assert tokens.step == result.step
        self.ghosts += len(result.ids) - len(tokens.ids)
        columns = (tokens.requests, tokens.choices, tokens.ids, tokens.finishes, tokens.cached)
        for request, choice, token, finish, cached in zip(*(column.tolist() for column in columns), strict=True):
            self._receive(self.choices[request, choice], token, Finish(finish), cached)
        self.check()
        return tokens

    def run(self, steps: int = 10_000) -> None:
        """Go on until nothing is open, or for so many steps."""
        for _ in range(steps):
            while self.plan():
                pass
            if self.answer() is None:
                return

    def end(self) -> None:
        """Run to the end; then every choice has ended once, with the right ids, and nothing is used."""
        self.run()
        assert self.scheduler.idle
        for record in self.choices.values():
            assert record.ended
            assert record.received == record.expected[: len(record.received)]
        stats = self.scheduler.stats
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)

    def check(self) -> None:
        self.scheduler.check()

    def _receive(self, record: Open, token: int, finish: Finish, cached: int) -> None:
        assert not record.ended, "an id came after the end"
        record.received.append(token)
        record.cached.add(cached)
        assert len(record.cached) == 1
        assert record.received == record.expected[: len(record.received)]
        record.ended = len(record.received) == len(record.expected)
        assert finish == (record.finish if record.ended else Finish.NONE)

    def _check_plan(self, plan: StepPlan, num_bytes: int) -> None:
        capacity, flags = self.capacity, plan.flags.tolist()
        assert plan.step == self.steps
        assert 0 < len(flags) <= capacity.max_num_seqs
        assert len(set(plan.slots.tolist())) == len(flags)
        assert max(plan.slots) < capacity.max_num_seqs
        assert plan.counts.min() > 0
        assert plan.counts.sum() <= capacity.max_num_batched_tokens
        decodes = [bool(flag & Row.FROM_SLOT) for flag in flags]
        assert decodes == sorted(decodes, reverse=True), "decode rows come first"
        if all(decodes):
            assert num_bytes <= 128 + 16 * len(flags)
        if not capacity.chunked_prefill:
            assert all(flag & Row.SAMPLE for flag in flags)
