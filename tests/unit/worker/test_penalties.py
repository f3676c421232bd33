"""Penalties by their definition, over any split of the vocabulary, and what plans and samples make of the past."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.group import plan
from tests.passes import FORMS, passes
from tpserve.messages import Row
from tpserve.parallel.partition import Span
from tpserve.worker.penalties import Penalties

VOCAB = 40
SLOTS = 8


def make(start: int = 0, stop: int = VOCAB, form: str = "torch") -> Penalties:
    return Penalties(SLOTS, Span(start, stop), passes(form))


def first(slot: int, prompt: list[int], sampled: list[int] | None = None, **penalties: float) -> dict[str, Any]:
    """A slot's first chunk: its last id, behind a prefix hit."""
    ids = [*prompt, *(sampled or [])]
    row = dict(slot=slot, flags=Row.FIRST | Row.SAMPLE, ids=ids[-1:], start=len(ids) - 1, **penalties)
    return row | (dict(past=ids, prompt_count=len(prompt)) if penalties else {})


def make_logits(rows: int, seed: int = 0) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def applied(penalties: Penalties, logits: np.ndarray, slots: list[int]) -> np.ndarray:
    out = torch.from_numpy(logits.copy())
    penalties.apply_(out, np.array(slots))
    return out.numpy()


def definition(
    logits: np.ndarray,
    prompt: list[int],
    sampled: list[int],
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> np.ndarray:
    """One row, id by id, in float64."""
    out, counts = logits.astype(np.float64), Counter(sampled)
    for id_ in {*prompt, *sampled}:
        out[id_] = out[id_] / repetition_penalty if out[id_] > 0 else out[id_] * repetition_penalty
    for id_, count in counts.items():
        out[id_] -= frequency_penalty * count + presence_penalty
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    ],
    ids=str,
)
def test_logits_of_ids_that_occurred_are_penalized_by_the_definition(form: str, penalties: dict[str, float]) -> None:
    prompt, sampled, logits = [3, 3, 5, 39, 0], [5, 7, 7, 7], make_logits(1)
    made = make(form=form)
    made.admit(plan(1, [first(2, prompt, sampled, **penalties)]))
    np.testing.assert_allclose(applied(made, logits, [2])[0], definition(logits[0], prompt, sampled, **penalties), rtol=1e-6)


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids, logits = [3, 3, 5, 39, 0, 7], make_logits(1)
    made = make()
    made.admit(plan(1, [first(0, ids, repetition_penalty=1.3)]))
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), torch.from_numpy(logits.copy()))
    np.testing.assert_array_equal(applied(made, logits, [0]), theirs.numpy())


@pytest.mark.parametrize("form", FORMS)
def test_sampled_ids_count_from_the_next_step_on(form: str) -> None:
    made, logits = make(form=form), make_logits(1)
    made.admit(plan(1, [first(0, [1, 2], presence_penalty=0.5, frequency_penalty=0.25)]))
    np.testing.assert_array_equal(applied(made, logits, [0]), logits)  # a prompt is not penalized by these
    for id_ in (9, 2, 9):
        made.count(np.array([0]), np.array([id_]))
    expected = definition(logits[0], [1, 2], [9, 2, 9], presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_allclose(applied(made, logits, [0])[0], expected, rtol=1e-6)


def test_past_told_at_once_is_the_past_counted_one_by_one() -> None:
    """As after preemption or a resume, in the middle of an answer."""
    rng, penalties = np.random.default_rng(1), {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.125}
    prompt, sampled = rng.integers(0, VOCAB, 30).tolist(), rng.integers(0, VOCAB, 50).tolist()
    counted, told, logits = make(), make(), make_logits(1)
    counted.admit(plan(1, [first(4, prompt, **penalties)]))
    for id_ in sampled:
        counted.count(np.array([4]), np.array([id_]))
    told.admit(plan(1, [first(6, prompt, sampled, **penalties)]))
    np.testing.assert_array_equal(applied(counted, logits, [4]), applied(told, logits, [6]))


@pytest.mark.parametrize("form", FORMS)
def test_each_row_has_its_own_penalties_and_rows_without_are_left_alone(form: str) -> None:
    made, logits = make(form=form), make_logits(5)
    rows = [
        first(3, [1, 2]),
        first(5, [4, 4, 4], [8, 8], repetition_penalty=1.5),
        first(0, [6]),
        first(7, [39], [1, 1], frequency_penalty=2.0),
    ]
    made.admit(plan(1, rows))
    out = applied(made, logits, [7, 3, 5, 0, 1])
    np.testing.assert_array_equal(out[[1, 3, 4]], logits[[1, 3, 4]])
    np.testing.assert_allclose(out[0], definition(logits[0], [39], [1, 1], frequency_penalty=2.0), rtol=1e-6)
    np.testing.assert_allclose(out[2], definition(logits[2], [4], [8], repetition_penalty=1.5), rtol=1e-6)


@pytest.mark.parametrize("starts", [(0, 32), (0, 16, 32), (0, 0, 40), (0, 40, 40)])
def test_slices_of_the_vocabulary_are_penalized_as_the_whole(starts: tuple[int, ...]) -> None:
    row = first(1, [0, 15, 16, 31], [32, 39, 15, 15], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    logits, parts = make_logits(3), []
    for start, stop in zip(starts, (*starts[1:], VOCAB)):
        made = make(start, stop)
        made.admit(plan(1, [row]))
        made.count(np.array([1, 2]), np.array([20, 20]))
        parts.append(applied(made, logits[:, start:stop], [1, 2, 0]))
    whole = make()
    whole.admit(plan(1, [row]))
    whole.count(np.array([1, 2]), np.array([20, 20]))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), applied(whole, logits, [1, 2, 0]))


def test_reuse_of_a_slot_drops_its_past() -> None:
    made, logits = make(), make_logits(1)
    made.admit(plan(1, [first(1, [2, 3], [4], repetition_penalty=2.0)]))
    made.admit(plan(2, [first(1, [5])]))
    made.count(np.array([1]), np.array([6]))
    np.testing.assert_array_equal(applied(made, logits, [1]), logits)
    made.admit(plan(3, [first(1, [7], presence_penalty=1.0)]))
    np.testing.assert_array_equal(applied(made, logits, [1]), logits)


def test_row_that_was_not_finite_counts_no_id() -> None:
    made, logits = make(), make_logits(1)
    made.admit(plan(1, [first(1, [2], presence_penalty=1.0)]))
    made.count(np.array([1]), np.array([-1]))
    np.testing.assert_array_equal(applied(made, logits, [1]), logits)


@pytest.mark.parametrize("form", FORMS)
def test_logits_that_are_not_finite_stay_so(form: str) -> None:
    made, logits = make(form=form), make_logits(1)
    logits[0, :3] = np.nan, np.inf, -np.inf
    made.admit(plan(1, [first(1, [0, 1, 2], [0, 1, 2], repetition_penalty=1.3, frequency_penalty=1.0)]))
    np.testing.assert_array_equal(applied(made, logits, [1])[0, :3], logits[0, :3])


class _Counting(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_rows_without_penalties_cost_no_operation_and_others_share_theirs() -> None:
    made, logits = Penalties(256, Span(0, 50_000)), torch.zeros(256, 50_000)
    made.admit(plan(1, [first(slot, [1, 2, 3]) for slot in range(256)]))
    with _Counting() as none:
        made.apply_(logits, np.arange(256))
    assert none.operations == 0
    made.admit(plan(2, [first(slot, [1, 2, 3], repetition_penalty=1.1) for slot in range(8)]))
    with _Counting() as eight:
        made.apply_(logits, np.arange(256))
    made.admit(plan(3, [first(slot, [1, 2, 3], repetition_penalty=1.1) for slot in range(128)]))
    with _Counting() as many:
        made.apply_(logits, np.arange(256))
    assert eight.operations == many.operations < 20


@pytest.mark.parametrize("split", [VOCAB, 8])
def test_drafts_before_an_id_count_as_if_they_were_sampled(split: int) -> None:
    values = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    prompt, logits = [3, 3, 5], make_logits(3)
    made = make(stop=split)
    made.admit(plan(1, [first(2, prompt, [7], **values)]))
    out = torch.from_numpy(logits[:, :split].copy())
    made.apply_(out, np.array([2, 2, 2]), lambda: {1: np.array([7]), 2: np.array([7, 30])})
    for row, drafts in enumerate(([], [7], [7, 30])):
        expected = definition(logits[row], prompt, [7, *drafts], **values)[:split]
        np.testing.assert_allclose(out.numpy()[row], expected, rtol=1e-6)


def test_past_that_only_drafts_want_is_not_penalized() -> None:
    made, logits = make(), make_logits(1)
    made.admit(plan(1, [dict(slot=2, flags=Row.FIRST | Row.SAMPLE, ids=[4], past=[4], prompt_count=1)]))
    assert (applied(made, logits, [2]) == logits).all()
