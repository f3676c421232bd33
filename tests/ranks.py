"""Ranks as real processes, for tests of what they do together. They stay up and join one group after the other."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.passes import BEST, passes
from tpserve.messages import Scores
from tpserve.parallel import segment
from tpserve.parallel.backends import Kind, open_collectives
from tpserve.parallel.collectives import Collectives
from tpserve.parallel.partition import Span
from tpserve.worker.sampler import Sampler, SamplingRows
from tpserve.worker.scores import of_targets

LIMIT_S = 60.0  # how long anything may take, if no group is told otherwise

Job = Callable[..., Any]


class Failed(Exception):
    """A job raised on a rank: `kind` is the exception's class name, `details` its attributes."""

    def __init__(self, text: str, kind: str, details: dict[str, Any]):
        super().__init__(text, kind, details)
        self.kind = kind
        self.details = details


class Ranks:
    """`count` processes, of which the first `size` are the ranks of the group that was opened last."""

    def __init__(self, count: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once for all
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self.size = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def open(self, size: int, kind: Kind = "shared_memory", limit_s: float = LIMIT_S, capacity_bytes: int = 1 << 16) -> None:
        """Let the first `size` processes join a new group."""
        self.size = size
        self._groups += 1
        memory_fd = segment.create(size, capacity_bytes)
        memory = f"/proc/{os.getpid()}/fd/{memory_fd}"
        self.run(join, kind, size, limit_s, f"{self._folder.name}/{self._groups}", memory)
        os.close(memory_fd)

    def run(self, job: Job, *args: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """What `job(member, *args)` returns on each rank (all, if not said). Raises the first one's Failed."""
        answers = self.outcomes(job, *args, ranks=ranks)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer
        return answers

    def outcomes(self, job: Job, *args: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """As `run`, with Failed in place of what a rank's job did not return."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        for rank in chosen:
            self._pipes[rank].send((rank, job, args))
        return [self._receive(rank) for rank in chosen]

    def _receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(2 * LIMIT_S), f"rank {rank} gave no answer"
        return self._pipes[rank].recv()

    def close(self) -> None:
        """End the processes."""
        for process, pipe in zip(self._processes, self._pipes):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self._folder.cleanup()


class _Member:
    """A process's place in the group that it joined last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.collectives: Collectives


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    member = None
    while True:
        rank, job, args = pipe.recv()
        member = member or _Member(rank)
        try:
            answer = job(member, *args)
        except Exception as error:
            answer = Failed(f"rank {rank}: {type(error).__name__}: {error}", type(error).__name__, vars(error))
        pipe.send(answer)


# Jobs: what ranks can be told to do. Each gets the same arguments on all ranks and takes its own part of them.


def join(member: _Member, kind: Kind, size: int, limit_s: float, store_path: str, memory: str) -> None:
    """Join a group; it is the one of all jobs that follow."""
    if dist.is_initialized():
        dist.destroy_process_group()
    memory_fd = os.open(memory, os.O_RDWR)
    member.collectives = open_collectives(kind, member.rank, size, limit_s=limit_s, store_path=store_path, memory_fd=memory_fd)
    os.close(memory_fd)


def reduce(member: _Member, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum, by all_reduce_."""
    x = torch.from_numpy(parts[member.rank].copy())
    member.collectives.all_reduce_(x)
    return x.numpy()


def pinned_reduce_many(member: _Member, count: int, seed: int, cores: Sequence[int]) -> list[float]:
    """`reduce_many`, pinned to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[member.rank]})
    try:
        return reduce_many(member, count, seed)
    finally:
        os.sched_setaffinity(0, before)


def gather(member: _Member, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts, by all_gather."""
    return member.collectives.all_gather(torch.from_numpy(parts[member.rank].copy())).numpy()


def reduce_many(member: _Member, count: int, seed: int) -> list[float]:
    """One number of each of `count` sums of parts that all ranks can make; every other is of another size."""
    rng = np.random.default_rng(seed)
    out = []
    for turn in range(count):
        parts = rng.standard_normal((member.collectives.size, 3 + 500 * (turn % 2))).astype(np.float32)
        out.append(float(reduce(member, parts)[-1]))
    return out


def counts(member: _Member) -> tuple[int, int]:
    """(all_reduces, all_gathers) since the group was joined."""
    return member.collectives.all_reduces, member.collectives.all_gathers


def sample(
    member: _Member,
    steps: Sequence[tuple[np.ndarray, SamplingRows]],
    starts: Sequence[int],
    corrupt: tuple[int, int] | None = None,
    form: str = BEST,
) -> list[np.ndarray | str]:
    """The ids of each step, given as (whole logits, rows); or of a step that fails the error's text, and then no more."""
    sampler = Sampler(member.collectives, starts[member.rank], corrupt, passes(form))
    out: list[np.ndarray | str] = []
    for step, (logits, rows) in enumerate(steps, 1):
        try:
            part = _part(member, logits, starts)
            ids, _ = sampler.sample(part, rows, step, b"plan %d" % step, part[rows.logprobs >= 0])
            out.append(ids.numpy())
        except RuntimeError as error:
            return [*out, f"{type(error).__name__}: {error}"]
    return out


def score(
    member: _Member, logits: np.ndarray, raw: np.ndarray, rows: SamplingRows, starts: Sequence[int], form: str = BEST
) -> tuple[np.ndarray, Scores]:
    """One step's ids and scores; `raw` are the whole logits before they were changed to `logits`."""
    sampler, part = Sampler(member.collectives, starts[member.rank], passes=passes(form)), _part(member, raw, starts)
    ids, scores = sampler.sample(_part(member, logits, starts), rows, 1, b"", part[rows.logprobs >= 0])
    return ids.numpy(), scores


def score_targets(
    member: _Member, logits: np.ndarray, targets: np.ndarray, tops: np.ndarray, starts: Sequence[int], form: str = BEST
) -> tuple[Scores, int]:
    """The scores of targets, a row of the whole logits before each, and the gathers that they took."""
    start, stop = [*starts, logits.shape[1]][member.rank :][:2]
    gathers = member.collectives.all_gathers
    hidden = torch.arange(len(logits))
    whole = torch.from_numpy(logits)
    scores = of_targets(
        lambda rows: whole[rows, start:stop], hidden, targets, tops, Span(start, stop), member.collectives, passes(form)
    )
    return scores, member.collectives.all_gathers - gathers


def _part(member: _Member, logits: np.ndarray, starts: Sequence[int]) -> torch.Tensor:
    """The columns from this rank's start to the next one's."""
    start, stop = [*starts, logits.shape[1]][member.rank :][:2]
    return torch.from_numpy(logits[:, start:stop].copy())
