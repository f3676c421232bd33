"""The run directory of a server: its sockets, and a lock that tells whether it lives.

The lock is held through a descriptor that the frontend inherits, so that it is free when both are gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "tpserve-run-"
_NEW = ".tpserve-new-"  # not swept while its maker may still be about to lock it
_SUFFIX = "[a-z0-9_]" * 8  # which mkdtemp appends
_LOCK = "tpserve.lock"
_NEW_AGE_S = 60
_SOCKET_PATH_BYTES = 107  # what sun_path holds
_LONGEST_NAME = "/tpserve-run-12345678/requests.4294967295"


@dataclass(frozen=True)
class RunDir:
    """A locked run directory, mode 0700."""

    path: Path
    lock_fd: int

    def remove(self) -> None:
        """Delete it; the frontend may have done so already."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
        os.close(self.lock_fd)


def create() -> RunDir:
    """A new run directory; those that dead servers left behind are removed first."""
    parent = _parent()
    sweep(parent)
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock_fd = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    # Renamed only when locked: a sweep sees locked or dead directories, nothing between.
    path = new.rename(parent / new.name.replace(_NEW, _PREFIX))
    return RunDir(path, lock_fd)


def sweep(parent: Path) -> None:
    """Remove this user's run directories whose lock nobody holds."""
    for path in parent.glob(_PREFIX + _SUFFIX):
        if _is_dead(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(_NEW + _SUFFIX):
        age_s = _age_s(path)
        if age_s is not None and age_s > _NEW_AGE_S:
            shutil.rmtree(path, ignore_errors=True)


def _age_s(path: Path) -> float | None:
    """Seconds since this directory of ours was changed; None if it is not ours, or has just gone."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # renamed or removed by another server that starts at this moment
        return None
    ours = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
    return time.time() - found.st_mtime if ours else None


def _is_dead(path: Path) -> bool:
    if _age_s(path) is None:
        return False
    try:
        fd = os.open(path / _LOCK, os.O_RDWR)
    except OSError:
        return False  # not a run directory of ours, or just removed
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _parent() -> Path:
    """The first usable place whose socket paths fit the kernel's limit."""
    for place in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        fits = place and len(os.fsencode(place)) + len(_LONGEST_NAME) <= _SOCKET_PATH_BYTES
        if place and fits and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise OSError("no directory for sockets: XDG_RUNTIME_DIR, TMPDIR and /tmp are not writable, or too long")
