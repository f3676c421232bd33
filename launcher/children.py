"""Starting, watching and ending one child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from tpserve.child import SIGNALS, Charge


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
        status = self.process.wait()
        if status >= 0:
            return f"exit status {status}"
        names = {number.value: f" ({number.name})" for number in signal.Signals}
        return f"killed by signal {-status}{names.get(-status, '')}"

    def reap(self) -> None:
        """Take in its status, after it has ended, and let go of it."""
        self.process.wait()
        os.close(self.pidfd)


def spawn(charge: Charge, inherited: tuple[int, ...] = ()) -> Child:
    """Start a fresh interpreter for the charge, with these descriptors beside those the charge names.

    Must be called from the launcher's main thread: the parent-death signal follows the thread.
    """
    document = os.memfd_create("tpserve-charge")
    os.write(document, charge.model_dump_json().encode())
    os.lseek(document, 0, os.SEEK_SET)
    named = (fd for fd in (document, charge.board_fd, charge.listen_fd, charge.shm_fd) if fd is not None)
    # Until the child has said what signals mean to it, they wait: `child.begin` lets them in.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process = subprocess.Popen(
            # -P: a folder that happens to hold torch.py or tpserve/ must not be imported from.
            [sys.executable, "-P", "-m", f"tpserve.{charge.role}", str(document)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is the ready line's
            pass_fds=(*named, *inherited),
            env=_environment(charge),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(document)
    return Child(charge, process, os.pidfd_open(process.pid))


def _environment(charge: Charge) -> dict[str, str]:
    if charge.role != "worker":
        return dict(os.environ)
    threads = str(charge.deployment.threads_per_rank)
    # Huge pages for malloc: a step reads all weights, and with small pages a fifth of the time goes into finding them.
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1")))
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLIBC_TUNABLES": tunables}
