"""How a child process begins and ends: its charge from the launcher, and its line to it.

A child is a fresh interpreter, started as ``python -m tpserve.<role> FD``. The descriptor holds its
charge as JSON; other descriptors that it inherits are named in there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from typing import Literal

import setproctitle
import zmq
from pydantic import BaseModel, ConfigDict

from tpserve import log
from tpserve.board import Board, Writer
from tpserve.deployment import Deployment
from tpserve.interpreter import signals_are_ignored
from tpserve.messages import Failure, Message, Started, decode, encode
from tpserve.settings import UserError

_PR_SET_PDEATHSIG = 1


class Seat(BaseModel):
    """A process's place among those of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["frontend", "coordinator", "worker"]
    rank: int = 0  # of a worker
    epoch: int
    run_dir: str
    deployment: Deployment

    @property
    def title(self) -> str:
        """'frontend', 'coordinator' or 'worker 0/2'."""
        return f"worker {self.rank}/{self.deployment.settings.tp}" if self.role == "worker" else self.role

    def address(self, socket: Literal["control", "requests", "plans"]) -> str:
        """Where a socket of this run lies; all but `control` are made anew in each epoch."""
        return f"ipc://{self.run_dir}/{socket}" + ("" if socket == "control" else f".{self.epoch}")


class Charge(Seat):
    """What the launcher tells a child at birth."""

    launcher_pid: int
    board_fd: int
    listen_fd: int | None = None  # frontend: the bound socket, to listen on
    shm_fd: int | None = None  # worker: memory of the collectives, if they go through shared memory

    def beats(self) -> Writer:
        """This process's record on the board."""
        return Board(self.board_fd).writer(0 if self.role == "coordinator" else self.rank + 1)


class Control:
    """The launcher's counterpart on `control`. Not thread-safe; asyncio users poll `socket` themselves."""

    def __init__(self, seat: Seat, context: zmq.Context[zmq.Socket[bytes]]):
        self._epoch = seat.epoch
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.IDENTITY, seat.title.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms; the launcher may be about to bind it
        self.socket.connect(seat.address("control"))

    def send(self, message: Message) -> None:
        """Queue a message to the launcher."""
        self.socket.send(encode(message, self._epoch))

    def receive(self, timeout_ms: int | None = None) -> Message | None:
        """The launcher's next message, or None when none came in time."""
        if not self.socket.poll(timeout_ms):
            return None
        return decode(self.socket.recv())[1]


def begin(argv: list[str]) -> Charge:
    """Read the charge and become the process it names: title, log, signals, tie to the launcher."""
    with open(int(argv[1]), "rb") as file:
        charge = Charge.model_validate_json(file.read())
    setproctitle.setproctitle(f"tpserve: {charge.title}")
    log.setup(charge.title, charge.deployment.settings.log_level, charge.deployment.settings.log_format)
    signals_are_ignored()
    if charge.role != "frontend":
        die_with_parent(charge.launcher_pid)
    return charge


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def run(charge: Charge, control: Control, main: Callable[[], None], step: Callable[[], int] = lambda: 0) -> int:
    """Run `main`; report its failure to the launcher. Returns the exit status."""
    control.send(Started(charge.role, charge.rank, os.getpid()))
    try:
        main()
        return 0
    except BaseException as error:
        detail = "" if isinstance(error, UserError) else traceback.format_exc()
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        control.send(Failure(charge.role, charge.rank, step(), " ".join(text.split()), detail))
        control.socket.close()  # lingers until the launcher has it
        return 1
