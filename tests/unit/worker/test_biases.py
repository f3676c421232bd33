"""Biases, banned stop ids and masks over any split of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.group import plan
from tests.passes import FORMS, passes
from tpserve.messages import Row
from tpserve.parallel.partition import Span
from tpserve.worker import masks
from tpserve.worker.biases import Biases

VOCAB = 100
SPANS = [Span(0, 100), Span(0, 32), Span(32, 96), Span(96, 100), Span(100, 100)]


def logits_of(span: Span) -> torch.Tensor:
    return torch.arange(3 * VOCAB, dtype=torch.float32).view(3, VOCAB)[:, span.start : span.stop].clone()


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_biases_are_added_to_the_ids_of_the_rank(span: Span) -> None:
    biases = Biases(8, span)
    first = dict(flags=Row.FIRST | Row.SAMPLE, ids=[1])
    biases.admit(plan(1, [dict(slot=5, bias_ids=[99, 0, 40], bias_values=[2.5, -100.0, 7.0], **first), dict(slot=2, **first)]))
    whole = torch.arange(3 * VOCAB, dtype=torch.float32).view(3, VOCAB)
    for id_, value in ((99, 2.5), (0, -100.0), (40, 7.0)):
        whole[1, id_] += value
    found = logits_of(span)
    biases.apply_(found, np.array([2, 5, 7]), np.zeros(3, np.int64))
    assert torch.equal(found, whole[:, span.start : span.stop])


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_stop_ids_are_banned_up_to_the_least_length(span: Span) -> None:
    biases = Biases(8, span)
    biases.admit(plan(1, [dict(slot=3, flags=Row.FIRST | Row.SAMPLE, ids=[1], min_len=10, stop_ids=[98, 1])]))
    for position, is_banned in ((9, True), (10, False)):
        found, whole = logits_of(span), logits_of(Span(0, VOCAB))
        biases.apply_(found, np.array([0, 3, 3]), np.full(3, position))
        if is_banned:
            whole[1:, [98, 1]] = -torch.inf
        assert torch.equal(found, whole[:, span.start : span.stop])


def test_next_owner_of_a_slot_has_nothing_of_the_last_one() -> None:
    biases, first = Biases(8, Span(0, VOCAB)), dict(slot=3, flags=Row.FIRST | Row.SAMPLE, ids=[1])
    biases.admit(plan(1, [dict(first, min_len=10, stop_ids=[5], bias_ids=[6], bias_values=[1.0])]))
    biases.admit(plan(2, [first]))
    found = logits_of(Span(0, VOCAB))
    biases.apply_(found, np.array([3, 3, 3]), np.zeros(3, np.int64))
    assert torch.equal(found, logits_of(Span(0, VOCAB)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_masks_leave_what_their_bits_allow(span: Span, form: str) -> None:
    allowed = np.random.default_rng(3).random((2, VOCAB)) < 0.3
    padded = np.pad(allowed, ((0, 0), (0, -VOCAB % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view("<u4")
    found, whole = logits_of(span), logits_of(Span(0, VOCAB))
    whole[[0, 2]] = torch.where(torch.from_numpy(allowed), whole[[0, 2]], -torch.inf)
    masks.apply_(found, np.array([0, 2]), words, span, passes(form))
    assert torch.equal(found, whole[:, span.start : span.stop])
