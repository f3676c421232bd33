"""Log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from tpserve import log

LOGGERS = ("tpserve", "asyncio", "py.warnings")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Loggers as they were."""
    before = [(logger, [*logger.handlers], logger.propagate, logger.level) for logger in map(logging.getLogger, LOGGERS)]
    yield
    logging.captureWarnings(False)
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_text_line_has_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("worker 0/2", "info").warning("it is %s", "so", extra=log.with_fields({"a": 1}))
    assert capsys.readouterr().err.split(" ", 1)[1] == "WARNING [worker 0/2] it is so\n"


def test_json_line_is_an_object_with_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup("frontend", "info", "json")
    logger.info("a\nb é", extra=log.with_fields({"status": 200}))
    logger.debug("hidden")
    (line,) = capsys.readouterr().err.splitlines()
    shown = json.loads(line)
    assert shown.pop("time").endswith("+00:00")
    assert shown == {"level": "info", "process": "frontend", "message": "a\nb é", "status": 200}


def test_json_line_of_an_error_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup("frontend", "info", "json")
    try:
        raise ValueError("oh")
    except ValueError:
        logger.exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["traceback"].endswith("ValueError: oh")


def test_lines_of_libraries_are_ours(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("frontend", "info", "json")
    logging.getLogger("asyncio").error("lost")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    messages = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert messages[0] == "lost"
    assert "UserWarning: old" in messages[1]
