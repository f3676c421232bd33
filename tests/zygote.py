"""Worker processes without the seconds that importing torch takes: forks of one process that has imported it.

A worker begins here as the launcher's do, with a charge in a descriptor, and runs the same `main`.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tpserve.child import Charge

_ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES = 1 << 17


@dataclass
class Worker:
    """A forked worker; its pidfd is readable when it has ended."""

    title: str
    pidfd: int

    def kill(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, limit_s: float) -> bool:
        """Whether it ends within the limit."""
        return bool(select.select([self.pidfd], [], [], limit_s)[0])

    def reap(self) -> None:
        assert self.wait(10), f"{self.title} does not end"
        os.close(self.pidfd)


@dataclass
class Zygote:
    """The process that forks."""

    process: subprocess.Popen[bytes]
    channel: socket.socket

    def spawn(self, charge: Charge) -> Worker:
        charge = charge.model_copy(update={"launcher_pid": self.process.pid})
        fds = [fd for fd in (charge.board_fd, charge.shm_fd) if fd is not None]
        socket.send_fds(self.channel, [charge.model_dump_json().encode()], fds)
        _, pidfds, _, _ = socket.recv_fds(self.channel, 1, 1)
        return Worker(charge.title, pidfds[0])


@functools.cache
def zygote() -> Zygote:
    """The one of this test run; it ends with its last channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", "from tests.zygote import main; main()", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=_ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Zygote(process, ours)


def main() -> None:
    """Fork a worker for every charge that comes."""
    import tpserve.worker.process  # noqa: F401  what the forks share

    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            channel.close()
            os._exit(_work(Charge.model_validate_json(message), fds))
        pidfd = os.pidfd_open(pid)
        socket.send_fds(channel, [b"+"], [pidfd])
        for fd in (pidfd, *fds):
            os.close(fd)


def _work(charge: Charge, fds: list[int]) -> int:
    from tpserve.worker.__main__ import main as work

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    charge = charge.model_copy(update={"board_fd": fds[0], "shm_fd": fds[1] if len(fds) > 1 else None})
    document = os.memfd_create("charge")
    os.write(document, charge.model_dump_json().encode())
    os.lseek(document, 0, os.SEEK_SET)
    sys.argv = ["worker", str(document)]
    return work()
