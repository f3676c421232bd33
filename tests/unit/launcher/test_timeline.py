from __future__ import annotations

import re
import time

from launcher.timeline import Timeline, process_age_s


def test_process_age_grows_with_the_clock() -> None:
    first, at = process_age_s(), time.monotonic()
    while process_age_s() < first + 0.05:
        assert time.monotonic() - at < 5
    assert time.monotonic() - at >= 0.03  # the kernel counts in hundredths


def test_parts_of_a_timeline_sum_to_the_whole() -> None:
    timeline = Timeline()
    for phase in ("checks", "weights", "pools"):
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            pass
        timeline.end(phase)
    whole, *parts = map(float, re.findall(r"[0-9]+\.[0-9]+", str(timeline)))
    assert len(parts) == 3
    assert min(parts) >= 0.02
    assert abs(sum(parts) - whole) < 0.02  # each is rounded to hundredths
