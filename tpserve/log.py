"""Log lines on stderr, each with its process and rank: as text, or as JSON objects."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

_OTHERS = ("asyncio", "py.warnings")  # loggers of libraries whose lines are ours


def setup(title: str, level: str, form: Literal["text", "json"] = "text") -> logging.Logger:
    """Configure this process's logger; `title` is such as 'launcher' or 'worker 0/2'."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s [{title}] %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonFormatter(title) if form == "json" else text)
    logger = logging.getLogger("tpserve")
    logger.setLevel(level.upper())
    for ours in (logger, *map(logging.getLogger, _OTHERS)):
        ours.handlers[:] = [handler]
        ours.propagate = False
    logging.captureWarnings(True)
    return logger


def with_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """For a log call's `extra`: what its JSON object has besides."""
    return {"fields": fields}


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, message; the fields of `with_fields`; a traceback if there is one."""

    def __init__(self, title: str):
        super().__init__()
        self._title = title

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._title,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def fill_standard_streams() -> None:
    """Open what the caller closed: else another descriptor would become a child's stdin, stdout or stderr."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
