"""One step on one rank: plan in, ids out. The same code on every device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tpserve.kernels import reference as ops
from tpserve.kernels.interface import StepTokens
from tpserve.messages import NO_SCORES, Row, SampleMasks, Scores, StepPlan
from tpserve.model.decoder import Decoder
from tpserve.parallel.collectives import Collectives
from tpserve.worker import masks, scores
from tpserve.worker.biases import Biases
from tpserve.worker.lookup import Lookup
from tpserve.worker.passes import Passes
from tpserve.worker.penalties import Penalties
from tpserve.worker.sampler import Sampler, SamplingRows
from tpserve.worker.samples import Samples, num_right
from tpserve.worker.scripted import ScriptedDecoder
from tpserve.worker.slots import Slots, ragged

_ONE_EACH = np.empty(0, np.uint8)


@dataclass(frozen=True)
class RowLogits:
    """This rank's columns of the logits of one row's tokens: (count, columns) float32."""

    row: int
    values: Tensor


@dataclass(frozen=True)
class StepOutcome:
    """`ids` int64, -1 where not finite; `id_counts` (uint8), `drafted` and scores as in `StepResult`; `seconds` as
    `STEP_PARTS` less the first two; collectives made.
    """

    ids: np.ndarray
    id_counts: np.ndarray
    drafted: int
    scores: Scores
    target_scores: Scores
    logits: tuple[RowLogits, ...]
    seconds: tuple[float, ...]
    all_reduces: int
    all_gathers: int


class Runner:
    """Executes plans in order on a decoder, its KV pools and slots."""

    def __init__(
        self,
        decoder: Decoder | ScriptedDecoder,
        collectives: Collectives,
        sampler: Sampler,
        slots: Slots,
        penalties: Penalties,
        biases: Biases,
        pools: Tensor,
        passes: Passes,
        lookup: Lookup | None = None,
    ):
        """`pools` is (layers, 2, pages, kv_heads, page_size, head_dim) in the storage dtype; `lookup` drafts ids."""
        self.decoder = decoder
        self.forward = decoder.capture(pools)
        self.collectives = collectives
        self.sampler = sampler
        self.slots = slots
        self.penalties = penalties
        self.biases = biases
        self.pools = pools
        self.passes = passes
        self.lookup = lookup
        self.device = pools.device

    @torch.inference_mode()
    def step(self, plan: StepPlan, data: bytes, await_masks: Callable[[], tuple[SampleMasks, bytes]]) -> StepOutcome:
        """Run one plan; `data` is its wire form, which the ranks compare. The ids are the same on all ranks.

        `await_masks` waits for the plan's masks, which may still be in the making while the layers run.
        """
        collectives = self.collectives
        reduces, gathers = collectives.all_reduces, collectives.all_gathers
        began, before = time.perf_counter(), self._spent()
        if len(plan.copy_to):
            ops.copy_pages(self.pools, self._index(plan.copy_from), self._index(plan.copy_to))
        drafts = self.lookup.draft(plan, self.slots.lengths) if self.lookup and len(plan.most_drafts) else None
        tokens = self.slots.begin(plan, drafts)
        self._admit(plan)
        prepared = time.perf_counter()

        hidden = self.forward(tokens, self.slots.last_ids)
        logits = self._row_logits(plan, tokens, hidden)
        target_scores = self._target_scores(plan, tokens, hidden)
        samples = Samples.of(plan, tokens, drafts)
        last = self.decoder.logits(hidden.index_select(0, self._index(samples.places)))
        forwarded, spent = time.perf_counter(), self._spent()

        slots = tokens.slots[samples.rows]
        rows = self._sampling(slots, tokens.positions[samples.places] + 1)
        wanted = np.flatnonzero(rows.logprobs >= 0)
        raw = last[self._index(wanted)] if len(wanted) else last[:0]
        masked = np.flatnonzero(plan.flags[samples.rows] & Row.MASKED)
        if len(masked):
            message, mask_data = await_masks()
            masks.apply_(last, masked, message.words.reshape(len(masked), -1), self.decoder.shard.vocab, self.passes)
            data += mask_data
        self.biases.apply_(last, slots, rows.positions)
        self.penalties.apply_(last, slots, lambda: samples.drafts_before(tokens))
        sampled, found = self.sampler.sample(last, rows, plan.step, data, raw)
        ids, id_counts, found = self._take(tokens, samples, rows.positions, sampled, found)
        ended, waited_s = time.perf_counter(), self._spent()[-2]
        kinds = spent - before
        other_s = forwarded - prepared - kinds.sum()
        sample_s = ended - forwarded - (waited_s - spent[-2])
        seconds = (prepared - began, *kinds[:3], other_s, waited_s - before[-2], kinds[-1], sample_s)
        counts = collectives.all_reduces - reduces, collectives.all_gathers - gathers
        drafted = 0 if drafts is None else len(drafts.ids)
        return StepOutcome(ids, id_counts, drafted, found, target_scores, logits, seconds, *counts)

    def _admit(self, plan: StepPlan) -> None:
        self.penalties.admit(plan)
        self.biases.admit(plan)
        if self.lookup:
            self.lookup.admit(plan)

    def _take(
        self, tokens: StepTokens, samples: Samples, positions: np.ndarray, sampled: Tensor, found: Scores
    ) -> tuple[np.ndarray, np.ndarray, Scores]:
        """End the step. Of the ids sampled for these positions: those that stand, how many of each row, and scores."""
        ids, slots, id_counts = sampled.cpu().numpy(), tokens.slots[samples.rows], _ONE_EACH
        if samples.counts is None:
            self.slots.end(tokens)
        else:
            id_counts = num_right(ids, tokens.ids[samples.places], samples.counts)
            row, offset = ragged(samples.counts)
            self._end_drafts(tokens, samples.rows[offset == 0], samples.counts, id_counts)
            stands = offset < id_counts[row]
            ids, slots, positions = ids[stands], slots[stands], positions[stands]
            if len(found.counts):
                found = replace(found, counts=found.counts[stands])  # rows with drafts have no scores
        last = slice(None) if samples.counts is None else np.cumsum(id_counts) - 1
        self.slots.last_ids.index_copy_(0, self._index(slots[last]), self._index(ids[last].clip(0)))
        self.penalties.count(slots, ids)
        if self.lookup:
            self.lookup.add(slots, positions, ids)
        return ids, id_counts.astype(np.uint8), found

    def _end_drafts(self, tokens: StepTokens, rows: np.ndarray, counts: np.ndarray, id_counts: np.ndarray) -> None:
        """Of the `counts` ids of each of these rows `id_counts` stand; what was computed of wrong drafts is of no use."""
        num_wrong = np.zeros(len(tokens.slots), np.int64)
        num_wrong[rows] = counts - id_counts
        self.slots.end(tokens, num_wrong)
        drafted = counts > 1
        assert self.lookup
        self.lookup.learn(tokens.slots[rows[drafted]], counts[drafted] - 1, id_counts[drafted] - 1)

    def _spent(self) -> np.ndarray:
        """Seconds in each of the kernels' KINDS; what waits for other ranks outside of kernels waits as well."""
        spent = np.array(self.decoder.seconds)
        spent[-2] += self.collectives.seconds
        return spent

    def _sampling(self, slots: np.ndarray, positions: np.ndarray) -> SamplingRows:
        state = self.slots
        return SamplingRows(
            temperatures=state.temperatures[slots],
            top_ks=state.top_ks[slots],
            top_ps=state.top_ps[slots],
            min_ps=state.min_ps[slots],
            seeds=state.seeds[slots],
            choices=state.choices[slots],
            positions=positions,
            logprobs=state.logprobs[slots],
        )

    def _target_scores(self, plan: StepPlan, tokens: StepTokens, hidden: Tensor) -> Scores:
        """Of the next ids of each SCORE row's first tokens."""
        rows = np.flatnonzero(plan.flags & Row.SCORE)
        if not len(rows):
            return NO_SCORES
        row, offset = ragged(plan.target_counts.astype(np.int64))
        places = (tokens.last + 1 - tokens.counts)[rows][row] + offset
        tops, targets = plan.target_tops.astype(np.int64)[row], plan.targets.astype(np.int64)
        head, vocab = self.decoder.logits, self.decoder.shard.vocab
        states = hidden.index_select(0, self._index(places))
        return scores.of_targets(head, states, targets, tops, vocab, self.collectives, self.passes)

    def _row_logits(self, plan: StepPlan, tokens: StepTokens, hidden: Tensor) -> tuple[RowLogits, ...]:
        rows = np.flatnonzero(plan.flags & Row.LOGITS)
        spans = [(int(row), int(tokens.last[row] + 1 - tokens.counts[row]), int(tokens.last[row] + 1)) for row in rows]
        return tuple(RowLogits(row, self.decoder.logits(hidden[first:stop]).clone()) for row, first, stop in spans)

    def _index(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.device)
