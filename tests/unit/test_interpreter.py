"""Children find the tpserve that started them, wherever it was found."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tpserve.interpreter import command, environment

ROOT = Path(__file__).parents[2]


def test_child_finds_what_only_the_scripts_own_path_names(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import subprocess\n"
        "from tpserve.interpreter import command, environment\n"
        "sys.exit(subprocess.run(command('tpserve.interpreter'), env=environment()).returncode)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_users_own_path_is_kept_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert environment() == {**os.environ, "PYTHONPATH": f"{ROOT}:/a:/b"}
    assert command("m", "x")[1:] == ["-P", "-m", "m", "x"]


def test_installed_package_needs_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(ROOT)])
    assert environment() == dict(os.environ)
