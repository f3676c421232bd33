"""Signals as bytes that a loop can read."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

from tpserve.interpreter import SIGNALS


@contextlib.contextmanager
def caught() -> Iterator[socket.socket]:
    """A socket from which the numbers of caught signals can be read, a byte each. Afterwards signals are ignored."""
    signals, notify = socket.socketpair()
    notify.setblocking(False)
    signal.set_wakeup_fd(notify.detach())  # kept open as long as the process lives
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, nobody would learn how a child ended
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup holds
            signal.signal(number, lambda *_: None)  # the descriptor carries the number to the loop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield signals
    finally:
        for number in SIGNALS:  # it is ending: another one must not change how
            signal.signal(number, signal.SIG_IGN)
        os.close(signal.set_wakeup_fd(-1))
        signals.close()
