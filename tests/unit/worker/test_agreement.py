"""The digest, and whom it blames."""

from __future__ import annotations

import numpy as np
import pytest

from tpserve.worker.agreement import DIGEST_BYTES, Agreement, Disagreement

IDS = np.array([3, 1, 4], np.int64)


def after(*steps: tuple[bytes, np.ndarray]) -> Agreement:
    agreement = Agreement()
    for step, (plan, ids) in enumerate(steps, 1):
        agreement.update(step, plan, ids)
    return agreement


def blame(*ids_of_last_step: int) -> Disagreement:
    """What ranks find that sampled these ids in step 2."""
    ranks = [after((b"a", IDS), (b"b", np.array([i]))) for i in ids_of_last_step]
    with pytest.raises(Disagreement) as caught:
        ranks[0].check([rank.digest for rank in ranks])
    return caught.value


def test_check_same_history_passes() -> None:
    ranks = [after((b"a", IDS), (b"b", IDS[:0])) for _ in range(3)]
    assert len(ranks[0].digest) == DIGEST_BYTES
    ranks[0].check([rank.digest for rank in ranks])
    ranks[0].check([ranks[0].digest])


@pytest.mark.parametrize(
    "other",
    [after((b"b", IDS)), after((b"a", IDS[::-1])), after((b"a", IDS[:2])), after((b"a", IDS), (b"", IDS[:0]), (b"c", IDS))],
    ids=["plan", "order of ids", "an id less", "a step more"],
)
def test_digest_another_history_differs(other: Agreement) -> None:
    assert other.digest != after((b"a", IDS)).digest


def test_check_two_ranks_blames_both_and_names_the_step() -> None:
    found = blame(5, 6)
    assert (found.ranks, found.step, str(found)) == ((0, 1), 2, "ranks 0 and 1 disagree on the ids of step 2")


def test_check_majority_blames_the_odd_rank() -> None:
    found = blame(5, 5, 6)
    assert (found.ranks, found.step) == ((2,), 2)
    assert str(found) == "rank 2 disagrees with the others on the ids of step 2"


def test_check_majority_blames_several_odd_ranks() -> None:
    assert str(blame(5, 6, 5, 7, 5)) == "ranks 1 and 3 disagree with the others on the ids of step 2"


def test_check_without_majority_blames_all() -> None:
    assert blame(5, 5, 6, 6).ranks == (0, 1, 2, 3)
    assert blame(5, 6, 7).ranks == (0, 1, 2)
