"""The threads in which bodies are understood, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tpserve.frontend.errors import Unavailable

LARGE_BYTES = 64 * 1024
_COUNT = 2  # of each kind

_T = TypeVar("_T")


class BodyThreads:
    """Large bodies, each of which may take seconds of rendering and tokenizing, have threads of their own: so no small
    one waits behind them.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_COUNT, "bodies")
        self._large = ThreadPoolExecutor(_COUNT, "large-bodies")

    async def run(self, body: bytes, work: Callable[[bytes], _T]) -> _T:
        """What `work` makes of the body. Raises what it raises, and Unavailable."""
        threads = self._large if len(body) > LARGE_BYTES else self._small
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work, body)
        except asyncio.CancelledError:  # by uvicorn, which waits no longer when the server ends
            raise Unavailable("the server is shutting down") from None

    def close(self) -> None:
        """Take no more; what has begun comes to its end, and nobody waits for it."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
