"""Starting, watching and ending one child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import BaseModel

from tpserve.child import Charge
from tpserve.interpreter import command, environment, signals_wait


@dataclass(frozen=True)
class Child:
    """A running child; its pidfd is readable when it has ended."""

    charge: Charge
    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def title(self) -> str:
        """'frontend', 'coordinator' or 'worker 0/2'."""
        return self.charge.title

    def kill(self) -> None:
        """SIGKILL: coordinator and workers hold nothing that cannot be rebuilt."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)

    def was_killed(self) -> bool:
        """Whether a signal has ended it; its status is taken in then."""
        return (self.process.poll() or 0) < 0

    def cause_of_death(self) -> str:
        """How it ended, after it has."""
        return cause_of_death(self.process.wait())

    def reap(self) -> None:
        """Take in its status, after it has ended, and let go of it."""
        self.process.wait()
        os.close(self.pidfd)


@dataclass(frozen=True)
class Parent:
    """The process that started the launcher and takes the frontend's place: watched like a child, and left alone."""

    pidfd: int
    title = "frontend"

    def kill(self) -> None:
        """It ends when its user likes."""

    def reap(self) -> None:
        """Let go of it."""
        os.close(self.pidfd)


def cause_of_death(status: int) -> str:
    """What a process's status says of its end."""
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"killed by signal {-status}{names.get(-status, '')}"


def spawn(charge: Charge, inherited: tuple[int, ...] = ()) -> Child:
    """Start a fresh interpreter for the charge, with these descriptors beside those the charge names.

    Must be called from the launcher's main thread: the parent-death signal follows the thread.
    """
    named = (fd for fd in (charge.board_fd, charge.listen_fd, charge.shm_fd) if fd is not None)
    with signals_wait():
        process = interpreter(f"tpserve.{charge.role}", charge, (*named, *inherited), _variables(charge))
    return Child(charge, process, os.pidfd_open(process.pid))


def interpreter(
    module: str,
    document: BaseModel,
    inherited: tuple[int, ...],
    variables: Mapping[str, str] = MappingProxyType({}),
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Run `python -m MODULE FD` in a fresh interpreter, with more environment variables; the document lies in FD as JSON."""
    # Where stderr was closed when this process began, 2 is whatever was opened since.
    output = subprocess.DEVNULL if sys.__stderr__ is None else 2
    fd = os.memfd_create("tpserve-document")
    try:
        os.write(fd, document.model_dump_json().encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            command(module, str(fd)),
            stdin=subprocess.DEVNULL,
            stdout=output,  # stdout is the ready line's, or the user's
            stderr=output,
            pass_fds=(fd, *inherited),
            env={**environment(), **variables},
            start_new_session=new_session,
        )
    finally:
        os.close(fd)


def _variables(charge: Charge) -> dict[str, str]:
    if charge.role != "worker":
        return {}
    threads = str(charge.deployment.threads_per_rank)
    # Huge pages for malloc: a step reads all weights, and with small pages a fifth of the time goes into finding them.
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1")))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLIBC_TUNABLES": tunables}
