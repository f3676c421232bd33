"""What real workers take, against the arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.group import WorkerGroup
from tpserve import memory
from tpserve.deployment import Deployment
from tpserve.preflight import resolve
from tpserve.settings import Settings

MIB = 1024**2


def held(deployment: Deployment) -> int:
    """Bytes of the proportional set sizes of all workers, once they are ready for plans."""
    with WorkerGroup(deployment) as group:
        pids = [number(f"/proc/self/fdinfo/{child.pidfd}", "Pid") for child in group.children]
        return 1024 * sum(number(f"/proc/{pid}/smaps_rollup", "Pss") for pid in pids)


def number(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(file).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_workers_with_a_larger_pool_and_buffers_hold_as_much_more_as_the_arithmetic_says(tiny_model: Path) -> None:
    small = resolve(Settings(model=str(tiny_model), tp=2, kv_cache_memory=MIB))
    large = resolve(Settings(model=str(tiny_model), tp=2, kv_cache_memory=256 * MIB, max_num_batched_tokens=32768))
    if large.native is None:
        pytest.skip("plain torch makes its buffers at each step")
    less, more = (memory.host_memory(deployment.memory).total for deployment in (small, large))
    assert abs(held(large) - held(small) - (more - less)) < 0.05 * (more - less)
