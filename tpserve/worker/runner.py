"""One step on one rank: plan in, ids out. The same code on every device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
from tpserve.worker.passes import Passes
from tpserve.worker.penalties import Penalties
from tpserve.worker.sampler import Sampler, SamplingRows
from tpserve.worker.scripted import ScriptedDecoder
from tpserve.worker.slots import Slots, ragged


@dataclass(frozen=True)
class RowLogits:
    """This rank's columns of the logits of one row's tokens: (count, columns) float32."""

    row: int
    values: Tensor


@dataclass(frozen=True)
class StepOutcome:
    """`ids` (SAMPLE rows,) int64, -1 where not finite; scores as in `StepResult`; `seconds` as `STEP_PARTS` less the
    first two; collectives made.
    """

    ids: np.ndarray
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
    ):
        """`pools` is (layers, 2, pages, page_size, kv_heads, head_dim) in the storage dtype."""
        self.decoder = decoder
        self.forward = decoder.capture(pools)
        self.collectives = collectives
        self.sampler = sampler
        self.slots = slots
        self.penalties = penalties
        self.biases = biases
        self.pools = pools
        self.passes = passes
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
        tokens = self.slots.begin(plan)
        self.penalties.admit(plan)
        self.biases.admit(plan)
        prepared = time.perf_counter()

        hidden = self.forward(tokens, self.slots.last_ids)
        self.slots.end(tokens)
        logits = self._row_logits(plan, tokens, hidden)
        target_scores = self._target_scores(plan, tokens, hidden)
        sampled = np.flatnonzero(plan.flags & Row.SAMPLE)
        last = self.decoder.logits(hidden.index_select(0, self._index(tokens.last[sampled])))
        forwarded, spent = time.perf_counter(), self._spent()

        slots, rows = tokens.slots[sampled], self._sampling(tokens, sampled)
        wanted = np.flatnonzero(rows.logprobs >= 0)
        raw = last[self._index(wanted)] if len(wanted) else last[:0]
        masked = np.flatnonzero(plan.flags[sampled] & Row.MASKED)
        if len(masked):
            message, mask_data = await_masks()
            masks.apply_(last, masked, message.words.reshape(len(masked), -1), self.decoder.shard.vocab, self.passes)
            data += mask_data
        self.biases.apply_(last, slots, rows.positions)
        self.penalties.apply_(last, slots)
        ids, found = self.sampler.sample(last, rows, plan.step, data, raw)
        self.slots.last_ids.index_copy_(0, self._index(slots), ids.clamp_min(0))
        host_ids = ids.cpu().numpy()
        self.penalties.count(slots, host_ids)
        sample_s = time.perf_counter() - forwarded - (self._spent()[-2] - spent[-2])
        kinds = spent - before
        other_s = forwarded - prepared - kinds.sum()
        seconds = (prepared - began, *kinds[:3], other_s, self._spent()[-2] - before[-2], kinds[-1], sample_s)
        counts = collectives.all_reduces - reduces, collectives.all_gathers - gathers
        return StepOutcome(host_ids, found, target_scores, logits, seconds, *counts)

    def _spent(self) -> np.ndarray:
        """Seconds in each of the kernels' KINDS; what waits for other ranks outside of kernels waits as well."""
        spent = np.array(self.decoder.seconds)
        spent[-2] += self.collectives.seconds
        return spent

    def _sampling(self, tokens: StepTokens, sampled: np.ndarray) -> SamplingRows:
        slots, state = tokens.slots[sampled], self.slots
        return SamplingRows(
            temperatures=state.temperatures[slots],
            top_ks=state.top_ks[slots],
            top_ps=state.top_ps[slots],
            min_ps=state.min_ps[slots],
            seeds=state.seeds[slots],
            choices=state.choices[slots],
            positions=tokens.starts[sampled] + tokens.counts[sampled],
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
