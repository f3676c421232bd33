"""Fresh interpreters for children: the command, an environment in which they find this tpserve, a quiet beginning."""

from __future__ import annotations

import os
import signal
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal and a supervisor send them to the whole group


def command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments``, by the interpreter that runs this."""
    # -P: a folder that happens to hold torch.py or tpserve/ must not be imported from.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's. Where its tpserve comes from by its own `sys.path`, children find it by PYTHONPATH."""
    root = str(Path(__file__).parents[1])
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


@contextmanager
def signals_wait() -> Iterator[None]:
    """Children started in here begin with `SIGNALS` blocked, until they call `signals_are_ignored`.

    Else Ctrl-C would meet a child that is still importing, which answers with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_are_ignored() -> None:
    """In the child: they are the parent's, which decides what they mean and ends this process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
