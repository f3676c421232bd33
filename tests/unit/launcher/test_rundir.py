from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import rundir


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    short = Path(f"/tmp/t{os.getpid()}-{abs(hash(tmp_path)) % 10**6}")
    short.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    yield short
    for path in short.iterdir():
        rundir.shutil.rmtree(path)
    short.rmdir()


def test_create_makes_a_private_locked_directory_and_remove_deletes_it(parent: Path) -> None:
    made = rundir.create()
    assert made.path.parent == parent
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert (made.path / "tpserve.lock").exists()
    made.remove()
    os.close(made.lock_fd)
    assert list(parent.iterdir()) == []


def test_create_sweeps_dead_run_directories_and_spares_living_ones(parent: Path) -> None:
    living = rundir.create()
    code = "from launcher import rundir; import os; print(rundir.create().path); os._exit(1)"
    dead = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip())
    assert dead.exists()
    assert dead.parent == parent
    others = [parent / name for name in ("tpserve-run-", "tpserve-run-a-b-c-d-", "tpserve-run-abcdefg1", "tpserve-data")]
    for other in others:
        other.mkdir(mode=0o755)
        (other / "tpserve.lock").touch()
    (parent / "tpserve-run-abcdefg2").mkdir(mode=0o700)  # no lock in it
    made = rundir.create()
    assert not dead.exists()
    assert living.path.exists()
    assert all(other.exists() for other in others)
    assert (parent / "tpserve-run-abcdefg2").exists()
    for run_dir in (living, made):
        run_dir.remove()
        os.close(run_dir.lock_fd)


MANY = """
import os, sys
from launcher import rundir
for _ in range(40):
    made = rundir.create()
    made.remove()
    os.close(made.lock_fd)
"""


def test_create_by_many_processes_at_once_never_fails(parent: Path) -> None:
    starters = [subprocess.Popen([sys.executable, "-c", MANY], stderr=subprocess.PIPE, text=True) for _ in range(6)]
    assert [starter.communicate()[1] for starter in starters] == [""] * 6
    assert [starter.returncode for starter in starters] == [0] * 6
    assert list(parent.iterdir()) == []


def test_create_with_a_parent_too_long_for_socket_paths_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    made = rundir.create()
    assert made.path.parent != long
    made.remove()
    os.close(made.lock_fd)
