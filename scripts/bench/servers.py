"""Servers side by side, of which one at a time takes CPU: the others are stopped by signal while it is measured."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_PATIENCE_S = 900  # vLLM compiles when it starts first

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """CPU time of all processes of the machine so far."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def tpserve(model: str, port: int, *flags: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment variables of tpserve, which answers to the model name "peer", as the peers do."""
    launch = [sys.executable, "-m", "tpserve.cli", "launch", "--model", model, "--port", str(port)]
    return [*launch, "--served-model-name", "peer", "--dtype", "bfloat16", "--log-level", "warning", *flags], {}


class Server:
    """A server in a process group of its own, for the length of a `with` block; stopped but within `running`."""

    def __init__(self, line: list[str], variables: dict[str, str], port: int):
        self._line = line
        self._variables = variables
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Server:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # an exception, so that no server is left behind
        self._log = tempfile.TemporaryFile()
        began = time.perf_counter()
        environment = {**os.environ, **self._variables}
        out = self._log
        self._process = subprocess.Popen(self._line, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            self._wait_ready(began)
        except BaseException:
            self._end()
            raise
        self.start_s = time.perf_counter() - began
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def processes(self) -> dict[int, list[str]]:
        """Those of its group: pid -> the fields of /proc/PID/stat from the state on."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = file.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    found[int(file.parent.name)] = fields
        return found

    def cpu_s(self) -> float:
        """CPU time of its processes, those that ended left out."""
        return sum(int(fields[11]) + int(fields[12]) for fields in self.processes().values()) / _TICKS

    def _wait_ready(self, began: float) -> None:
        while not self._ready():
            if self._process.poll() is not None or time.perf_counter() - began > _PATIENCE_S:
                self._log.seek(0)
                shown = self._log.read().decode(errors="replace")[-3000:]
                raise SystemExit(f"{shown}\nthe server did not start: {' '.join(self._line)}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end(self) -> None:
        """Politely, to its first process; after that whatever is left of its group."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()
