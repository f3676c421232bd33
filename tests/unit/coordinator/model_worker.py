"""A worker without a model, and the coordinator's surroundings around a scheduler.

Instead of keys and values a page holds, per position, the id and a digest of everything before it, as a
model's keys and values depend on everything before them. The next id is a function of the last digest, so a
wrong page, order or copy anywhere changes what a choice says; besides, the worker checks all that a row sees.
Logprobs are functions of that digest as well, and grammars of the ids so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.scheduler import Scheduler
from tpserve.memory import pages_for
from tpserve.messages import (
    STEP_PARTS,
    Finish,
    PromptScores,
    Refusal,
    Row,
    SampleMasks,
    Sampling,
    Scores,
    StepPlan,
    StepResult,
    Submit,
    Tokens,
    decode,
    encode,
)

VOCAB = 5
Entries = list[tuple[int, float]]  # a position's scores: id, logprob
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
    bias: dict[int, float] | None = None,
    **others: Any,
) -> Submit:
    """`choices` maps each index to the ids it already has. Every other request has penalties; each is a group of its own."""
    choices = choices or {0: []}
    plain: dict[str, Any] = {
        "sampling": sampling(seed, looks_back=request % 2 == 1),
        "group": request, "min_tokens": 0, "logprobs": -1, "prompt_logprobs": -1, "grammar": "", "priority": 0,
        "max_wait_s": 0.0, "cache_salt": "",
    }  # fmt: skip
    return Submit(
        request=request,
        prompt=np.array(prompt, np.int32),
        choices=np.array(list(choices), np.uint16),
        generated=[np.array(ids, np.int32) for ids in choices.values()],
        max_tokens=max_tokens,
        stop_ids=np.array(stop_ids, np.int32),
        bias_ids=np.array([*(bias or {})], np.int32),
        bias_values=np.array([*(bias or {}).values()], np.float32),
        **{**plain, **others},
    )


# The toy grammar "COMPLETE_AT TOO_COMPLEX_AT": numbers of ids at which it is over


def allowed(grammar: str, taken: list[int]) -> list[int]:
    """The ids that may follow these."""
    return [id_ for id_ in range(VOCAB) if hash((len(grammar), *taken, id_)) % 3] or [1]


def end_of(grammar: str, taken: list[int]) -> Finish:
    complete_at, too_complex_at = map(int, grammar.split())
    if len(taken) == too_complex_at:
        return Finish.TOO_COMPLEX
    return Finish.COMPLETE if len(taken) == complete_at else Finish.NONE


class ToyMatcher:
    def __init__(self, grammar: str, taken: Iterable[int]):
        self.grammar = grammar
        self.taken = list(taken)

    def accept(self, token: int) -> Finish:
        assert token in allowed(self.grammar, self.taken)
        self.taken.append(token)
        return end_of(self.grammar, self.taken)

    def fill(self, words: np.ndarray) -> None:
        assert words.tolist() == [0xFFFFFFFF]
        words[0] = sum(1 << id_ for id_ in allowed(self.grammar, self.taken))


def matchers_of(submit: Submit) -> list[ToyMatcher]:
    return [ToyMatcher(submit.grammar, ids.tolist()) for ids in submit.generated] if submit.grammar else []


def extend(digest: int, token: int) -> int:
    return hash((digest, token))


def next_id(digest: int, choice: int, seed: int, failing: bool, may: Iterable[int]) -> int:
    """One of the ids that `may` be, or -1 where there is none or the logits are not finite."""
    value, ids = hash((digest, choice, seed)), list(may)
    if not ids or (failing and value % NOT_FINITE_OF == 0):
        return -1
    return ids[value % len(ids)]


def scores_of(digest: int, token: int, tops: int) -> Entries:
    """What stands for the logprobs of an id that follows, and of the `tops` likeliest; none where that is -1."""
    if tops < 0:
        return []
    return [(id_, float(np.float32(hash((digest, id_)) % 1000))) for id_ in (token, *range(tops))]


def scores_of_prompt(submit: Submit) -> list[Entries]:
    digest, found = 0, []
    for token, following in zip(submit.prompt.tolist(), submit.prompt.tolist()[1:]):
        digest = extend(digest, token)
        found.append(scores_of(digest, following, submit.prompt_logprobs))
    return found if submit.prompt_logprobs >= 0 else []


def packed(positions: list[Entries]) -> Scores:
    entries = [entry for position in positions for entry in position]
    return Scores(
        np.array([len(position) for position in positions], np.uint16),
        np.array([id_ for id_, _ in entries], np.int32),
        np.array([value for _, value in entries], np.float32),
    )


def unpacked(scores: Scores) -> list[Entries]:
    entries = list(zip(scores.ids.tolist(), scores.logprobs.tolist(), strict=True))
    return [[entries.pop(0) for _ in range(count)] for count in scores.counts.tolist()]


@dataclass
class Said:
    """What a choice must say from here on, computed alone, and how it ends."""

    ids: list[int]
    scores: list[Entries]
    finish: Finish


def expected(submit: Submit, choice: int, generated: list[int], max_model_len: int, failing: bool) -> Said:
    num_prompt, ids, digest = len(submit.prompt), [*submit.prompt.tolist(), *generated], 0
    said = Said([], [], Finish.NONE)
    for token in ids:
        digest = extend(digest, token)
    while said.finish is Finish.NONE:
        taken = ids[num_prompt:]
        may = allowed(submit.grammar, taken) if submit.grammar else range(VOCAB)
        banned = submit.stop_ids.tolist() if len(taken) < submit.min_tokens else []
        banned += submit.bias_ids.tolist()
        token = next_id(digest, choice, submit.sampling.seed, failing, [id_ for id_ in may if id_ not in banned])
        said.ids.append(token)
        said.scores.append(scores_of(digest, token, submit.logprobs))
        ids.append(token)
        said.finish = finish_of(submit, ids, max_model_len)
        digest = extend(digest, token)
    return said


def finish_of(submit: Submit, ids: list[int], max_model_len: int) -> Finish:
    """How the last of the ids ends the choice, or NONE."""
    num_prompt = len(submit.prompt)
    if ids[-1] < 0:
        return Finish.ERROR
    if ids[-1] in submit.stop_ids:
        return Finish.STOP
    if submit.grammar and (finish := end_of(submit.grammar, ids[num_prompt:])):
        return finish
    return Finish.LENGTH if len(ids) == min(num_prompt + submit.max_tokens, max_model_len) else Finish.NONE


@dataclass
class Slot:
    choice: int
    seed: int
    length: int
    tops: int
    min_len: int
    stop_ids: list[int]  # not sampled before `min_len`
    banned: list[int]  # by a bias
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

    def execute(self, plan: StepPlan, masks: SampleMasks | None) -> StepResult:
        self._copy(plan.copy_from.tolist(), plan.copy_to.tolist())
        rows = self._advance_slots(plan)
        writers: dict[int, Slot] = {}
        for slot, ids in rows:
            for page in self._write(slot, ids):
                assert writers.setdefault(page, slot) is slot, "two rows write to one page"
        for slot, _ in rows:
            for page in slot.table:
                assert writers.get(page, slot) is slot, "a row sees what another row of the step writes"
        targets = self._targets(plan, rows)
        words, ids, scores = [] if masks is None else masks.words.tolist(), [], []
        counts: list[int] = []
        drafted = sum(len(inputs) - 1 for (_, inputs), flags in zip(rows, plan.flags.tolist()) if flags & Row.SPECULATE)
        for (slot, inputs), flags in zip(rows, plan.flags.tolist(), strict=True):
            assert flags & Row.SAMPLE or not flags & Row.MASKED
            if flags & Row.SAMPLE:
                mask = words.pop(0) if flags & Row.MASKED else 0xFFFFFFFF
                may = [id_ for id_ in range(VOCAB) if mask >> id_ & 1]
                found = self._samples(slot, inputs[1:], may) if flags & Row.SPECULATE else [self._sample(slot, may)]
                ids += found
                counts.append(len(found))
                scores += [scores_of(self._digest(slot), found[-1], slot.tops)] if slot.tops >= 0 else [[]] * len(found)
        counts = counts if len(plan.most_drafts) else []
        assert not words
        scores = scores if any(scores) else []
        return StepResult(
            plan.step, np.array(ids, np.int32), np.array(counts, np.uint8), drafted, packed(scores), packed(targets),
            np.zeros(len(STEP_PARTS), np.float32), 0, 0,
        )  # fmt: skip

    def _targets(self, plan: StepPlan, rows: list[tuple[Slot, list[int]]]) -> list[Entries]:
        """The scores of the targets of the plan's SCORE rows."""
        targets, found = plan.targets.tolist(), []
        scored = [row for row, flags in zip(rows, plan.flags.tolist(), strict=True) if flags & Row.SCORE]
        for (slot, ids), count, tops in zip(scored, plan.target_counts.tolist(), plan.target_tops.tolist(), strict=True):
            begin = slot.length - len(ids)
            assert 0 < count <= len(ids)
            found += [scores_of(self._at(slot, begin + i)[1], targets.pop(0), tops) for i in range(count)]
        assert not targets
        return found

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        assert len(set(targets)) == len(targets)
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self.pages[target] = list(self.pages[source])
            self.copies += 1

    def _advance_slots(self, plan: StepPlan) -> list[tuple[Slot, list[int]]]:
        """Each row's slot with its page table as of this step, and the row's input ids."""
        first, pages, ids, rows = 0, plan.pages.tolist(), plan.ids.tolist(), []
        begun, most_drafts = plan.first_rows, plan.most_drafts.tolist()
        past, bias_ids, stop_ids = begun.past.tolist(), begun.bias_ids.tolist(), begun.stop_ids.tolist()
        for r, number in enumerate(plan.slots.tolist()):
            flags, count, page_count = int(plan.flags[r]), int(plan.counts[r]), int(plan.page_counts[r])
            if flags & Row.FIRST:
                parameters = (begun.choices, begun.seeds, begun.starts, begun.logprobs, begun.min_lens)
                counts = (begun.past_counts, begun.bias_counts, begun.stop_counts)
                past_count, bias_count, stop_count = (int(values[first]) for values in counts)
                assert bool(past_count) or not begun.presence_penalties[first]
                self.slots[number] = Slot(
                    *(int(values[first]) for values in parameters),
                    stop_ids=stop_ids[:stop_count],
                    banned=bias_ids[:bias_count],
                    past=past[:past_count] or None,
                )
                del past[:past_count], bias_ids[:bias_count], stop_ids[:stop_count]
                first += 1
            slot = self.slots[number]
            slot.table += pages[:page_count]
            del pages[:page_count]
            if flags & Row.FROM_SLOT:
                assert count == 1
                inputs = [max(slot.last, 0)]  # a ghost row may follow logits that were not finite
                if flags & Row.SPECULATE:
                    assert slot.past is not None, "drafts are to be made of ids that are not known"
                    inputs += self._drafts(slot, inputs[0], most_drafts.pop(0))
                rows.append((slot, inputs))
            else:
                rows.append((slot, ids[:count]))
                del ids[:count]
        assert not pages
        assert not ids
        assert not past
        assert not bias_ids
        assert not stop_ids
        assert not most_drafts
        assert first == len(begun)
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

    def _digest(self, slot: Slot) -> int:
        """Of all that the slot's next id follows."""
        return self._at(slot, slot.length - 1)[1]

    def _drafts(self, slot: Slot, token: int, most: int) -> list[int]:
        """As many as there may be or fewer, of which some are wrong, by chance."""
        digest, drafts = extend(self._digest(slot), token), []
        for place in range(hash((digest, "drafts")) % (most + 1)):
            banned = {*slot.banned, *(slot.stop_ids if slot.length + 1 + place < slot.min_len else [])}
            right = next_id(digest, slot.choice, slot.seed, self.failing, [i for i in range(VOCAB) if i not in banned])
            drafts.append(max(right, 0) if hash((digest, "right")) % 4 else hash((digest, "wrong")) % VOCAB)
            digest = extend(digest, drafts[-1])
        return drafts

    def _samples(self, slot: Slot, drafts: list[int], may: list[int]) -> list[int]:
        """The ids after a row that may end with wrong drafts; what was written for those is there, but does not count."""
        slot.length -= len(drafts)
        found = [self._sample(slot, may)]
        for draft in drafts:
            if found[-1] != draft:
                break
            slot.length += 1
            found.append(self._sample(slot, may))
        return found

    def _sample(self, slot: Slot, may: list[int]) -> int:
        digest, seen = 0, []
        for position in range(slot.length):
            token, stored = self._at(slot, position)
            digest = extend(digest, token)
            assert stored == digest, "a row sees pages of another sequence"
            seen.append(token)
        banned = [*slot.banned, *(slot.stop_ids if slot.length < slot.min_len else [])]
        slot.last = next_id(digest, slot.choice, slot.seed, self.failing, [id_ for id_ in may if id_ not in banned])
        if slot.past is not None:
            assert slot.past == seen, "the past that penalties see is not the row's"
            slot.past.append(max(slot.last, 0))  # as the next row's input
        return slot.last


@dataclass
class Open:
    """A choice as the test knows it."""

    said: Said
    group: int
    received: list[int] = field(default_factory=list)
    ended: bool = False
    cached: set[int] = field(default_factory=set)


@dataclass
class Scored:
    """A request's prompt scores as the test knows them."""

    expected: list[Entries]
    received: list[Entries] = field(default_factory=list)


class Surroundings:
    """Frontend and worker around a scheduler: submits, passes plans on as bytes, checks all that comes back."""

    def __init__(self, capacity: Capacity, window: int = 2, failing: bool = False):
        self.capacity = capacity
        self.window = window
        self.failing = failing
        self.scheduler = Scheduler(capacity, b"secret", VOCAB)
        self.worker = ModelWorker(capacity, failing)
        self.in_flight: deque[StepPlan] = deque()
        self.masks: dict[int, SampleMasks] = {}  # by step
        self.choices: dict[tuple[int, int], Open] = {}
        self.prompts: dict[int, Scored] = {}
        self.refusals: list[Refusal] = []
        self.now_s = 0.0  # each plan takes a second
        self.steps = 0
        self.ghosts = self.drafted = self.accepted = 0

    def submit(self, submit: Submit) -> bool:
        """Whether the request was taken."""
        refused = self.scheduler.submit(submit, self.now_s, matchers_of(submit))
        if refused is not None:
            assert (refused.request, refused.kind) == (submit.request, Refusal.NEVER)
            return False
        self.prompts[submit.request] = Scored(scores_of_prompt(submit))
        for choice, generated in zip(submit.choices.tolist(), submit.generated, strict=True):
            said = expected(submit, choice, generated.tolist(), self.capacity.max_model_len, self.failing)
            self.choices[submit.request, choice] = Open(said, submit.group)
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
        self._take_masks()
        self.now_s += 1
        self.scheduler.expire(self.now_s)
        plan = self.scheduler.plan()
        self._take_refused()
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
        self._take_masks()
        plan = self.in_flight.popleft()
        result = self.worker.execute(plan, self.masks.pop(plan.step, None))
        outcome = self.scheduler.result(result)
        for scores in outcome.prompt_scores:
            self._receive_scores(scores)
        _, tokens = decode(encode(outcome.tokens, 1))
        assert isinstance(tokens, Tokens)
        assert tokens.step == result.step
        self.ghosts += len(result.ids) - len(tokens.ids)
        self.drafted += result.drafted
        self.accepted += int(result.id_counts.sum()) - len(result.id_counts)
        columns = (tokens.requests, tokens.choices, tokens.ids, tokens.finishes, tokens.cached)
        scores = unpacked(tokens.scores) or [[]] * len(tokens.ids)
        assert any(scores) == bool(len(tokens.scores.counts))
        entries = zip(*(column.tolist() for column in columns), scores, strict=True)
        for request, choice, token, finish, cached, position in entries:
            record, prompt = self.choices[request, choice], self.prompts[request]
            assert prompt.received == prompt.expected, "an id came before all the prompt's scores"
            assert position == record.said.scores[len(record.received)]
            self._receive(record, token, Finish(finish), cached)
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
            assert record.received == record.said.ids[: len(record.received)]
        stats = self.scheduler.stats
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)

    def check(self) -> None:
        self.scheduler.check()

    def _receive(self, record: Open, token: int, finish: Finish, cached: int) -> None:
        assert not record.ended, "an id came after the end"
        record.received.append(token)
        record.cached.add(cached)
        assert len(record.cached) == 1
        assert record.received == record.said.ids[: len(record.received)]
        record.ended = len(record.received) == len(record.said.ids)
        assert finish == (record.said.finish if record.ended else Finish.NONE)

    def _receive_scores(self, message: PromptScores) -> None:
        prompt = self.prompts[message.request]
        prompt.received += unpacked(message.scores)
        assert prompt.received == prompt.expected[: len(prompt.received)]

    def _take_masks(self) -> None:
        """As the process does before each plan."""
        masks = self.scheduler.masks()
        if masks is not None:
            assert masks.step == self.in_flight[0].step
            self.masks[masks.step] = masks
            assert self.scheduler.masks() is None, "masks came twice"

    def _take_refused(self) -> None:
        """A refused group is refused as a whole, before anything came of it."""
        refused = self.scheduler.take_refused()
        self.refusals += [Refusal(message.kind) for message in refused]
        requests = [message.request for message in refused]
        assert len(set(requests)) == len(requests)
        groups = {record.group for (request, _), record in self.choices.items() if request in requests}
        for (request, _), record in self.choices.items():
            if record.group in groups and not record.ended:
                assert request in requests
                assert not record.received
                record.ended = True
        self.check()

    def _check_plan(self, plan: StepPlan, num_bytes: int) -> None:
        capacity, flags = self.capacity, plan.flags.tolist()
        assert plan.step == self.steps
        assert 0 < len(flags) <= capacity.max_num_seqs
        assert len(set(plan.slots.tolist())) == len(flags)
        assert max(plan.slots) < capacity.max_num_seqs
        assert plan.counts.min() > 0
        assert plan.counts.sum() + plan.most_drafts.sum() <= capacity.max_num_batched_tokens
        assert capacity.speculative or not len(plan.most_drafts)
        decodes = [bool(flag & Row.FROM_SLOT) for flag in flags]
        assert decodes == sorted(decodes, reverse=True), "decode rows come first"
        if all(decodes):
            assert num_bytes <= 128 + 16 * len(flags)
        if not capacity.chunked_prefill:
            assert all(flag & Row.SAMPLE for flag in flags)
