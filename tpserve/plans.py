"""What the coordinator sends to the workers: a plan for each step, and masks for its rows under a grammar."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpserve.codec import U64, F32s, I32s, MessageError, U8s, U16s, U32s, U64s, adds_up, empty, same_length


class Row:
    """Flags of a row of a `StepPlan`: plain integers, since numpy takes ten times as long over members of an enum."""

    SAMPLE = 1  # an id is sampled after the row's last token
    FIRST = 2  # first chunk of a slot: the slot's old state is dropped, its parameters are in the plan
    FROM_SLOT = 4  # the input is the id that the slot sampled last (count is 1)
    LOGITS = 8  # every rank answers with its slice of the logits of all the row's tokens
    MASKED = 16  # sampled under a grammar: the ids allowed come in the step's `SampleMasks`
    SCORE = 32  # logprobs of ids that are given are wanted: the row's `targets`
    SPECULATE = 64  # a FROM_SLOT row that may be longer: ids that the worker drafts come in behind the slot's own


@dataclass(frozen=True, slots=True, eq=False)
class FirstRows:
    """What a plan says of the slots that it gives to new sequences: one entry per FIRST row, in row order.

    `starts` is the position of the row's first token (a prefix hit precedes it), then come the slot's parameters, and of its
    prompt's ids how many there are. `past_counts[f]` of the ids in `past` (flat, in row order) are all that the slot has, its
    prompt's first; none where nothing looks back at them. `bias_counts[f]` of `bias_ids` have `bias_values` added to their
    logits. At positions before `min_lens[f]`, `stop_counts[f]` of the ids in `stop_ids` are not sampled. `logprobs[f]` is as
    in `Submit`.
    """

    starts: U32s
    seeds: U64s
    choices: U16s
    temperatures: F32s
    top_ks: U32s
    top_ps: F32s
    min_ps: F32s
    repetition_penalties: F32s
    presence_penalties: F32s
    frequency_penalties: F32s
    prompt_counts: U32s
    logprobs: I32s
    min_lens: U32s
    past_counts: U32s
    bias_counts: U32s
    stop_counts: U32s
    past: I32s
    bias_ids: I32s
    bias_values: F32s
    stop_ids: I32s

    def __len__(self) -> int:
        return len(self.starts)

    def __post_init__(self) -> None:
        same_length(
            self, "starts", "seeds", "choices", "temperatures", "top_ks", "top_ps", "min_ps", "repetition_penalties",
            "presence_penalties", "frequency_penalties", "prompt_counts", "logprobs", "min_lens", "past_counts",
            "bias_counts", "stop_counts",
        )  # fmt: skip
        same_length(self, "bias_ids", "bias_values")
        adds_up(self, past_counts="past", bias_counts="bias_ids", stop_counts="stop_ids")


NO_FIRST_ROWS: FirstRows = empty(FirstRows)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step for all ranks. Arrays are parallel per row unless said otherwise.

    A row advances one slot by `counts` tokens. `page_counts[r]` of the ids in `pages` (flat, in row order) are appended to the
    slot's page table before the step. `ids` (flat, in row order) holds the input ids of the rows that are not FROM_SLOT.
    `first_rows` is about the FIRST rows.

    `target_counts` and `target_tops` have one entry per SCORE row: the first so many of the row's tokens have the next ids in
    `targets` (flat, in row order), whose logprobs are wanted beside those of so many likeliest ids. Pages `copy_to` are
    overwritten with pages `copy_from` before any key or value of this step is written.

    `most_drafts` has one entry per SPECULATE row: it may have so many ids behind its own, whose `counts` is 1. An id is sampled
    after each; those that follow the first draft that was wrong are dropped, and so the slot's length is known to workers only.
    """

    step: U64
    slots: U16s
    counts: U32s
    flags: U8s
    page_counts: U32s
    pages: I32s
    ids: I32s
    first_rows: FirstRows
    target_counts: U32s
    target_tops: U32s
    targets: I32s
    most_drafts: U8s
    copy_from: I32s
    copy_to: I32s

    def __post_init__(self) -> None:
        same_length(self, "slots", "counts", "flags", "page_counts")
        same_length(self, "target_counts", "target_tops")
        same_length(self, "copy_from", "copy_to")
        adds_up(self, target_counts="targets")
        there = (len(self.first_rows), len(self.target_counts), len(self.most_drafts), len(self.pages), len(self.ids))
        if (wanted := self._wanted()) != there:
            raise MessageError(f"StepPlan: rows want {wanted} first rows, targets, drafts, pages and ids, not {there}")

    def _wanted(self) -> tuple[int, ...]:
        """How much the rows make of what is not parallel to them."""
        among = int(np.bitwise_or.reduce(self.flags))  # mostly all rows decode: what no row has need not be counted

        def count(flag: int) -> int:
            return int(np.count_nonzero(self.flags & flag)) if among & flag else 0

        num_pages, num_tokens = int(self.page_counts.sum()), int(self.counts.sum())
        return count(Row.FIRST), count(Row.SCORE), count(Row.SPECULATE), num_pages, num_tokens - count(Row.FROM_SLOT)


@dataclass(frozen=True, slots=True, eq=False)
class SampleMasks:
    """The ids that the MASKED rows of a step may sample; comes between that step's plan and the next.

    `words` is (MASKED rows, ceil(vocabulary / 32)), flat, in row order: bit i of word w is id 32 w + i.
    """

    step: U64
    words: U32s
