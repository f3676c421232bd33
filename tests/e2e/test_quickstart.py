"""scripts/quickstart as a newcomer runs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "scripts/quickstart")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts/quickstart makes .venv; scripts/test tests in it"),
]


def test_quickstart_once_shows_an_answer_and_ends() -> None:
    result = subprocess.run([QUICKSTART, "--once"], capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    question, answer = result.stdout.splitlines()[-2:]
    assert question == "> Explain gravity in one sentence."
    assert answer.startswith("Gravity is a fundamental concept in physics")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the line that it prints is a curl command")
def test_quickstart_leaves_a_server_that_answers_the_printed_command_and_stops_on_sigterm() -> None:
    with subprocess.Popen([QUICKSTART], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as quickstart:
        assert quickstart.stdout is not None
        told: list[str] = []
        for line in quickstart.stdout:
            told.append(line.rstrip())
            if line.startswith("Stop it:"):
                break
        command = next(line.removeprefix("The server goes on. Ask it:") for line in told if "Ask it:" in line)
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert '"finish_reason"' in answer.stdout
        server = int(re.findall(r"kill (\d+)", told[-1])[0])
        quickstart.send_signal(signal.SIGTERM)
        assert quickstart.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_quickstart_with_a_server_that_cannot_start_shows_why_and_fails() -> None:
    environment = {**os.environ, "TPSERVE_KV_CACHE_MEMORY": "1"}
    result = subprocess.run([QUICKSTART, "--once"], env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 2
    assert "--kv-cache-memory" in result.stderr
