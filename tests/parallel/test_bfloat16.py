"""The demo model in bfloat16 leaves the float32 reference only where the two best logits are within bfloat16's resolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.group import WorkerGroup
from tpserve.messages import Row
from tpserve.preflight import resolve
from tpserve.settings import Settings

pytestmark = pytest.mark.slow

PAGE = 16
MOST_TOKENS = 96

# Prompts, and greedy ids of transformers with these weights in float32 arithmetic.
# fmt: off
REFERENCES = {
    "counting": (
        [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
        [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216, 33, 34, 28],
    ),
    "sun": (
        [504, 2388, 13685, 281, 260],
        [6376, 28, 17462, 253, 10908, 14654, 690, 260, 15361, 30, 378, 2139, 282, 260, 2251, 314, 253, 27505, 23439,
         28, 253, 9154, 13151, 282],
    ),
    "capital": (
        [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
         2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
        [504, 3575, 282, 4649, 314, 7042, 30, 2],
    ),
}
# fmt: on


def group_of(dtype: str, ranks: int, folder: Path) -> WorkerGroup:
    settings = Settings.model_validate(
        {
            "model": str(folder),
            "tp": ranks,
            "dtype": dtype,
            "device": "cpu",
            "kv_cache_memory": 2**26,
            "max_model_len": MOST_TOKENS,
        }
    )
    return WorkerGroup(resolve(settings))


def greedy(group: WorkerGroup, prompt: list[int], count: int) -> list[int]:
    """So many greedy ids after the prompt."""
    pages = -(-len(prompt) // PAGE)
    first = {"slot": 0, "count": len(prompt), "ids": prompt, "pages": range(pages), "flags": Row.FIRST | Row.SAMPLE}
    ids = group.run([first]).result.ids.tolist()
    while len(ids) < count:
        place = len(prompt) + len(ids) - 1
        new = [place // PAGE] if place % PAGE == 0 else []
        ids += group.run([{"slot": 0, "pages": new, "flags": Row.SAMPLE | Row.FROM_SLOT}]).result.ids.tolist()
    return ids


@pytest.fixture(scope="module")
def exact(demo_model: Path) -> Iterator[WorkerGroup]:
    with group_of("float32", 1, demo_model) as group:
        yield group


def two_best(exact: WorkerGroup, ids: list[int]) -> np.ndarray:
    """The two greatest float32 logits after these ids, ascending."""
    row = {"slot": 0, "count": len(ids), "ids": ids, "pages": range(-(-len(ids) // PAGE)), "flags": Row.FIRST | Row.LOGITS}
    return np.sort(exact.run([row]).logits[0][-1])[-2:]


def test_float32_gives_the_reference_ids(exact: WorkerGroup) -> None:
    for prompt, expected in REFERENCES.values():
        assert greedy(exact, prompt, len(expected)) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bfloat16_differs_first_where_the_best_two_are_within_its_resolution(
    exact: WorkerGroup, demo_model: Path, ranks: int, record_property: Callable[[str, str], None]
) -> None:
    same = 0
    with group_of("bfloat16", ranks, demo_model) as group:
        for name, (prompt, expected) in REFERENCES.items():
            ids = greedy(group, prompt, len(expected))
            differs = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b), None)
            if differs is None:
                same += 1
                continue
            second, best = two_best(exact, prompt + expected[:differs])
            resolution = 2.0 ** (math.floor(math.log2(best)) - 7)  # 8 bits of significand
            record_property(name, f"token {differs}: margin {best - second:.4f}, resolution {resolution:.4f}")
            assert best - second < resolution
    assert same >= 2
