"""A group of real worker processes, driven by real plans: the test takes the places of launcher and coordinator."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zmq

from launcher import rundir
from tests.zygote import Worker, zygote
from tpserve import board
from tpserve.child import Charge
from tpserve.deployment import Deployment
from tpserve.messages import (
    Failure,
    FirstRows,
    Hello,
    Loaded,
    Logits,
    Message,
    Ready,
    Row,
    SampleMasks,
    Serve,
    StepPlan,
    StepResult,
    decode,
    encode,
)
from tpserve.parallel import segment

LIMIT_S = 60.0
EPOCH = 3


class WorkerFailed(Exception):
    """A worker reported a failure or died."""


def plan(step: int, rows: list[dict[str, Any]], copies: list[tuple[int, int]] | None = None) -> StepPlan:
    """A plan of rows given as dicts: slot, and of count, flags, pages, ids, and for FIRST rows start, parameters, past
    and so on, for SCORE rows targets, for SPECULATE rows most_drafts.
    """
    first = [row for row in rows if row["flags"] & Row.FIRST]
    scored = [row for row in rows if row["flags"] & Row.SCORE]
    speculating = [row for row in rows if row["flags"] & Row.SPECULATE]

    def of(name: str, dtype: str, default: Any = 0, among: list[dict[str, Any]] = rows) -> np.ndarray:
        return np.array([row.get(name, default) for row in among], dtype)

    def flat(name: str, dtype: str = "<i4") -> np.ndarray:
        return np.array([x for row in rows for x in row.get(name, ())], dtype)

    def sizes(name: str, among: list[dict[str, Any]]) -> np.ndarray:
        return np.array([len(row.get(name, ())) for row in among], "<u4")

    first_rows = FirstRows(
        starts=of("start", "<u4", 0, first),
        seeds=of("seed", "<u8", 0, first),
        choices=of("choice", "<u2", 0, first),
        temperatures=of("temperature", "<f4", 0.0, first),
        top_ks=of("top_k", "<u4", 0, first),
        top_ps=of("top_p", "<f4", 1.0, first),
        min_ps=of("min_p", "<f4", 0.0, first),
        repetition_penalties=of("repetition_penalty", "<f4", 1.0, first),
        presence_penalties=of("presence_penalty", "<f4", 0.0, first),
        frequency_penalties=of("frequency_penalty", "<f4", 0.0, first),
        prompt_counts=of("prompt_count", "<u4", 0, first),
        logprobs=of("logprobs", "<i4", -1, first),
        min_lens=of("min_len", "<u4", 0, first),
        past_counts=sizes("past", first),
        bias_counts=sizes("bias_ids", first),
        stop_counts=sizes("stop_ids", first),
        past=flat("past"),
        bias_ids=flat("bias_ids"),
        bias_values=flat("bias_values", "<f4"),
        stop_ids=flat("stop_ids"),
    )
    return StepPlan(
        step=step,
        slots=of("slot", "<u2"),
        counts=of("count", "<u4", 1),
        flags=of("flags", "<u1"),
        page_counts=sizes("pages", rows),
        pages=flat("pages"),
        ids=flat("ids"),
        first_rows=first_rows,
        target_counts=sizes("targets", scored),
        target_tops=of("target_top", "<u4", 0, scored),
        targets=flat("targets"),
        most_drafts=of("most_drafts", "<u1", 0, speculating),
        copy_from=np.array([a for a, _ in copies or ()], "<i4"),
        copy_to=np.array([b for _, b in copies or ()], "<i4"),
    )


@dataclass
class Answer:
    """What one step brought: rank 0's result, and the whole logits (count, vocabulary) of each LOGITS row."""

    result: StepResult
    logits: dict[int, np.ndarray] = field(default_factory=dict)


class WorkerGroup:
    """`deployment.settings.tp` workers; use as a context manager."""

    def __init__(self, deployment: Deployment, pages: int | None = None):
        self.deployment = deployment
        self.size = deployment.settings.tp
        self.pages = pages or deployment.num_pages
        self.next_step = 1
        self.results: dict[int, StepResult] = {}
        self.logits: dict[int, list[Logits]] = {}

    def __enter__(self) -> WorkerGroup:
        self.run_dir = rundir.create()
        self.context = zmq.Context()
        self.control = self._bind("control")
        self.plans = self._bind(f"plans.{EPOCH}")
        board_fd = board.create(self.size)
        self.board = board.Board(board_fd)
        shm_fd = segment.create(self.size) if self.size > 1 else None
        self.children: list[Worker] = []
        self.unread: list[tuple[bytes, Message]] = []
        for rank in range(self.size):
            charge = Charge(
                role="worker", rank=rank, epoch=EPOCH, run_dir=str(self.run_dir.path), launcher_pid=os.getpid(),
                board_fd=board_fd, shm_fd=shm_fd, deployment=self.deployment,
            )  # fmt: skip
            self.children.append(zygote().spawn(charge))
        if shm_fd is not None:
            os.close(shm_fd)
        os.close(board_fd)
        try:
            loaded = self._control(Loaded)
            for sender in loaded:
                self.control.send_multipart([sender, encode(Serve(self.pages), EPOCH)])
            self._control(Ready)
            hellos = {self._recv(self.plans)[0] for _ in range(self.size)}
            assert hellos == {str(rank).encode() for rank in range(self.size)}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.reap()
        self.context.destroy(linger=0)
        self.run_dir.remove()
        os.close(self.run_dir.lock_fd)

    def send(self, step_plan: StepPlan) -> int:
        """Send a plan to all ranks; its step number is set here."""
        step_plan = replace(step_plan, step=self.next_step)
        data = encode(step_plan, EPOCH)
        for rank in range(self.size):
            self.plans.send_multipart([str(rank).encode(), data])
        self.next_step += 1
        return step_plan.step

    def send_masks(self, step: int, allowed: list[list[int]]) -> None:
        """The ids that each MASKED row of the step may sample."""
        bits = np.zeros((len(allowed), -(-self.deployment.spec.vocab_size // 32) * 32), bool)
        for row, ids in zip(bits, allowed):
            row[ids] = True
        words = np.packbits(bits, axis=1, bitorder="little").view("<u4").reshape(-1)
        for rank in range(self.size):
            self.plans.send_multipart([str(rank).encode(), encode(SampleMasks(step, words), EPOCH)])

    def receive(self, step: int, logits_rows: int = 0) -> Answer:
        """Wait for a step's result and for the logits of so many rows from every rank."""
        while step not in self.results or len(self.logits.get(step, ())) < logits_rows * self.size:
            _, message = self._recv(self.plans)
            if isinstance(message, StepResult):
                self.results[message.step] = message
            elif isinstance(message, Logits):
                self.logits.setdefault(message.step, []).append(message)
            assert not isinstance(message, Hello)
        rows: dict[int, list[Logits]] = {}
        for part in sorted(self.logits.pop(step, ()), key=lambda part: part.first_id):
            rows.setdefault(part.row, []).append(part)
        whole = {row: np.concatenate([p.values.reshape(p.count, -1) for p in parts], 1) for row, parts in rows.items()}
        return Answer(self.results.pop(step), whole)

    def run(self, rows: list[dict[str, Any]], copies: list[tuple[int, int]] | None = None) -> Answer:
        """One step, start to end."""
        wanted = sum(1 for row in rows if row["flags"] & Row.LOGITS)
        return self.receive(self.send(plan(0, rows, copies)), wanted)

    def _bind(self, name: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{self.run_dir.path}/{name}")
        return socket

    def _control(self, kind: type) -> list[bytes]:
        """Wait until every worker has sent a message of this kind; returns the senders."""
        senders: list[bytes] = []
        while len(senders) < self.size:
            sender, message = self._recv(self.control)
            if isinstance(message, kind):
                senders.append(sender)
        return senders

    def _recv(self, socket: zmq.Socket[bytes]) -> tuple[bytes, Message]:
        deadline = time.monotonic() + LIMIT_S
        while not (self.unread and socket is self.control) and not socket.poll(100):
            self.check()
            assert time.monotonic() < deadline, "no message in time"
        if self.unread and socket is self.control:
            return self.unread.pop(0)
        return self._read(socket)

    def _read(self, socket: zmq.Socket[bytes]) -> tuple[bytes, Message]:
        sender, data = socket.recv_multipart()
        message = decode(data)[1]
        if isinstance(message, Failure):
            raise WorkerFailed(f"rank {message.rank} at step {message.step}: {message.text}")
        return sender, message

    def check(self) -> None:
        """Raise WorkerFailed if a worker has reported a failure or has ended."""
        while self.control.poll(0):
            self.unread.append(self._read(self.control))
        for child in self.children:
            if child.wait(0):
                raise WorkerFailed(f"{child.title} ended")
