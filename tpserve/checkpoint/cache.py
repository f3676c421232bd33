"""The user's cache folder: what is made once from other files, and how it is made only once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tpserve.settings import UserError


def cache_dir() -> Path:
    """$TPSERVE_CACHE, by default tpserve/ in the user's cache folder. It need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("TPSERVE_CACHE") or f"{home}/tpserve"))


def make_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """The folder, which `make` fills first if it is not there; `what` names it to whoever has to wait.

    It appears complete or not at all, also when several processes want it at once. `make` gets an empty folder
    beside it, which is renamed when `make` returns.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock"), what):
        if folder.is_dir():
            return folder
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        try:
            partial.mkdir()
            make(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def run_module(module: str, *arguments: str) -> None:
    """Run ``python -m module arguments`` in a fresh interpreter, for work whose imports do not belong in this one.

    Its stderr, where progress is shown, is ours. When it fails, what it printed on stdout is the UserError's text.
    """
    # -P: a folder that happens to hold torch.py or tpserve/ must not be imported from.
    command = [sys.executable, "-P", "-m", module, *arguments]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise UserError(result.stdout.strip() or f"{module} ended with exit status {result.returncode}")


@contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file; the kernel frees it however this process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: another process is making it; waiting", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
