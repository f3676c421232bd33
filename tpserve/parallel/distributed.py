"""Collectives through torch.distributed: NCCL between GPUs, gloo where shared memory cannot be used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpserve.parallel.collectives import Counted, RankMissing

_GRACE_S = 1.0  # ranks that were there fail together: the first one's end breaks the others' connections
_POLL_S = 0.02


class TorchDistributed(Counted):
    """The default process group of torch.distributed, met through the file `store_path`.

    The order of sums is the backend's, the same at each run of one size. With NCCL a call only enqueues work, and
    its time limit is kept by NCCL's own watchdog, which ends the process.
    """

    def __init__(self, backend: Literal["gloo", "nccl"], rank: int, size: int, store_path: str, limit_s: float):
        super().__init__(rank, size)
        self._limit_s = limit_s
        self._sequence = 0
        self._store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]  # missing from its __all__
        if backend == "gloo":  # the ranks are on one host, whatever its name resolves to
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=limit_s)
        self._run(lambda: dist.init_process_group(backend, store=self._store, rank=rank, world_size=size, timeout=limit))

    def _sum_(self, x: Tensor) -> None:
        self._run(lambda: dist.all_reduce(x))

    def _stack(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._run(lambda: dist.all_gather(list(gathered.unbind()), x))
        return gathered

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            absent = self._absent()
            if not absent:
                raise
            raise RankMissing(absent, self._sequence, self._limit_s) from error
        self._sequence += 1

    def _absent(self) -> list[int]:
        """The ranks that do not report a failure of this same call: the backends do not say who was missing."""
        keys = [f"failed/{self._sequence}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "1")
        deadline = time.monotonic() + _GRACE_S
        while True:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(_POLL_S)
