"""Whether the server can answer: computed from what every process shows on the board."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpserve.board import Board
from tpserve.frontend.engine import Engine

_IDLE_AGE_S = 3.0  # idle processes beat at least twice a second


@dataclass(frozen=True)
class Health:
    """`status` is ready, loading, stalled or stopping."""

    status: str
    epoch: int
    ranks: list[dict[str, Any]]

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered."""
        return self.status == "ready"


def check(board: Board, engine: Engine, step_timeout_s: float) -> Health:
    """The state now. Ready: an epoch is up, and every process of it advances or idles."""
    beats = [board.read(record) for record in range(board.ranks + 1)]
    ranks = [
        {"rank": rank, "pid": beat.pid, "last_step": beat.last_step, "age_s": beat.age_s} for rank, beat in enumerate(beats[1:])
    ]
    limit_s = _IDLE_AGE_S if engine.is_idle else step_timeout_s
    if engine.refusal is not None:
        status = "stopping" if engine.epoch else "loading"
    elif all(beat.age_s is not None and beat.age_s <= limit_s for beat in beats):
        status = "ready"
    else:
        status = "stalled"
    return Health(status, engine.epoch, ranks)
