"""Conversions in a child, as their imports take seconds and do not belong in the launcher: both ends of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tpserve import log
from tpserve.child import die_with_parent
from tpserve.interpreter import command, environment, signals_are_ignored, signals_wait
from tpserve.settings import UserError


def run_converter(module: str, *arguments: str | Path) -> None:
    """Run ``python -m module arguments``, which is a `converter_main`, in a fresh interpreter.

    Its stderr, where progress is shown, is ours. When it fails, what it printed on stdout is the UserError's text.
    """
    log.fill_standard_streams()  # so that the pipe to come is none of them
    line = command(module, *map(str, arguments), str(os.getpid()))
    try:
        with signals_wait():
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment(), text=True)
    except OSError as error:  # no processes or no memory left
        raise UserError(f"cannot run {module}: {error}") from error
    with process:
        try:
            output, _ = process.communicate()
        except BaseException:  # Ctrl-C, or the launcher's end
            process.kill()
            raise
    if process.returncode:
        raise UserError(" ".join(output.split()) or f"{module} ended with exit status {process.returncode}")


def converter_main(convert: Callable[..., None]) -> int:
    """The child: `convert` what the arguments name; the parent's id comes after them. Returns the exit status.

    Why it failed is printed on stdout.
    """
    *arguments, parent = sys.argv[1:]
    signals_are_ignored()
    die_with_parent(int(parent))
    try:
        convert(*arguments)
    except UserError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"cannot convert into the cache: {error}; see to the files' rights and to room, or set TPSERVE_CACHE")
        return 1
    except Exception as error:  # a fault of ours: the user gets a line all the same
        print(f"cannot convert {' '.join(arguments)}: {type(error).__name__}: {error}")
        return 1
    return 0
