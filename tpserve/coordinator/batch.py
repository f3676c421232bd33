"""The sequences that have a slot, as arrays over slots: a step changes all that decode at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tpserve.coordinator.sequence import Sequence
from tpserve.messages import Row

_DECODE = Row.SAMPLE | Row.FROM_SLOT
_NO_DRAFTS = np.empty(0, np.uint8)


class Decodes(NamedTuple):
    """A plan's decode rows: arrays over them, and the pages of those that begin some."""

    slots: np.ndarray  # intp
    flags: np.ndarray  # uint8
    page_counts: np.ndarray  # uint32
    pages: list[int]
    most_drafts: np.ndarray  # uint8: of those that speculate
    most_ids: np.ndarray | None  # int64: how many each may bring; None: one each
    masked: list[Sequence]  # those under a grammar


class Taken(NamedTuple):
    """What became of a step's ids: places among them."""

    filled: list[int]  # a page is full of known ids and computed
    suspects: list[int]  # the sequence may end with its id


class Batch:
    """Slots and what is in them.

    Of a sequence that decodes, ids are *known* up to one place and *planned* up to another, the difference being
    outstanding; keys and values are computed, or planned to be, of all that is planned but the last. A page's worth of
    known ids is kept here and added to the sequence's own when it is full, or when the sequence leaves its slot.

    With drafts what is planned is a bound, which comes down by those that were wrong (`settle`). The pages up to it are kept:
    what was computed of wrong drafts lies behind the known ids and is overwritten by what comes instead.
    """

    def __init__(self, num_slots: int, page_size: int, vocab_size: int):
        self.sequences: dict[int, Sequence] = {}  # by slot, in order of admission
        self._leaving: list[Sequence] = []  # those of them that were preempted and have ids outstanding
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._page_size = page_size
        self._decoding = np.empty(0, np.intp)  # slots with a decode row in the next plan
        self._ends = np.zeros(vocab_size + 1, np.uint32)  # by id: how many of those that run end with it
        self._ends[-1] = 1  # everyone ends with id -1
        # Over slots
        self.requests = np.zeros(num_slots, np.uint64)
        self.choices = np.zeros(num_slots, np.uint16)
        self.cached = np.zeros(num_slots, np.uint32)
        self.stays = np.zeros(num_slots, np.uint32)  # that are over; tells a ghost's row from those of whom came next
        self._known = np.zeros(num_slots, np.int32)
        self._planned = np.zeros(num_slots, np.int32)
        self._prompt_lens = np.zeros(num_slots, np.int32)
        self._max_lens = np.zeros(num_slots, np.int32)
        self._room = np.zeros(num_slots, np.int32)  # tokens, in its pages
        self._flags = np.zeros(num_slots, np.uint8)  # of a decode row
        self._speculates = np.zeros(num_slots, bool)
        self._watched = np.zeros(num_slots, bool)  # may end with any id: by its grammar, or as all its ids are planned
        self._recent = np.zeros((num_slots, page_size), np.int32)  # id p of a sequence is in column (p - 1) % page_size

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    @property
    def num_running(self) -> int:
        """How many sequences advance, or could."""
        return len(self.sequences) - len(self._leaving)

    @property
    def num_decoding(self) -> int:
        """How many have a decode row in the next plan."""
        return len(self._decoding)

    def answers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(Tokens of the prompt, of the answer as planned, and of the answer at most), of each that has a slot."""
        slots = [*self.sequences]
        prompts = self._prompt_lens[slots]
        return prompts, self._planned[slots] - prompts, self._max_lens[slots] - prompts

    # One sequence

    def admit(self, sequence: Sequence, pages: list[int], num_computed: int) -> None:
        """Give it a free slot. The first `num_computed` tokens are in the pages already."""
        slot = self._free_slots.pop()
        sequence.start(slot, pages, num_computed, self._page_size)
        self.sequences[slot] = sequence
        self.requests[slot] = sequence.request.submit.request
        self.choices[slot] = sequence.choice
        self.cached[slot] = sequence.cached or 0
        self._known[slot] = self._planned[slot] = len(sequence.ids)
        self._room[slot] = len(pages) * self._page_size
        self._speculates[slot] = sequence.speculates
        self._prompt_lens[slot] = sequence.num_prompt
        self._max_lens[slot] = sequence.max_len
        self._watched[slot] = sequence.matcher is not None
        self._flags[slot] = _DECODE if sequence.matcher is None else _DECODE | Row.MASKED
        self._ends[self._end_ids(sequence)] += 1

    def end_prefill(self, sequence: Sequence) -> None:
        """Its last chunk is planned, and the sample after it."""
        slot = _slot(sequence)
        self._planned[slot] += 1
        if self._planned[slot] < self._max_lens[slot]:
            self._decoding = np.append(self._decoding, slot)
        else:
            self._watched[slot] = True

    def updated(self, slot: int) -> Sequence:
        """The sequence in this slot, after its own ids were made all that are known."""
        sequence = self.sequences[slot]
        num_own = len(sequence.ids)
        begin = (num_own - 1) % self._page_size
        end = begin + int(self._known[slot]) - num_own
        sequence.ids.frombytes(self._recent[slot, begin:end].tobytes())
        return sequence

    def num_computed(self, slot: int) -> int:
        """How many of its known ids are computed, in steps already planned."""
        sequence = self.sequences[slot]
        return sequence.num_prefilled if sequence.is_prefilling() else int(min(self._known[slot], self._planned[slot] - 1))

    def num_held(self, slot: int) -> int:
        """How many of its tokens have keys and values in its pages, or will when what is planned is done."""
        sequence = self.sequences[slot]
        if not sequence.is_running:
            return 0
        return sequence.num_prefilled if sequence.is_prefilling() else int(self._planned[slot]) - 1

    def preempt(self, sequence: Sequence) -> None:
        """It advances no more, and has no slot when no id is outstanding. Its pages are the caller's to free."""
        self._stop(sequence)
        self._leaving.append(sequence)
        self.let_go()

    def end(self, sequence: Sequence) -> None:
        """It has no slot any more: results still outstanding for it are of a stay that is over."""
        if sequence in self._leaving:
            self._leaving.remove(sequence)
        else:
            self._stop(sequence)
        self._free(sequence)

    def let_go(self) -> None:
        """Free the slots of those that were preempted and have no id outstanding any more."""
        for sequence in list(self._leaving):
            slot = _slot(sequence)
            if self._known[slot] == self._planned[slot]:
                self.updated(slot)
                self._leaving.remove(sequence)
                self._free(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self._decoding = self._decoding[self._decoding != sequence.slot]
        sequence.stop()

    def _free(self, sequence: Sequence) -> None:
        slot, sequence.slot = _slot(sequence), None
        del self.sequences[slot]
        self._free_slots.append(slot)
        self.stays[slot] += 1
        self._ends[self._end_ids(sequence)] -= 1

    def _end_ids(self, sequence: Sequence) -> np.ndarray:
        ids = sequence.request.submit.stop_ids
        return ids[(ids >= 0) & (ids < len(self._ends) - 1)]

    def check(self) -> None:
        """Raise AssertionError unless slots and sequences agree."""
        assert sorted([*self.sequences, *self._free_slots]) == list(range(self._num_slots)), "slots were lost"
        assert all(sequence.slot == slot for slot, sequence in self.sequences.items()), "two sequences have one slot"
        assert all(sequence in self.sequences.values() for sequence in self._leaving), "who left is leaving"
        decoding = [slot for slot, sequence in self.sequences.items() if self._decodes(slot, sequence)]
        assert sorted(self._decoding.tolist()) == sorted(decoding), "who decodes and who does not disagree"

    def _decodes(self, slot: int, sequence: Sequence) -> bool:
        advances = sequence.is_running and not sequence.is_prefilling()
        return advances and bool(self._planned[slot] < self._max_lens[slot])

    # All that decode

    def total_held(self) -> int:
        """The sum of `num_held`."""
        others = self.sequences.keys() - set(self._decoding.tolist())
        return int((self._planned[self._decoding] - 1).sum()) + sum(map(self.num_held, others))

    def recount_held(self) -> int:
        """The tokens in each page that one who runs has, whoever shares it."""
        in_pages: dict[int, int] = {}
        for slot, sequence in self.sequences.items():
            for number, page in enumerate(sequence.pages if sequence.is_running else []):
                in_page = min(max(self.num_held(slot) - number * self._page_size, 0), self._page_size)
                in_pages[page] = max(in_page, in_pages.get(page, 0))
        return sum(in_pages.values())

    def num_beginning_pages(self, drafts: int = 0) -> int:
        """How many pages the decode rows of the next plan begin, with so many drafts each."""
        slots = self._decoding
        return int(self._pages(self._planned[slots] + self._drafts(slots, drafts) - self._room[slots]).sum())

    def decode(self, take_pages: Callable[[int], list[int]], drafts: int = 0) -> Decodes:
        """Plan one more id for each that decodes, and so many drafts before it of those that speculate."""
        slots = self._decoding
        flags, most_drafts, most_ids = self._flags[slots], _NO_DRAFTS, None
        masked = [self.sequences[slot] for slot in slots[flags != _DECODE].tolist()]
        computed = self._planned[slots]  # in all, after this step
        if drafts and (more := self._drafts(slots, drafts)).any():
            computed += more
            flags[more > 0] |= Row.SPECULATE
            most_drafts, most_ids = more[more > 0].astype(np.uint8), 1 + more.astype(np.int64)
        room = self._room[slots]
        page_counts = (computed > room if most_ids is None else self._pages(computed - room)).astype(np.uint32)
        owners = slots.repeat(page_counts).tolist()
        pages = take_pages(len(owners))
        for slot, page in zip(owners, pages):
            self.sequences[slot].pages.append(page)
        self._room[slots] = room + page_counts * self._page_size
        self._planned[slots] = planned = computed + 1
        goes_on = planned < self._max_lens[slots]
        if np.count_nonzero(goes_on) < len(slots):
            self._decoding = slots[goes_on]
            self._watched[slots[~goes_on]] = True
        return Decodes(slots, flags, page_counts, pages, most_drafts, most_ids, masked)

    def _drafts(self, slots: np.ndarray, most: int) -> np.ndarray:
        """How many drafts each may have: half of what is left of it, so that its end is seldom planned before it is near."""
        left = self._max_lens[slots] - self._planned[slots] - 1
        drafts: np.ndarray = np.where(self._speculates[slots], np.minimum(left // 2, most), 0)
        return drafts

    def _pages(self, lacking: np.ndarray) -> np.ndarray:
        """How many pages have room for so many tokens; none for less than none."""
        return -(-lacking.clip(0) // self._page_size)

    def settle(self, slots: np.ndarray, stays: np.ndarray, wrong: np.ndarray) -> None:
        """Of what was planned in these stays so many ids will not come.

        Who had all planned that it may have, and is not at its end, decodes on.
        """
        live = self.stays[slots] == stays
        slots, wrong = slots[live], wrong[live]
        paused = slots[(wrong > 0) & (self._planned[slots] == self._max_lens[slots])]
        self._planned[slots] -= wrong
        resumed = [slot for slot in paused.tolist() if self.sequences[slot].is_running]
        self._decoding = np.append(self._decoding, np.array(resumed, np.intp))

    def take(self, slots: np.ndarray, ids: np.ndarray) -> Taken:
        """Take in an id for each of these slots, none of whose stays is over."""
        size, known = self._page_size, self._known[slots]
        columns = (known - 1) % size
        self._recent[slots, columns] = ids
        self._known[slots] = known + 1
        may_end = self._watched[slots] | (self._ends[ids] > 0)
        return Taken((columns == size - 1).nonzero()[0].tolist(), may_end.nonzero()[0].tolist())


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
