"""The user's cache folder: what is made once from other files, and how it is made only once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tpserve.settings import UserError


def cache_dir() -> Path:
    """$TPSERVE_CACHE, by default tpserve/ in the user's cache folder. It need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("TPSERVE_CACHE") or f"{home}/tpserve"))


def key(version: int, files: Sequence[Path]) -> str:
    """Names what is made of the files, as PLACE-STATE: where they really are, and their sizes and times of last change.

    `version` is that of what is made: with another one the same files have another state.
    """
    states = [file.stat() for file in files]
    place = [(file.name, os.path.realpath(file)) for file in files]
    state = (version, *((found.st_size, found.st_mtime_ns) for found in states))
    return "-".join(hashlib.sha256(repr(part).encode()).hexdigest()[:10] for part in (place, state))


def superseded(folder: Path) -> list[Path]:
    """Folders that were made of the same files as this one, which is named by `key`, in another state of theirs."""
    place, _, state = folder.name.rpartition("-")
    others = (other for other in folder.parent.glob("*") if other.name.startswith(f"{place}-") and other != folder)
    return sorted(other for other in others if other.is_dir() and len(other.name) == len(f"{place}-{state}"))


def make_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """The folder, which `make` fills first if it is not there; `what` names it to whoever has to wait.

    It appears complete or not at all, also when several processes want it at once. `make` gets an empty folder
    beside it, which is renamed when `make` returns. Raises UserError where that cannot be written.
    """
    try:
        return _make_once(folder, make, what)
    except OSError as error:
        raise UserError(
            f"cannot write the cache {error.filename or folder.parent}: {error.strerror or error};"
            " set TPSERVE_CACHE to a folder that can be written"
        ) from error


def _make_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
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
