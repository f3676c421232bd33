"""Where the time of a start went."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age_s() -> float:
    """Seconds since this process was started, its interpreter's start included (Linux, proc(5))."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22: starttime, in ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


class Timeline:
    """Phases one after the other; their seconds sum to the whole."""

    def __init__(self) -> None:
        self._began = time.monotonic() - process_age_s()
        self._marks: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        """The phase that began with the end of the last one is over."""
        self._marks.append((phase, time.monotonic()))

    def __str__(self) -> str:
        parts, last = [], self._began
        for phase, at in self._marks:
            parts.append(f"{phase} {at - last:.2f}")
            last = at
        return f"started in {last - self._began:.2f} s: " + ", ".join(parts)
