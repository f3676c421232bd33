"""Log lines on stderr, each with its process and rank."""

from __future__ import annotations

import logging
import os
import sys


def setup(title: str, level: str) -> logging.Logger:
    """Configure this process's logger; `title` is such as 'launcher' or 'worker 0/2'."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s [{title}] %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("tpserve")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


def fill_standard_streams() -> None:
    """Open what the caller closed: else another descriptor would become a child's stdin, stdout or stderr."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
