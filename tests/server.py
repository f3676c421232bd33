"""A real server for tests: `tpserve launch` as a process, stopped and checked at the end."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

START_LIMIT_S = 60.0


def wait_for(condition: Callable[[], Any], limit_s: float = 10.0, what: str = "condition") -> Any:
    """The condition's first true value; fails after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} within {limit_s} s"
        time.sleep(0.02)
    return value


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that have not ended."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


class Server:
    """`tpserve launch --port 0 ARGS`; use as a context manager. `url` is known once it is ready."""

    def __init__(self, *args: str | Path, env: dict[str, str] | None = None, wait: bool = True):
        self.args = [str(arg) for arg in args]
        self.env = {**os.environ, **(env or {})}
        self.wait = wait
        self.url = ""

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "tpserve.cli", "launch", "--port", "0", *self.args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.stdout), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            if self.wait:
                self.wait_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        running = self.process.poll() is None
        if running:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        for reader in self._readers:
            reader.join(5)
        # Who ended before has been looked at by the test; who served until now must have ended well.
        assert not running or self.process.returncode == 0, self.log

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
        stream.close()

    def wait_ready(self) -> None:
        """Wait for the ready line."""
        wait_for(lambda: self.stdout or self.process.poll() is not None, START_LIMIT_S, "ready line")
        assert self.stdout, f"the server ended with {self.process.returncode}:\n" + "\n".join(self.stderr)
        self.url = re.fullmatch(r"ready (http://\S+)", self.stdout[0])[1]  # type: ignore[index]

    @property
    def log(self) -> str:
        """All of stderr so far."""
        return "\n".join(self.stderr)

    def pids(self) -> dict[str, int]:
        """Process id by title without 'tpserve: '."""
        titles = {}
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # which a zombie counts as
                titles[" ".join(process.cmdline()).strip()] = process.pid
        return {title.removeprefix("tpserve: "): pid for title, pid in titles.items() if title.startswith("tpserve: ")}

    def stop(self, number: int = signal.SIGTERM, limit_s: float = 40.0) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(limit_s)

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client of this server that no proxy variable leads astray."""
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, **options)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """One completion, as the server's JSON."""
        with self.client() as client:
            response = client.post("/v1/completions", json={"prompt": prompt, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def text(self, prompt: Any, **body: Any) -> str:
        """The text of the only choice."""
        answer: str = self.complete(prompt, **body)["choices"][0]["text"]
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that carry these labels."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}(\{{| )", line)]
        assert found, f"no metric {name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(part in line for part in wanted))
